// Proves the plans of all ranks without running them: that every message has its counterpart, that
// all ranks come to the end even if every send waits for its receiver, and that each byte of every
// output is what the operation says: the right input, or the whole tree over all ranks, with every
// contribution in it once. Where ranks of a host share memory, it also proves that a rank reads
// there only what its writer has said to be there. And it holds plans to bounds: scratch memory,
// ranks that one talks to, ranks that send to one host at a time.
//
// Plain functions: nothing blocks. Memory: some 16 bytes for each element of all ranks' buffers.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/plan/plan.h"

namespace test::verifier {

using namespace mycoll;

// What stands in an element of memory: element `element` of block `block` of some ranks' inputs.
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

// One rank's memory and how far it is.
struct Rank {
  const Job* job = nullptr;
  Plan plan;
  std::vector<std::vector<Cell>> in, out;
  std::vector<Cell> scratch;
  // What it shares with the ranks of its host; by element: after how many of its marks others may
  // read it, 0 if nothing stands there.
  std::vector<Cell> area;
  std::vector<int> readableAfter;
  int marks = 0;              // that it has set for this chunk
  int markedAs[kMarks] = {};  // its how many-th mark that was; 0: not yet
  std::map<int, int> seen;    // by rank: how many of its marks this one has waited for
  size_t next = 0;            // step
  size_t underWay = 0;        // messages of the phase
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
    for (chunk_ = 0; chunk_ < chunking_.chunks && wrong_.empty(); ++chunk_) {
      for (size_t rank = 0; rank < jobs_.size(); ++rank) {
        Rank& each = ranks_[rank];
        const int host = shape_.hostOf(static_cast<int>(rank));
        const bool shares = sharesMemory_[host] && isShared(shape_, jobs_[rank], chunking_);
        // Chunks that are alike have one plan (run.cpp, PlanCache).
        if (chunk_ == 0 || !areAlike(jobs_[rank], chunking_, chunk_, chunk_ - 1)) {
          each.plan =
              planOf(shape_, jobs_[rank], static_cast<int>(rank), chunking_, chunk_, shares);
          checkScratch(static_cast<int>(rank));
        }
        each.scratch.assign(each.plan.scratchBytes / each.job->elementBytes, Cell());
        const uint64_t shared = shares ? areaBytes(shape_) / each.job->elementBytes : 0;
        each.area.assign(shared, Cell());
        each.readableAfter.assign(shared, 0);
        each.marks = 0;
        std::fill(std::begin(each.markedAs), std::end(each.markedAs), 0);
        each.seen.clear();
        each.next = 0;
      }
      if (chunk_ == 0) checkTraffic();
      runChunk();
    }
    for (size_t rank = 0; rank < jobs_.size() && wrong_.empty(); ++rank) {
      checkOutput(static_cast<int>(rank));
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
  // Of what hosts exchange, a rank of this one drives at most so many lanes. A broadcast has a lane
  // for each rank of a host.
  int mostLanes() const {
    size_t most = shape_.lanes();
    for (int host = 0; host < shape_.hosts(); ++host) {
      most = std::max(most, shape_.membersOf(host).size());
    }
    return static_cast<int>(most);
  }
  int lanesOf(int host) const {
    const int members = static_cast<int>(shape_.membersOf(host).size());
    return (mostLanes() + members - 1) / members;
  }
  // On this level a host acts for its unit in what concerns so many of the hosts of a whole one.
  int dutiesOf(int level, int host) const {
    const int hosts = shape_.hostsIn(level, shape_.unitOf(level, host));
    return (shape_.unitSize(level) + hosts - 1) / hosts;
  }
  // With so many hosts it has to do in that: one of each part of the unit, and who gets it all.
  int mostHosts(int level, int host) const {
    const int hosts = shape_.hostsIn(level, shape_.unitOf(level, host));
    const int size = shape_.unitSize(level - 1);
    return std::min(hosts - 1, dutiesOf(level - 1, host) * ((hosts + size - 1) / size + 1));
  }

  // Ranks talk to few others, and no host hears of many at a time, except for blocks that go from
  // rank to rank and for roots of small worlds.
  void checkTraffic() {
    if (isExchange()) return;
    std::map<std::pair<int, int>, std::set<int>> senders;  // by host and phase
    for (int rank = 0; rank < shape_.ranks(); ++rank) {
      const int host = shape_.hostOf(rank);
      std::set<int> peers;
      for (const Step& step : ranks_[rank].plan.steps) {
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
      checkMost("rank " + std::to_string(rank) + " talks to ranks", peers.size(), most);
    }
    for (const auto& [where, ranks] : senders) {
      const auto& [host, phase] = where;
      int hosts = 0;
      for (int level = 1; level <= shape_.levels(); ++level) {
        hosts = std::max(hosts, mostHosts(level, host));
      }
      checkMost("ranks send to host " + std::to_string(host) + " in phase " + std::to_string(phase),
                ranks.size(), static_cast<size_t>(mostLanes() * hosts));
    }
  }

  // What a rank has of each node that it meets, as it came, as it goes on, and added up; of what
  // goes together between hosts, as much as there is room for.
  void checkScratch(int rank) {
    const Job& job = jobs_[rank];
    const int host = shape_.hostOf(rank);
    uint64_t nodes = shape_.membersOf(host).size();
    for (int level = 1; level <= shape_.levels(); ++level) {
      const int size = shape_.unitSize(level - 1);
      const int unit = shape_.unitOf(level, host), first = shape_.firstHost(level, unit);
      for (int part = first; part < first + shape_.hostsIn(level, unit); part += size) {
        nodes += shape_.nodesOf(level - 1, part / size).size();
      }
    }
    auto hasOf = [&](const std::vector<uint64_t>& blocks) {
      uint64_t bytes = 0;
      for (const uint64_t block : blocks) {
        bytes += std::min(chunking_.chunkBytes, block - std::min(chunking_.begin(chunk_), block));
      }
      return bytes;
    };
    const uint64_t wide = job.wideBytes / job.elementBytes;
    const uint64_t together = areaBytes(shape_) + 2 * job.elementBytes * shape_.hosts();
    checkMost("rank " + std::to_string(rank) + " has bytes of scratch memory",
              ranks_[rank].plan.scratchBytes,
              isExchange() ? together : 3 * wide * nodes * std::max(hasOf(job.in), hasOf(job.out)));
  }

  void checkMost(const std::string& what, size_t number, size_t most) {
    if (number > most) {
      fail(what + ": " + std::to_string(number) + ", and " + std::to_string(most) + " at most");
    }
  }

  // The elements of a place; null: they are not there. For this rank to read, or to write.
  Cell* at(int rank, Place place, bool isWrite) {
    if (place.space == Space::kInput || place.space == Space::kOutput) {
      place.begin += chunking_.begin(chunk_);
    }
    Rank& each = ranks_[rank];
    const bool isShared = place.space == Space::kShared;
    const int owner = isShared ? shape_.membersOf(shape_.hostOf(rank)).at(place.block) : rank;
    std::vector<Cell>& memory = isShared                         ? ranks_[owner].area
                                : place.space == Space::kScratch ? each.scratch
                                : place.space == Space::kOutput  ? each.out.at(place.block)
                                                                 : each.in.at(place.block);
    const uint64_t unit = each.job->elementBytes;
    const uint64_t begin = place.begin / unit, end = (place.begin + place.bytes) / unit;
    if (place.begin % unit != 0 || end > memory.size()) return nullptr;
    for (uint64_t i = begin; i < end && isShared; ++i) {
      int& readableAfter = ranks_[owner].readableAfter[i];
      if (isWrite) {
        if (owner != rank || readableAfter != 0) fail("shared memory is written to by two");
        readableAfter = ranks_[owner].marks + 1;
      } else if (owner != rank && (readableAfter == 0 || each.seen[owner] < readableAfter)) {
        fail("rank " + std::to_string(rank) + " reads what rank " + std::to_string(owner) +
             " may not yet have written");
      }
    }
    return memory.data() + begin;
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
  }

  // Phases of all ranks, as far as they come. A message is over when both sides are at it.
  void runChunk() {
    std::deque<int> ready;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (static_cast<int>(rank) != away_) ready.push_back(static_cast<int>(rank));
    }
    while (!ready.empty() && wrong_.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      if (rank == away_) continue;
      Rank& each = ranks_[rank];
      while (wrong_.empty() && each.underWay == 0 && each.next < each.plan.steps.size()) {
        if (!beginPhase(rank, &ready)) break;
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Rank& each = ranks_[rank];
      if (static_cast<int>(rank) == away_) continue;
      const bool isOver = each.underWay == 0 && each.next == each.plan.steps.size();
      if (isOver && away_ >= 0) {
        fail("rank " + std::to_string(rank) + " does not wait for rank " + std::to_string(away_));
      }
      if (isOver || away_ >= 0) continue;
      fail("rank " + std::to_string(rank) + " waits for ever");
    }
  }

  // False: it waits for others of its host.
  bool beginPhase(int rank, std::deque<int>* ready) {
    Rank& each = ranks_[rank];
    const int phase = each.plan.steps[each.next].phase;
    for (; each.next < each.plan.steps.size(); ++each.next) {
      const Step& step = each.plan.steps[each.next];
      if (step.phase != phase) break;
      if (step.act == Step::Act::kFold) fold(rank, step);
      if (step.act == Step::Act::kCopy)
        copy(rank, each.plan.inputs[step.first].place, rank, step.place);
      if (step.act == Step::Act::kMark) mark(rank, step.mark, ready);
      if (step.act == Step::Act::kWait && !hasWaited(rank, step.mark)) return false;
      if (step.act < Step::Act::kSend) continue;
      const bool isSend = step.act == Step::Act::kSend;
      const auto pair =
          isSend ? std::tuple(rank, step.peer, phase) : std::tuple(step.peer, rank, phase);
      auto& waiting = (isSend ? receives_ : sends_)[pair];
      ++each.underWay;
      if (waiting.empty()) {
        (isSend ? sends_ : receives_)[pair].push_back(step.place);
        continue;
      }
      const Place theirs = waiting.front();
      waiting.pop_front();
      Rank& other = ranks_[step.peer];
      if (isSend) {
        copy(rank, step.place, step.peer, theirs);
      } else {
        copy(step.peer, theirs, rank, step.place);
      }
      --each.underWay;
      if (--other.underWay == 0) ready->push_back(step.peer);
    }
    return true;
  }

  // Those of its host that wait for it may go on.
  void mark(int rank, Mark mark, std::deque<int>* ready) {
    Rank& each = ranks_[rank];
    int& markedAs = each.markedAs[static_cast<int>(mark)];
    if (markedAs != 0) fail("rank " + std::to_string(rank) + " sets a mark twice");
    markedAs = ++each.marks;
    for (const int member : shape_.membersOf(shape_.hostOf(rank))) {
      if (member != rank) ready->push_back(member);
    }
  }

  // False: some rank has not come so far. Areas are free here: each chunk has its own.
  bool hasWaited(int rank, Mark mark) {
    if (mark == Mark::kDone) return true;
    const std::vector<int>& members = shape_.membersOf(shape_.hostOf(rank));
    for (const int member : members) {
      if (member != rank && ranks_[member].markedAs[static_cast<int>(mark)] == 0) return false;
    }
    for (const int member : members) {
      int& seen = ranks_[rank].seen[member];
      seen = std::max(seen, ranks_[member].markedAs[static_cast<int>(mark)]);
    }
    return true;
  }

  void copy(int from, const Place& source, int to, const Place& target) {
    if (source.bytes != target.bytes) return fail("a message is not as long as expected");
    if (source.bytes == 0) return;
    const Cell* read = at(from, source, false);
    Cell* write = at(to, target, true);
    if (!read || !write) return fail("a message is outside of its memory");
    std::copy_n(read, source.bytes / ranks_[from].job->elementBytes, write);
  }

  void fold(int rank, const Step& step) {
    Rank& each = ranks_[rank];
    const uint64_t wide = each.job->wideBytes / each.job->elementBytes;
    const std::vector<FoldInput> inputs(each.plan.inputs.begin() + step.first,
                                        each.plan.inputs.begin() + step.first + step.inputs);
    Cell* to = at(rank, step.place, true);
    if (!to) return fail("a result is outside of its memory");
    const uint64_t width = step.isResult ? 1 : wide;
    std::vector<const Cell*> read;
    for (const FoldInput& input : inputs) {
      read.push_back(at(rank, input.place, false));
      if (!read.back()) return fail("an input is outside of its memory");
    }
    std::vector<Cell> results;
    for (uint64_t i = 0; i < step.count; ++i) {
      std::vector<Cell> cells;
      for (size_t k = 0; k < inputs.size(); ++k) {
        const FoldInput& input = inputs[k];
        cells.push_back(read[k][i * (input.isWide ? wide : 1)]);
        if (cells.back().node != input.node || cells.back().isWide != input.isWide ||
            cells.back().isResult) {
          return fail("rank " + std::to_string(rank) + " adds up " + describe(cells.back()));
        }
        if (cells.back().block != cells[0].block || cells.back().element != cells[0].element) {
          return fail("rank " + std::to_string(rank) + " adds up different elements");
        }
      }
      size_t next = 0;
      if (!isTree(cells, cells.front().node.lo, cells.back().node.hi, &next) ||
          next != cells.size()) {
        return fail("rank " + std::to_string(rank) + " adds up what is no node");
      }
      Cell result = cells[0];
      result.node.hi = cells.back().node.hi;
      result.isWide = !step.isResult && wide > 1;
      result.isResult = step.isResult;
      results.insert(results.end(), width, result);
    }
    std::copy(results.begin(), results.end(), to);
  }

  bool isTree(const std::vector<Cell>& cells, int lo, int hi, size_t* next) const {
    if (*next >= cells.size()) return false;
    const Node node = cells[*next].node;
    if (node.lo == lo && node.hi == hi) return ++*next, true;
    if (hi - lo < 2) return false;
    const int middle = tree_.middle(lo, hi);
    return isTree(cells, lo, middle, next) && isTree(cells, middle, hi, next);
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
        return fail("rank " + std::to_string(rank) + " ends with " + describe(cell) +
                    " where there should be " + describe(expected));
      }
    }
  }

  const Shape& shape_;
  std::vector<Job> jobs_;
  const Chunking chunking_;
  uint64_t chunk_ = 0;
  const std::vector<bool>& sharesMemory_;  // by host
  const SumTree tree_;
  const int away_;
  std::vector<Rank> ranks_;
  // By sender, receiver and phase.
  std::map<std::tuple<int, int, int>, std::deque<Place>> sends_, receives_;
  std::string wrong_;
};

// jobs[rank]: the same collective, as each rank sees it. sharesMemory: on which hosts ranks do so,
// for jobs that they may share. away: this rank does not come, for which all others are to wait.
// "" if all is well; else what is wrong.
inline std::string verify(const Shape& shape, const std::vector<Job>& jobs,
                          const Chunking& chunking, const std::vector<bool>& sharesMemory,
                          SumTree tree = SumTree(), int away = -1) {
  return Verifier(shape, jobs, chunking, sharesMemory, tree, away).run();
}

}  // namespace test::verifier
