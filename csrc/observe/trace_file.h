// TraceFile: the black box as a file, byte for byte. `mycoll trace` reads such files.
//
// Written automatically when a group fails, replacing that of an earlier failure, and on request.
// The path is that of MYCOLL_TRACE_FILE or of torch's own variables, else
//   /tmp/mycoll-<uid>/<job>/rank_<rank>
// one folder for each job that failed. Folders are removed when they are older than a day and not
// among the latest ten, or not among the latest hundred.
//
// Thread contract: all [any thread]; the functions that write take a few milliseconds.
#pragma once

#include <string>

#include "base/status.h"

namespace mycoll {

class TraceFile {
 public:
  // Requests the file after a group's failure. Writes nothing: may be called under locks.
  static void want();
  // "mycoll trace FOLDER", with the folder of the file; empty when none will be written.
  static std::string command();
  // Writes the file if it is requested and not yet written. A call that fails by the failure calls
  // this before it returns.
  static void writeWanted();
  // For the background: writes the file now if no call of the program can know of the failure
  // (isUnseen), or if no failing call has written the requested file for a while, as the process
  // may end without another call. The first failing call writes it again, and so adds its entry.
  static void writeInBackground(bool isUnseen);

  // On request. Empty path: as after a failure. Readers see the complete file or none.
  static Status write(const std::string& path, std::string* written);
};

}  // namespace mycoll
