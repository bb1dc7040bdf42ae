// Proves the plans of all ranks without running them:
//
//   - Every message has its counterpart.
//   - All ranks finish, even if every send waits for its receiver.
//   - Each byte of every output is right: the right input, or the whole tree over all ranks, with
//     every contribution in it once.
//   - Several chunks are in progress as in run.cpp, and tags distinguish their messages.
//   - If the ranks of a host share memory, a rank reads there only what its writer has published,
//     and overwrites only what every reader has marked as read.
//   - The scratch memory, the peers of a rank, and the ranks that send to a host in one phase are
//     bounded.
//
// Nothing blocks. The verifier needs some 16 bytes of memory for each element of all ranks'
// buffers.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/plan/plan.h"

namespace test::verifier {

using namespace mycoll;

// The contents of an element of memory: element `element` of block `block` of some ranks' inputs.
struct Cell {
  int block = -1;
  uint64_t element = 0;
  Node node;
  bool isWide = false;
  bool isResult = false;
  bool operator==(const Cell&) const = default;
};

constexpr int kMarks = static_cast<int>(Mark::kDone) + 1;

inline std::string describe(const Cell& cell) {
  if (cell.block < 0) return "nothing";
  return "element " + std::to_string(cell.element) + " of block " + std::to_string(cell.block) +
         " of ranks " + std::to_string(cell.node.lo) + " to " + std::to_string(cell.node.hi) +
         (cell.isResult ? ", rounded"
          : cell.isWide ? ", wide"
                        : "");
}

inline bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

// Memory that a rank shares with the others of its host, used for one chunk after the other.
struct Area {
  struct Written {
    uint64_t chunk = 0;
    int readableAfter = 0;  // this many marks of its owner; 0: nothing was written
  };
  std::vector<Cell> cells;
  std::vector<Written> written;  // by element
};

// A chunk that a rank has begun and not finished.
struct UnderWay {
  uint64_t chunk = 0;
  std::shared_ptr<const Plan> plan;
  std::vector<Cell> scratch;
  size_t next = 0;      // the next step
  int phase = 0;        // the next phase
  size_t messages = 0;  // pending messages of the phase before it
  bool isOver() const { return phase > plan->phases; }
};

// One rank's memory and progress.
struct Rank {
  const Job* job = nullptr;
  std::vector<std::vector<Cell>> in, out;
  std::vector<Area> areas;
  std::shared_ptr<const Plan> plan;  // of the latest chunk
  std::deque<UnderWay> underWay;
  uint64_t step = 0;
  uint64_t begun = 0;  // the number of chunks that it has begun
  size_t at = 0;       // the next chunk in this step
  int marks = 0;       // the number of marks that it has set
  // For each mark: the number of chunks that it was set for, and the value of `marks` then.
  std::vector<std::pair<uint64_t, int>> marked[kMarks];
  std::map<int, int> seen;  // by rank: the number of its marks that this rank has waited for
  uint64_t freed = 0;       // the number of chunks whose areas no rank reads any more
};

class Verifier {
 public:
  Verifier(const Shape& shape, const std::vector<Job>& jobs, const Chunking& chunking,
           const std::vector<bool>& sharesMemory, SumTree tree, int away)
      : shape_(shape),
        jobs_(jobs),
        chunking_(chunking),
        sharesMemory_(sharesMemory),
        tree_(tree),
        away_(away) {
    for (size_t rank = 0; rank < jobs_.size(); ++rank) {
      Job& job = jobs_[rank];
      const int self = static_cast<int>(rank);
      if (!goesByHost(shape_, job.kind) || goesByItself(shape_, job, self)) continue;
      for (const int member : shape_.membersOf(shape_.hostOf(self))) {
        job.rows.push_back(rowOf(jobs_[member], shape_.ranks(), member));
      }
    }
  }

