#include "observe/flight_record.h"

#include <algorithm>
#include <map>
#include <memory>

#include "base/env.h"
#include "base/topology.h"

namespace mycoll {
namespace {

// torch's analyser knows the backends of its own release only, and before 2.15 it stops at others;
// what it knows of NCCL's collectives holds for these. (It knows gloo only since 2.13.)
constexpr char kKnownBackend[] = "nccl:";

// An entry at rest.
struct Snapshot {
  uint64_t id, sequence, inBytes, outBytes, tag;
  int64_t enqueued, started, ended;
  int32_t peer;
  uint32_t elementBytes, site;
  OpKind kind;
  DType dtype;
  ReduceOp reduceOp;
  uint8_t opaqueType, flags;
  OpState state;
  size_t group = 0;

  bool isMessage() const { return kind == OpKind::kSend || kind == OpKind::kRecv; }
  int64_t inElements() const { return static_cast<int64_t>(inBytes / elementBytes); }
  int64_t outElements() const { return static_cast<int64_t>(outBytes / elementBytes); }
};

// False where it is empty, or was written over meanwhile.
bool read(const Entry& entry, Snapshot* result) {
  const uint64_t id = get(entry.id);
  if (id == 0) return false;
  *result = Snapshot{id,
                     get(entry.sequence),
                     get(entry.inBytes),
                     get(entry.outBytes),
                     get(entry.tag),
                     get(entry.enqueued),
                     get(entry.started),
                     get(entry.ended),
                     get(entry.peer),
                     std::max(1u, get(entry.elementBytes)),
                     get(entry.site),
                     static_cast<OpKind>(get(entry.kind)),
                     static_cast<DType>(get(entry.dtype)),
                     static_cast<ReduceOp>(get(entry.reduceOp)),
                     get(entry.opaqueType),
                     get(entry.flags),
                     static_cast<OpState>(get(entry.state))};
  return get(entry.id) == id;
}

// Groups by name; of several that had one name, the latest.
std::vector<GroupState*> namedGroups() {
  std::map<std::string, GroupState*> latest;
  for (GroupState* area : BlackBox::process().areas()) {
    if (get(area->phase) == static_cast<uint32_t>(GroupPhase::kUnused)) continue;
    GroupState*& known = latest[area->name];
    if (!known || get(known->created) < get(area->created)) known = area;
  }
  std::vector<GroupState*> result;
  for (const auto& [name, area] : latest) result.push_back(area);
  std::sort(result.begin(), result.end(),
            [](GroupState* a, GroupState* b) { return get(a->created) < get(b->created); });
  return result;
}

std::vector<Snapshot> entriesOf(const std::vector<GroupState*>& groups) {
  std::vector<Snapshot> result;
  BlackBox& box = BlackBox::process();
  for (size_t i = 0; i < groups.size(); ++i) {
    const Entry* entries = box.entriesOf(groups[i]);
    for (uint32_t slot = 0; slot < box.capacity(); ++slot) {
      Snapshot entry;
      if (!read(entries[slot], &entry)) continue;
      entry.group = i;
      result.push_back(entry);
    }
  }
  std::sort(result.begin(), result.end(),
            [](const Snapshot& a, const Snapshot& b) { return a.id < b.id; });
  return result;
}

std::string description(const GroupState& group) {
  return get(group.isDescribed) && group.description[0] ? group.description : "undefined";
}

std::string profilingName(const Snapshot& entry, int rank) {
  auto pair = [&](const char* arrow) {
    return std::to_string(rank) + arrow + (entry.peer < 0 ? "?" : std::to_string(entry.peer));
  };
  switch (entry.kind) {
    case OpKind::kSend: return std::string(kKnownBackend) + "send " + pair("->");
    case OpKind::kRecv: return std::string(kKnownBackend) + "recv " + pair("<-");
    case OpKind::kAllGather: return std::string(kKnownBackend) + "_all_gather_base";
    case OpKind::kReduceScatter: return std::string(kKnownBackend) + "_reduce_scatter_base";
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier: return std::string(kKnownBackend) + "all_reduce_barrier";
    default: return std::string(kKnownBackend) + name(entry.kind);
  }
}

// The sizes that have to agree between ranks are written as equal even where a rank has no part in
// them (the output of a reduce away from its root).
std::pair<int64_t, int64_t> comparableElements(const Snapshot& entry, int ranks) {
  const int64_t in = entry.inElements();
  const int64_t out = entry.outElements();
  switch (entry.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: return {in, in};
    case OpKind::kBroadcast: return {out, out};
    // Each rank may have a size of its own; what all know alike is the sum.
    case OpKind::kAllGather: return {out / ranks, out / ranks * ranks};
    case OpKind::kReduceScatter: return {in / ranks * ranks, in / ranks};
    default: return {in, out};
  }
}

void writeSizes(Document& out, const char* side, int64_t elements, const Snapshot& entry) {
  const bool hasNone = entry.kind == OpKind::kBarrier || entry.kind == OpKind::kMonitoredBarrier ||
                       (entry.kind == OpKind::kSend && side[0] == 'o') ||
                       (entry.kind == OpKind::kRecv && side[0] == 'i');
  const std::string prefix(side);
  out.key(prefix + "_sizes").beginList();
  if (!hasNone) {
    out.beginList();
    out.integer(elements);
    out.end();
  }
  out.end();
  out.key(prefix + "_dtypes").beginList();
  if (!hasNone) {
    out.text(entry.dtype < DType::kCount ? name(entry.dtype)
                                         : "dtype#" + std::to_string(entry.opaqueType));
  }
  out.end();
}

void writeFrames(Document& out, uint32_t site) {
  out.key("frames").beginList();
  const BlackBox::Place place = BlackBox::process().placeOf(site);
  if (!place.file.empty()) {
    out.beginMap();
    out.key("name").text(place.function);
    out.key("filename").text(place.file);
    out.key("line").integer(place.line);
    out.end();
  }
  out.end();
}

void writeEntry(Document& out, const Snapshot& entry, const GroupState& group, uint64_t number) {
  const int64_t offset = BlackBox::process().realtimeOffset();
  auto moment = [&](const char* key, int64_t when, bool isKnown) {
    out.key(key);
    isKnown ? out.integer(when + offset) : out.null();
  };
  out.beginMap();
  out.key("record_id").integer(static_cast<int64_t>(number));
  out.key("pg_id").integer(static_cast<int64_t>(entry.group));
  out.key("process_group").beginList();
  out.text(group.name);
  out.text(description(group));
  out.end();
  const auto sequence = static_cast<int64_t>(entry.sequence);
  out.key("collective_seq_id").integer(entry.isMessage() ? 0 : sequence);
  out.key("p2p_seq_id").integer(entry.isMessage() ? sequence : 0);
  out.key("op_id").integer(static_cast<int64_t>(entry.id));
  out.key("profiling_name").text(profilingName(entry, get(group.rank)));
  moment("time_created_ns", entry.enqueued, true);
  const auto [in, outElements] = comparableElements(entry, std::max(1, get(group.ranks)));
  writeSizes(out, "input", in, entry);
  writeSizes(out, "output", outElements, entry);
  out.key("state").text(entry.state == OpState::kDone     ? "completed"
                        : entry.state == OpState::kQueued ? "scheduled"
                                                          : "started");
  moment("time_discovered_started_ns", entry.started, entry.started != 0);
  moment("time_discovered_completed_ns", entry.ended, entry.state == OpState::kDone);
  if (entry.state == OpState::kDone) {
    out.key("duration_ms").real(static_cast<double>(entry.ended - entry.started) / 1e6);
  }
  out.key("retired").boolean(isOver(entry.state));
  out.key("is_p2p").boolean(entry.isMessage());
  writeFrames(out, entry.site);
  out.key("mycoll").beginMap();
  out.key("operation").text(name(entry.kind));
  out.key("sequence").integer(static_cast<int64_t>(entry.sequence));
  out.key("reduce_op").text(entry.reduceOp == ReduceOp::kCount ? "" : name(entry.reduceOp));
  out.key("peer").integer(entry.peer);
  out.key("tag").integer(static_cast<int64_t>(entry.tag));
  out.key("in_bytes").integer(static_cast<int64_t>(entry.inBytes));
  out.key("out_bytes").integer(static_cast<int64_t>(entry.outBytes));
  out.key("element_bytes").integer(entry.elementBytes);
  out.key("composite").boolean(entry.flags & kIsComposite);
  out.key("failed").boolean(entry.state == OpState::kFailed);
  moment("ended_ns", entry.ended, isOver(entry.state));
  out.key("on_device").boolean(entry.flags & kIsOnDevice);
  out.end();
  out.end();
}

// torch's analyser compares ranks from the largest first record_id of any of them on. So these must
// mean the same on all ranks: they are the numbers of the busiest group's collectives. What is
// older than the first of these that is remembered stands apart, under "mycoll_earlier".
struct Anchor {
  size_t group = 0;
  uint64_t firstSequence = 0;
};

Anchor findAnchor(const std::vector<GroupState*>& groups, const std::vector<Snapshot>& entries) {
  Anchor anchor;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (get(groups[i]->submitted) > get(groups[anchor.group]->submitted)) anchor.group = i;
  }
  for (const Snapshot& entry : entries) {
    if (entry.group != anchor.group || entry.isMessage()) continue;
    anchor.firstSequence = entry.sequence;
    break;
  }
  return anchor;
}

std::string rankList(const GroupState& group) {
  std::string text;
  const int shown = std::min<int>(get(group.ranks), GroupState::kShownRanks);
  for (int i = 0; i < shown; ++i) {
    text += (i ? ", " : "") + std::to_string(get(group.globalRanks[i]));
  }
  return "[" + text + "]";
}

void writeGroups(Document& out, const std::vector<GroupState*>& groups) {
  out.key("pg_config").beginMap();
  for (const GroupState* group : groups) {
    out.key(group->name).beginMap();
    out.key("name").text(group->name);
    out.key("desc").text(description(*group));
    out.key("ranks").text(rankList(*group));
    out.end();
  }
  out.end();
  out.key("pg_status").beginMap();
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto submitted = static_cast<int64_t>(get(groups[i]->submitted));
    const auto finished = static_cast<int64_t>(get(groups[i]->finished));
    out.key(std::to_string(i)).beginMap();
    out.key("last_enqueued_collective").integer(submitted - 1);
    out.key("last_started_collective").integer(std::min(submitted, finished + 1) - 1);
    out.key("last_completed_collective").integer(finished - 1);
    out.end();
  }
  out.end();
}

