// Counters of this process in Prometheus' text format, for the textfile collector of
// node_exporter: written to MYCOLL_METRICS_FILE every MYCOLL_METRICS_SECONDS, whole or not at all.
// The counters are the black box's; nothing is counted for this alone.
//
// Thread contract: all [any thread].
#pragma once

#include <string>

namespace mycoll {

class Metrics {
 public:
  // Writes when it is time to, and asked for; else costs a look.
  static void writeIfDue();
  // Now, if asked for: a group is about to end.
  static void writeNow();
  static std::string text();
};

}  // namespace mycoll
