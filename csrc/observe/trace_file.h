// The process's last operations as a file, in the format of torch's flight recorder (version 2.10),
// so that `torchfrtrace` and `mycoll trace` can compare what the ranks did.
//
// Written by itself once in a process, at its first failure, and on request. By itself it goes
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
  // There was a failure. Writes nothing: may be called under locks.
  static void want();
  // Where the file of the first failure will be; empty when there will be none.
  static std::string wantedPath();
  // Writes it, unless that is done or nobody wants it. Whoever saw the failure in a call does so
  // before it returns.
  static void writeWanted();
  // For the background: whoever saw the failure has not come to writing.
  static bool isLeftOver();

  // On request. A name that ends with ".json" gives JSON. Empty path: as after a failure.
  static Status write(const std::string& path, std::string* written);
  static std::string contents(bool asJson);
};

}  // namespace mycoll