void writeOwn(Document& out, const std::vector<GroupState*>& groups) {
  BlackBox& box = BlackBox::process();
  out.key("mycoll").beginMap();
  out.key("version").text(version());
  out.key("rank").integer(box.rank());
  out.key("host").text(hostName());
  out.key("pid").integer(processId());
  out.key("job").text(box.job());
  out.key("time_ns").integer(steadyNanos() + box.realtimeOffset());
  out.key("groups").beginList();
  for (const GroupState* group : groups) {
    out.beginMap();
    out.key("name").text(group->name);
    out.key("description").text(get(group->isDescribed) ? group->description : "");
    out.key("context").text(toContext(get(group->context)));
    out.key("rank").integer(get(group->rank));
    out.key("ranks").integer(get(group->ranks));
    out.key("submitted").integer(static_cast<int64_t>(get(group->submitted)));
    out.key("finished").integer(static_cast<int64_t>(get(group->finished)));
    out.key("transport").text(group->transport);
    out.key("failure").text(
        get(group->phase) == static_cast<uint32_t>(GroupPhase::kOpen) ? "" : group->failure);
    out.key("waits_for").beginList();
    const bool isWaiting = get(group->waitSequence) == get(group->finished) &&
                           get(group->submitted) > get(group->finished);
    const int count = std::min<int>(get(group->waitCount), GroupState::kShownWaits);
    for (int i = 0; isWaiting && i < count; ++i) out.integer(get(group->waitRanks[i]));
    out.end();
    out.end();
  }
  out.end();
  out.end();
}

}  // namespace

