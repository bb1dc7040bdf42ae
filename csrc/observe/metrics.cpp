#include "observe/metrics.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "base/os.h"
#include "observe/black_box.h"
#include "observe/whole_file.h"

namespace mycoll {
namespace {

struct Writing {
  std::mutex mutex;
  std::atomic<int64_t> next{0};
};
Writing& writing() { return perProcess<Writing>(); }

struct Series {
  const char* name;
  const char* kind;
  const char* help;
  double (*value)(const Tally& tally);
};

const Series kSeries[] = {
    {"mycoll_operations_total", "counter", "Operations that have ended well.",
     [](const Tally& tally) { return static_cast<double>(get(tally.done)); }},
    {"mycoll_operation_failures_total", "counter", "Operations that have failed.",
     [](const Tally& tally) { return static_cast<double>(get(tally.failed)); }},
    {"mycoll_operation_bytes_total", "counter",
     "The larger of input and output of this rank, added up.",
     [](const Tally& tally) { return static_cast<double>(get(tally.bytes)); }},
    {"mycoll_operation_seconds_total", "counter", "Time from call to end, added up.",
     [](const Tally& tally) { return static_cast<double>(get(tally.nanos)) / 1e9; }},
};

std::string escaped(const char* text) {
  std::string result;
  for (; *text; ++text) {
    if (*text == '\n') {
      result += "\\n";
      continue;
    }
    if (*text == '"' || *text == '\\') result += '\\';
    result += *text;
  }
  return result;
}

struct Labelled {
  GroupState* group;
  std::string labels;
};

// Many groups may have one description (torch calls most of them "undefined"), and one name may be
// that of a group that has failed and of its successor. No two have the same labels: readers refuse
// a file in which a series is there twice.
std::vector<Labelled> labelled(const std::vector<GroupState*>& groups, int rank) {
  std::vector<Labelled> result;
  std::map<std::string, int> seen;
  for (GroupState* group : groups) {
    const bool isDescribed = get(group->isDescribed) && group->description[0] &&
                             std::string_view(group->description) != "undefined";
    std::string name = escaped(group->name);
    const int number = ++seen[name];
    if (number > 1) name += " (" + std::to_string(number) + ")";
    result.push_back({group, "rank=\"" + std::to_string(rank) + "\",group=\"" +
                                 (isDescribed ? escaped(group->description) : name) + "\",name=\"" +
                                 name + "\""});
  }
  return result;
}

void addLine(std::string* text, const char* name, const std::string& labels, double value) {
  char number[32];
  const auto end = std::to_chars(number, number + sizeof(number), value);  // whatever the locale
  *text += std::string(name) + "{" + labels + "} " + std::string(number, end.ptr) + "\n";
}

void addHead(std::string* text, const char* name, const char* kind, const char* help) {
  *text += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + kind + "\n";
}

// When the oldest collective that is not over was called; 0: there is none.
int64_t waitingSince(GroupState* group) {
  const Entry* entries = BlackBox::process().entriesOf(group);
  int64_t since = 0;
  for (uint32_t i = 0; i < get(group->capacity); ++i) {
    const uint64_t id = get(entries[i].id);
    const int64_t called = get(entries[i].enqueued);
    const bool isUnderWay = !isOver(entries[i]);
    if (id && isUnderWay && get(entries[i].id) == id && (since == 0 || called < since))
      since = called;
  }
  return since;
}

// A process that has joined no group has nothing to say, such as a launcher.
void write() {
  if (BlackBox::process().rank() < 0) return;
  const std::string path = expandPattern(Env::process().metricsFile, BlackBox::process().rank());
  const Status status = writeWhole(path, Metrics::text(), 0644);
  if (status.ok()) return;
  static std::atomic<bool> isToldBefore{false};
  if (isToldBefore.exchange(true)) {
    MYCOLL_LOG_WARN("%s", status.message().c_str());
  } else {
    MYCOLL_LOG_ERROR("no metrics: %s", status.message().c_str());
  }
}

}  // namespace

void Metrics::writeIfDue() {
  if (Env::process().metricsFile.empty()) return;
  const int64_t now = steadyNanos();
  int64_t due = writing().next.load(std::memory_order_relaxed);
  if (now < due) return;
  const int64_t next = now + Env::process().metricsSeconds * int64_t{1'000'000'000};
  if (!writing().next.compare_exchange_strong(due, next)) return;
  std::lock_guard<std::mutex> lock(writing().mutex);
  write();
}

void Metrics::writeNow() {
  if (Env::process().metricsFile.empty()) return;
  std::lock_guard<std::mutex> lock(writing().mutex);
  write();
}

std::string Metrics::text() {
  BlackBox& box = BlackBox::process();
  std::vector<GroupState*> groups = box.areas();
  std::erase_if(groups, [](GroupState* group) {
    const auto phase = static_cast<GroupPhase>(get(group->phase));
    return phase != GroupPhase::kOpen && phase != GroupPhase::kFailed;
  });
  const std::vector<Labelled> all = labelled(groups, box.rank());
  std::string text;
  for (const Series& series : kSeries) {
    addHead(&text, series.name, series.kind, series.help);
    for (const auto& [group, labels] : all) {
      for (int kind = 0; kind < kOpKinds; ++kind) {
        const Tally& tally = group->tallies[kind];
        if (get(tally.done) + get(tally.failed) == 0) continue;
        addLine(&text, series.name,
                labels + ",operation=\"" + name(static_cast<OpKind>(kind)) + "\"",
                series.value(tally));
      }
    }
  }
  addHead(&text, "mycoll_written_timestamp_seconds", "gauge",
          "When this was written: a process that was killed leaves its last words.");
  addLine(
      &text, "mycoll_written_timestamp_seconds", "rank=\"" + std::to_string(box.rank()) + "\"",
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  addHead(&text, "mycoll_group_failed", "gauge", "1 when the group is dead.");
  for (const auto& [group, labels] : all) {
    addLine(&text, "mycoll_group_failed", labels,
            get(group->phase) == static_cast<uint32_t>(GroupPhase::kFailed));
  }
  addHead(&text, "mycoll_waiting_seconds", "gauge",
          "For how long the oldest operation that is not over has waited.");
  const int64_t now = steadyNanos();
  for (const auto& [group, labels] : all) {
    const int64_t since = waitingSince(group);
    addLine(&text, "mycoll_waiting_seconds", labels,
            since ? static_cast<double>(std::max<int64_t>(0, now - since)) / 1e9 : 0.0);
  }
  return text;
}

}  // namespace mycoll