  std::string run() {
    ranks_.resize(jobs_.size());
    for (size_t rank = 0; rank < jobs_.size(); ++rank) fill(static_cast<int>(rank));
    checkTraffic();
    for (size_t rank = 0; rank < jobs_.size(); ++rank) ready_.push_back(static_cast<int>(rank));
    while (!ready_.empty() && wrong_.empty()) {
      const int rank = ready_.front();
      ready_.pop_front();
      if (rank != away_) advance(rank);
    }
    for (size_t rank = 0; rank < jobs_.size() && wrong_.empty(); ++rank) {
      const int self = static_cast<int>(rank);
      const bool isOver = self != away_ && isAtTheEnd(ranks_[rank]);
      if (isOver && away_ >= 0) {
        fail("rank " + std::to_string(rank) + " does not wait for rank " + std::to_string(away_));
      }
      if (!isOver && away_ < 0) fail("rank " + std::to_string(rank) + " waits forever");
      if (away_ < 0) checkOutput(self);
    }
    return wrong_;
  }

 private:
  void fail(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  // ---- bounds

  bool isExchange() const {
    const OpKind kind = jobs_[0].kind;
    return kind == OpKind::kGather || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
  }
  // The number of lanes between hosts. A broadcast has a lane for each rank of a host.
  int mostLanes() const {
    size_t most = shape_.lanes();
    for (int host = 0; host < shape_.hosts(); ++host) {
      most = std::max(most, shape_.membersOf(host).size());
    }
    return static_cast<int>(most);
  }
  // The most lanes that a rank of this host drives.
  int lanesOf(int host) const {
    const int members = static_cast<int>(shape_.membersOf(host).size());
    return (mostLanes() + members - 1) / members;
  }
  // On this level, the number of hosts of a complete unit for which this host acts in its own unit.
  int dutiesOf(int level, int host) const {
    const int hosts = shape_.hostsIn(level, shape_.unitOf(level, host));
    return (shape_.unitSize(level) + hosts - 1) / hosts;
  }
  // The most hosts that it exchanges messages with for them: one of each part of the unit, and the
  // host that gets everything.
  int mostHosts(int level, int host) const {
    const int hosts = shape_.hostsIn(level, shape_.unitOf(level, host));
    const int size = shape_.unitSize(level - 1);
    return std::min(hosts - 1, dutiesOf(level - 1, host) * ((hosts + size - 1) / size + 1));
  }

  // A rank exchanges messages with few others, and few ranks send to a host in one phase.
  // Exceptions are blocks that are sent from rank to rank, and roots of small worlds.
  void checkTraffic() {
    if (isExchange()) return;
    std::map<std::pair<int, int>, std::set<int>> senders;  // by host and phase
    for (int rank = 0; rank < shape_.ranks(); ++rank) {
      const int host = shape_.hostOf(rank);
      std::set<int> peers;
      for (const Step& step : ranks_[rank].plan->steps) {
        if (step.act < Step::Act::kSend || shape_.hostOf(step.peer) == host) continue;
        peers.insert(step.peer);
        if (step.act != Step::Act::kSend) continue;
        senders[{shape_.hostOf(step.peer), step.phase}].insert(rank);
      }
      if (rank == jobs_[0].root && shape_.ranks() <= 64) continue;
      size_t most = 2 * std::bit_width(static_cast<unsigned>(shape_.hosts()));  // of a barrier
      for (int level = 1; level <= shape_.levels(); ++level) {
        most += static_cast<size_t>(lanesOf(host) * mostHosts(level, host));
      }
      checkMost("peers of rank " + std::to_string(rank), peers.size(), most);
    }
    for (const auto& [where, ranks] : senders) {
      const auto& [host, phase] = where;
      int hosts = 0;
      for (int level = 1; level <= shape_.levels(); ++level) {
        hosts = std::max(hosts, mostHosts(level, host));
      }
      checkMost("senders to host " + std::to_string(host) + " in phase " + std::to_string(phase),
                ranks.size(), static_cast<size_t>(mostLanes() * hosts));
    }
  }

  // A rank may keep each node three times: as it arrived, as it is sent on, and added up; and a
  // copy of its own nodes for each host that receives them. Blocks that are sent together between
  // hosts are limited by the room for them.
  void checkScratch(int rank, uint64_t chunk) {
    const Job& job = jobs_[rank];
    const int host = shape_.hostOf(rank);
    uint64_t nodes = shape_.membersOf(host).size();
    for (int level = 1; level <= shape_.levels(); ++level) {
      const int size = shape_.unitSize(level - 1);
      const int unit = shape_.unitOf(level, host), first = shape_.firstHost(level, unit);
      for (int part = first; part < first + shape_.hostsIn(level, unit); part += size) {
        nodes += shape_.nodesOf(level - 1, part / size).size();
      }
      nodes += shape_.nodesOf(level - 1, host / size).size() *
               static_cast<uint64_t>(mostHosts(level, host));
    }
    auto hasOf = [&](const std::vector<uint64_t>& blocks) {
      uint64_t bytes = 0;
      for (const uint64_t block : blocks) {
        bytes += std::min(chunking_.chunkBytes, block - std::min(chunking_.begin(chunk), block));
      }
      return bytes;
    };
    const uint64_t wide = job.wideBytes / job.elementBytes;
    const uint64_t together = areaBytes(shape_) + 2 * job.elementBytes * shape_.hosts();
    checkMost("bytes of scratch memory of rank " + std::to_string(rank),
              ranks_[rank].plan->scratchBytes,
              isExchange() ? together : 3 * wide * nodes * std::max(hasOf(job.in), hasOf(job.out)));
  }

  void checkMost(const std::string& what, size_t number, size_t most) {
    if (number > most) {
      fail(what + ": " + std::to_string(number) + ", and " + std::to_string(most) + " at most");
    }
  }

  // Returns the elements of a place, for this rank to read or to write, or null if there are none.
  Cell* at(int rank, UnderWay& chunk, const Place& place, bool isWrite) {
    Rank& each = ranks_[rank];
    const uint64_t unit = each.job->elementBytes;
    const bool isOfCall = place.space == Space::kInput || place.space == Space::kOutput;
    const uint64_t first = place.begin + (isOfCall ? chunking_.begin(chunk.chunk) : 0);
    const uint64_t begin = first / unit, end = (first + place.bytes) / unit;
    if (first % unit != 0) return nullptr;
    if (place.space == Space::kShared) return inArea(rank, chunk, place, begin, end, isWrite);
    std::vector<Cell>& memory = place.space == Space::kScratch  ? chunk.scratch
                                : place.space == Space::kOutput ? each.out.at(place.block)
                                                                : each.in.at(place.block);
    return end > memory.size() ? nullptr : memory.data() + begin;
  }

  Cell* inArea(int rank, const UnderWay& chunk, const Place& place, uint64_t begin, uint64_t end,
               bool isWrite) {
    Rank& each = ranks_[rank];
    const int owner = shape_.membersOf(shape_.hostOf(rank)).at(place.block);
    std::vector<Area>& areas = ranks_[owner].areas;
    if (areas.empty()) return nullptr;
    Area& area = areas[chunk.chunk % areas.size()];
    area.cells.resize(areaBytes(shape_) / each.job->elementBytes);
    area.written.resize(area.cells.size());
    if (end > area.cells.size()) return nullptr;
    if (isWrite && owner != rank) fail("a rank writes to the area of another one");
    if (isWrite && each.freed < chunksBefore(chunk.chunk)) {
      fail("rank " + std::to_string(rank) + " writes where others may still read");
    }
    const auto& done = each.marked[static_cast<int>(Mark::kDone)];
    if (!isWrite && owner != rank && !done.empty() && done.back().first > chunk.chunk) {
      fail("rank " + std::to_string(rank) + " reads an area after it has marked it as read");
    }
    for (uint64_t i = begin; i < end; ++i) {
      Area::Written& written = area.written[i];
      const bool isThere = written.readableAfter > 0 && written.chunk == chunk.chunk;
      if (isWrite) {
        if (isThere) fail("shared memory is written to twice");
        written = {chunk.chunk, ranks_[owner].marks + 1};
      } else if (!isThere || (owner != rank && each.seen[owner] < written.readableAfter)) {
        fail("rank " + std::to_string(rank) + " reads what rank " + std::to_string(owner) +
             " may not yet have written");
      }
    }
    return area.cells.data() + begin;
  }

  void fill(int rank) {
    Rank& each = ranks_[rank];
    each.job = &jobs_[rank];
    auto blocks = [&](const std::vector<uint64_t>& sizes, bool isInput) {
      std::vector<std::vector<Cell>> memory;
      for (size_t block = 0; block < sizes.size(); ++block) {
        auto& cells = memory.emplace_back(sizes[block] / each.job->elementBytes);
        for (size_t i = 0; i < cells.size() && isInput; ++i) {
          cells[i] = {static_cast<int>(block), i, {rank, rank + 1}, false, false};
        }
      }
      return memory;
    };
    each.in = blocks(each.job->in, true);
    const bool isSource = each.job->kind == OpKind::kBroadcast && rank == each.job->root;
    each.out = blocks(each.job->out, isSource);
    plan(rank, 0);
    if (shares(rank)) each.areas.resize(areaCount(shape_));
  }

  bool shares(int rank) const {
    return sharesMemory_[shape_.hostOf(rank)] && isShared(shape_, jobs_[rank], chunking_);
  }
  // As Arena::roundsBefore: the number of chunks that all ranks of the host must have done before
  // the areas of this chunk may be written.
  uint64_t chunksBefore(uint64_t chunk) const {
    const uint64_t areas = areaCount(shape_);
    return chunk < areas ? 0 : chunk + 1 - areas;
  }
  bool isAtTheEnd(const Rank& rank) const {
    return rank.begun == chunking_.chunks && rank.underWay.empty();
  }

  void plan(int rank, uint64_t chunk) {
    const Job& job = jobs_[rank];
    ranks_[rank].plan =
        std::make_shared<const Plan>(planOf(shape_, job, rank, chunking_, chunk, shares(rank)));
    checkScratch(rank, chunk);
  }

  // Does what netCollective() does (run.cpp), until the rank must wait.
  void advance(int rank) {
    Rank& each = ranks_[rank];
    while (wrong_.empty() && !isAtTheEnd(each)) {
      for (; each.at < each.underWay.size(); ++each.at) {
        UnderWay& chunk = each.underWay[each.at];
        if ((each.step - chunk.chunk) % stepsOfAPhase(shape_) != 0) continue;
        if (chunk.messages > 0 || !beginPhase(rank, chunk)) return;
      }
      while (!each.underWay.empty() && each.underWay.front().isOver()) each.underWay.pop_front();
      each.at = each.underWay.size();
      if (each.step == each.begun && each.begun < chunking_.chunks) {
        begin(rank, each.begun++);
      } else {
        ++each.step;
        each.at = 0;
      }
    }
  }

  void begin(int rank, uint64_t chunk) {
    Rank& each = ranks_[rank];
    // Chunks that are alike have one plan (run.cpp, PlanCache).
    if (chunk > 0 && !areAlike(jobs_[rank], chunking_, chunk, chunk - 1)) plan(rank, chunk);
    UnderWay& begun = each.underWay.emplace_back();
    begun.chunk = chunk;
    begun.plan = each.plan;
    begun.scratch.resize(each.plan->scratchBytes / each.job->elementBytes);
  }

  // Returns false if the rank must wait for others of its host. A message is complete when both
  // sides have begun it.
  bool beginPhase(int rank, UnderWay& chunk) {
    const Plan& plan = *chunk.plan;
    for (; chunk.next < plan.steps.size() && wrong_.empty(); ++chunk.next) {
      const Step& step = plan.steps[chunk.next];
      if (step.phase != chunk.phase) break;
      switch (step.act) {
        case Step::Act::kFold: fold(rank, chunk, step); break;
        case Step::Act::kCopy:
          copy(rank, chunk, plan.inputs[step.first].place, rank, chunk, step.place);
          break;
        case Step::Act::kMark: mark(rank, chunk.chunk, step.mark); break;
        case Step::Act::kWait:
          if (!hasWaited(rank, chunk.chunk, step.mark)) return false;
          break;
        case Step::Act::kSend:
        case Step::Act::kReceive: beginMessage(rank, chunk, step); break;
      }
    }
    ++chunk.phase;
    return true;
  }

  void beginMessage(int rank, UnderWay& chunk, const Step& step) {
    const bool isSend = step.act == Step::Act::kSend;
    const uint64_t tag = tagOf(chunk.chunk, chunk.phase);
    const auto key = isSend ? std::tuple(rank, step.peer, tag) : std::tuple(step.peer, rank, tag);
    const auto waiting = waiting_.try_emplace(key, isSend, std::vector<Message>()).first;
    auto& [areSends, messages] = waiting->second;
    if (areSends == isSend) {
      if (!messages.empty() && messages.back().chunk != &chunk) {
        fail("messages of two chunks have one tag");
      }
      messages.push_back({&chunk, step.place});
      ++chunk.messages;
      return;
    }
    const Message theirs = messages.front();
    messages.erase(messages.begin());
    if (messages.empty()) waiting_.erase(waiting);
    if (isSend) {
      copy(rank, chunk, step.place, step.peer, *theirs.chunk, theirs.place);
    } else {
      copy(step.peer, *theirs.chunk, theirs.place, rank, chunk, step.place);
    }
    if (--theirs.chunk->messages == 0) ready_.push_back(step.peer);
  }

  // The ranks of its host that wait for the mark may continue.
  void mark(int rank, uint64_t chunk, Mark mark) {
    Rank& each = ranks_[rank];
    auto& marked = each.marked[static_cast<int>(mark)];
    if (!marked.empty() && marked.back().first > chunk) {
      fail("rank " + std::to_string(rank) + " sets a mark twice, or not in the order of chunks");
    }
    marked.emplace_back(chunk + 1, ++each.marks);
    for (const int member : shape_.membersOf(shape_.hostOf(rank))) {
      if (member != rank) ready_.push_back(member);
    }
  }

  // Returns false if some rank of the host has not set the mark yet.
  bool hasWaited(int rank, uint64_t chunk, Mark mark) {
    const uint64_t chunks = mark == Mark::kDone ? chunksBefore(chunk) : chunk + 1;
    if (chunks == 0) return true;
    std::map<int, int> seen;
    for (const int member : shape_.membersOf(shape_.hostOf(rank))) {
      if (member == rank) continue;
      const auto& marked = ranks_[member].marked[static_cast<int>(mark)];
      const auto found = std::lower_bound(marked.begin(), marked.end(), std::pair(chunks, 0));
      if (found == marked.end()) return false;
      seen[member] = found->second;
    }
    Rank& each = ranks_[rank];
    for (const auto& [member, marks] : seen) each.seen[member] = std::max(each.seen[member], marks);
    if (mark == Mark::kDone) each.freed = std::max(each.freed, chunks);
    return true;
  }

  void copy(int from, UnderWay& theirs, const Place& source, int to, UnderWay& mine,
            const Place& target) {
    if (source.bytes != target.bytes) return fail("a message is not as long as expected");
    if (source.bytes == 0) return;
    const Cell* read = at(from, theirs, source, false);
    Cell* write = at(to, mine, target, true);
    if (!read || !write) return fail("a message is outside of its memory");
    std::copy_n(read, source.bytes / ranks_[from].job->elementBytes, write);
  }

  void fold(int rank, UnderWay& chunk, const Step& step) {
    const Job& job = jobs_[rank];
    const uint64_t wide = job.wideBytes / job.elementBytes;
    const auto first = chunk.plan->inputs.begin() + step.first;
    const std::vector<FoldInput> inputs(first, first + step.inputs);
    Cell* to = at(rank, chunk, step.place, true);
    if (!to) return fail("a result is outside of its memory");
    const uint64_t width = step.isResult ? 1 : wide;
    std::vector<const Cell*> read;
    for (const FoldInput& input : inputs) {
      read.push_back(at(rank, chunk, input.place, false));
      if (!read.back()) return fail("an input is outside of its memory");
    }
    if (size_t next = 0; !isTree(inputs, inputs.front().node.lo, inputs.back().node.hi, &next) ||
                         next != inputs.size()) {
      return fail("rank " + std::to_string(rank) + " adds up what is no node");
    }
    std::vector<Cell> results;
    results.reserve(step.count * width);
    for (uint64_t i = 0; i < step.count; ++i) {
      Cell result;
      for (size_t k = 0; k < inputs.size(); ++k) {
        const FoldInput& input = inputs[k];
        const Cell& cell = read[k][i * (input.isWide ? wide : 1)];
        if (cell.node != input.node || cell.isWide != input.isWide || cell.isResult) {
          return fail("rank " + std::to_string(rank) + " adds up " + describe(cell));
        }
        if (k == 0) result = cell;
        if (cell.block != result.block || cell.element != result.element) {
          return fail("rank " + std::to_string(rank) + " adds up different elements");
        }
      }
      result.node.hi = inputs.back().node.hi;
      result.isWide = !step.isResult && wide > 1;
      result.isResult = step.isResult;
      results.insert(results.end(), width, result);
    }
    std::copy(results.begin(), results.end(), to);
  }

  bool isTree(const std::vector<FoldInput>& inputs, int lo, int hi, size_t* next) const {
    if (*next >= inputs.size()) return false;
    const Node node = inputs[*next].node;
    if (node.lo == lo && node.hi == hi) return ++*next, true;
    if (hi - lo < 2) return false;
    const int middle = tree_.middle(lo, hi);
    return isTree(inputs, lo, middle, next) && isTree(inputs, middle, hi, next);
  }

  void checkOutput(int rank) {
    const Job& job = jobs_[rank];
    const int ranks = shape_.ranks();
    for (size_t block = 0; block < job.out.size(); ++block) {
      for (size_t i = 0; i < ranks_[rank].out[block].size(); ++i) {
        const Cell& cell = ranks_[rank].out[block][i];
        Cell expected{0, i, {0, ranks}, false, reduces(job.kind)};
        const int from = static_cast<int>(block);
        switch (job.kind) {
          case OpKind::kReduceScatter: expected.block = rank; break;
          case OpKind::kBroadcast: expected.node = {job.root, job.root + 1}; break;
          case OpKind::kAllGather:
          case OpKind::kGather: expected.node = {from, from + 1}; break;
          case OpKind::kScatter:
            expected.block = rank;
            expected.node = {job.root, job.root + 1};
            break;
          case OpKind::kAllToAll:
            expected.block = rank;
            expected.node = {from, from + 1};
            break;
          default: break;
        }
        if (cell == expected) continue;
        return fail("rank " + std::to_string(rank) + " has " + describe(cell) + " instead of " +
                    describe(expected) + " in its output");
      }
    }
  }

  const Shape& shape_;
  std::vector<Job> jobs_;
  const Chunking chunking_;
  const std::vector<bool>& sharesMemory_;  // by host
  const SumTree tree_;
  const int away_;
  std::vector<Rank> ranks_;
  std::deque<int> ready_;  // ranks that can continue
  struct Message {
    UnderWay* chunk;
    Place place;
  };
  // By sender, receiver and tag: messages that one side has begun, and whether that is the sender.
  std::map<std::tuple<int, int, uint64_t>, std::pair<bool, std::vector<Message>>> waiting_;
  std::string wrong_;
};

// Verifies the plans of one collective. Returns "" or what is wrong.
//
// jobs[rank]: the collective as each rank sees it. sharesMemory: the hosts whose ranks share
// memory, for jobs that may be shared. away: a rank that does not call, and for which all others
// must wait.
inline std::string verify(const Shape& shape, const std::vector<Job>& jobs,
                          const Chunking& chunking, const std::vector<bool>& sharesMemory,
                          SumTree tree = SumTree(), int away = -1) {
  return Verifier(shape, jobs, chunking, sharesMemory, tree, away).run();
}

}  // namespace test::verifier