void writeFlightRecord(Document& out) {
  const std::vector<GroupState*> groups = namedGroups();
  const std::vector<Snapshot> entries = entriesOf(groups);
  const Anchor anchor = findAnchor(groups, entries);
  // The three lists: what all ranks remember, what only some may, and messages, in which torch's
  // analyser sees collectives that most ranks have missed.
  struct List {
    const char* name;
    bool (*holds)(const Snapshot& entry, bool isComparable);
  };
  constexpr List kLists[] = {
      {"entries",
       [](const Snapshot& e, bool isComparable) { return !e.isMessage() && isComparable; }},
      {"mycoll_earlier",
       [](const Snapshot& e, bool isComparable) { return !e.isMessage() && !isComparable; }},
      {"mycoll_messages", [](const Snapshot& e, bool) { return e.isMessage(); }},
  };
  out.beginMap();
  out.key("version").text("2.10");
  out.key("comm_lib_version").text(std::string("mycoll ") + version());
  writeGroups(out, groups);
  writeOwn(out, groups);
  for (const List& list : kLists) {
    uint64_t number = 0;
    bool isComparable = anchor.firstSequence == 0;
    out.key(list.name).beginList();
    for (const Snapshot& entry : entries) {
      if (entry.group == anchor.group && !entry.isMessage()) {
        number = entry.sequence;
        isComparable = true;
      }
      if (list.holds(entry, isComparable)) writeEntry(out, entry, *groups[entry.group], number);
    }
    out.end();
  }
  out.end();
}

}  // namespace mycoll
