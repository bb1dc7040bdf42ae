// The process's last operations as a file, in the format of torch's flight recorder (version 2.10),
// so that `torchfrtrace` and `mycoll trace` can compare what the ranks did.
//
// Written by itself when a group fails, in place of what an earlier failure wrote, and on request.
// By itself it goes
// where MYCOLL_TRACE_FILE or torch's own variables say, else to
//   /tmp/mycoll-<uid>/<job>/rank_<rank>
// one folder for each job that failed, of which the latest few are kept.
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
  // Where the file will be; empty when there will be none.
  static std::string wantedPath();
  // Writes it, unless that is done or nobody wants it. Whoever sees the failure in a call does so
  // before the call returns.
  static void writeWanted();
  // For the background: nobody who saw the failure in a call has come to writing for a while.
  static bool isLeftOver();
  // For the background: what there is, as the process may end without another call. The first call
  // that sees the failure still writes, and so adds itself.
  static void writeMeanwhile();

  // On request. A name that ends with ".json" gives JSON. Empty path: as after a failure.
  static Status write(const std::string& path, std::string* written);
  static std::string contents(bool asJson);
};

}  // namespace mycoll
