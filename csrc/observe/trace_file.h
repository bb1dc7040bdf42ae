// TraceFile: the black box as a file, its bytes as they are. `mycoll trace` reads such files.
//
// Written by itself when a group fails, in place of what an earlier failure wrote, and on request.
// It goes where MYCOLL_TRACE_FILE or torch's own variables say, else to
//   /tmp/mycoll-<uid>/<job>/rank_<rank>
// one folder for each job that failed. Folders are removed when they are older than a day and not
// among the latest ten, or not among the latest hundred.
//
// Thread contract: all [any thread]; those that write take a few milliseconds.
#pragma once

#include <string>

#include "base/status.h"

namespace mycoll {

class TraceFile {
 public:
  // A group has failed. Writes nothing: may be called under locks.
  static void want();
  // "mycoll trace FOLDER", for the folder where it will be; empty when there will be none.
  static std::string command();
  // Writes it, unless that is done or nobody wants it. A call that fails by the failure does so
  // before it returns.
  static void writeWanted();
  // For the background: no call that fails by it has written for a while.
  static bool isLeftOver();
  // For the background: what there is, as the process may end without another call. The first call
  // that fails by it still writes, and so adds itself.
  static void writeMeanwhile();

  // On request. Empty path: as after a failure. Readers see all of the file or none of it.
  static Status write(const std::string& path, std::string* written);
};

}  // namespace mycoll
