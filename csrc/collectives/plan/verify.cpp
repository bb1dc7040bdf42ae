#include "collectives/plan/verify.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

namespace mycoll {
namespace {

// What stands in an element of memory: element `element` of block `block` of some ranks' inputs.
struct Cell {
  int block = -1;
  uint64_t element = 0;
  Node node;
  bool isWide = false;
  bool isResult = false;
  bool operator==(const Cell&) const = default;
};

std::string describe(const Cell& cell) {
  if (cell.block < 0) return "nothing";
  return "element " + std::to_string(cell.element) + " of block " + std::to_string(cell.block) +
         " of ranks " + std::to_string(cell.node.lo) + " to " + std::to_string(cell.node.hi) +
         (cell.isResult ? ", rounded"
          : cell.isWide ? ", wide"
                        : "");
}

bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

// One rank's memory and how far it is.
struct Rank {
  const Job* job = nullptr;
  Plan plan;
  std::vector<std::vector<Cell>> in, out;
  std::vector<Cell> scratch;
  size_t next = 0;      // step
  size_t underWay = 0;  // messages of the phase

  Cell* at(const Place& place) {
    std::vector<Cell>& memory = place.space == Space::kScratch  ? scratch
                                : place.space == Space::kOutput ? out.at(place.block)
                                                                : in.at(place.block);
    const uint64_t unit = job->elementBytes;
    if (place.begin % unit != 0 || (place.begin + place.bytes) / unit > memory.size()) {
      return nullptr;
    }
    return memory.data() + place.begin / unit;
  }
};

class Verifier {
 public:
  Verifier(const Shape& shape, const std::vector<Job>& jobs, const Chunking& chunking)
      : shape_(shape), jobs_(jobs), chunking_(chunking) {}

  std::string run() {
    ranks_.resize(jobs_.size());
    for (size_t rank = 0; rank < jobs_.size(); ++rank) fill(static_cast<int>(rank));
    for (uint64_t chunk = 0; chunk < chunking_.chunks && wrong_.empty(); ++chunk) {
      for (size_t rank = 0; rank < jobs_.size(); ++rank) {
        Rank& each = ranks_[rank];
        each.plan = planOf(shape_, jobs_[rank], static_cast<int>(rank), chunking_, chunk);
        each.scratch.assign(each.plan.scratchBytes / each.job->elementBytes, Cell());
        each.next = 0;
      }
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
    for (size_t rank = 0; rank < ranks_.size(); ++rank) ready.push_back(static_cast<int>(rank));
    while (!ready.empty() && wrong_.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      Rank& each = ranks_[rank];
      while (wrong_.empty() && each.underWay == 0 && each.next < each.plan.steps.size()) {
        beginPhase(rank, &ready);
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Rank& each = ranks_[rank];
      if (each.underWay == 0 && each.next == each.plan.steps.size()) continue;
      fail("rank " + std::to_string(rank) + " waits for ever");
    }
  }

  void beginPhase(int rank, std::deque<int>* ready) {
    Rank& each = ranks_[rank];
    const int phase = each.plan.steps[each.next].phase;
    for (; each.next < each.plan.steps.size(); ++each.next) {
      const Step& step = each.plan.steps[each.next];
      if (step.phase != phase) break;
      if (step.act == Step::Act::kFold) fold(rank, step);
      if (step.act == Step::Act::kCopy)
        copy(each, each.plan.inputs[step.first].place, each, step.place);
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
        copy(each, step.place, other, theirs);
      } else {
        copy(other, theirs, each, step.place);
      }
      --each.underWay;
      if (--other.underWay == 0) ready->push_back(step.peer);
    }
  }

  void copy(Rank& from, const Place& source, Rank& to, const Place& target) {
    if (source.bytes != target.bytes) return fail("a message is not as long as expected");
    if (source.bytes == 0) return;
    const Cell* read = from.at(source);
    Cell* write = to.at(target);
    if (!read || !write) return fail("a message is outside of its memory");
    std::copy_n(read, source.bytes / from.job->elementBytes, write);
  }

  void fold(int rank, const Step& step) {
    Rank& each = ranks_[rank];
    const uint64_t wide = each.job->wideBytes / each.job->elementBytes;
    const std::vector<FoldInput> inputs(each.plan.inputs.begin() + step.first,
                                        each.plan.inputs.begin() + step.first + step.inputs);
    Cell* to = each.at(step.place);
    if (!to) return fail("a result is outside of its memory");
    const uint64_t width = step.isResult ? 1 : wide;
    std::vector<Cell> results;
    for (uint64_t i = 0; i < step.count; ++i) {
      std::vector<Cell> cells;
      for (const FoldInput& input : inputs) {
        const Cell* from = each.at(input.place);
        if (!from) return fail("an input is outside of its memory");
        cells.push_back(from[i * (input.isWide ? wide : 1)]);
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
      result.isWide = !step.isResult;
      result.isResult = step.isResult;
      results.insert(results.end(), width, result);
    }
    std::copy(results.begin(), results.end(), to);
  }

  static bool isTree(const std::vector<Cell>& cells, int lo, int hi, size_t* next) {
    if (*next >= cells.size()) return false;
    const Node node = cells[*next].node;
    if (node.lo == lo && node.hi == hi) return ++*next, true;
    if (hi - lo < 2) return false;
    const int middle = lo + static_cast<int>(std::bit_floor(static_cast<unsigned>(hi - lo - 1)));
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
  const std::vector<Job>& jobs_;
  const Chunking chunking_;
  std::vector<Rank> ranks_;
  // By sender, receiver and phase.
  std::map<std::tuple<int, int, int>, std::deque<Place>> sends_, receives_;
  std::string wrong_;
};

}  // namespace

std::string verify(const Shape& shape, const std::vector<Job>& jobs, const Chunking& chunking) {
  return Verifier(shape, jobs, chunking).run();
}

Job evenJob(OpKind kind, int ranks, int rank, int root, uint64_t bytes, uint64_t elementBytes,
            uint64_t wideBytes) {
  Job job{kind, root, elementBytes, wideBytes, {}, {}};
  const std::vector<uint64_t> each(ranks, bytes);
  const bool isRoot = rank == root;
  switch (kind) {
    case OpKind::kBroadcast: job.out = {bytes}; break;
    case OpKind::kAllReduce: job.in = job.out = {bytes}; break;
    case OpKind::kReduce:
      job.in = {bytes};
      if (isRoot) job.out = {bytes};
      break;
    case OpKind::kAllGather: job.in = {bytes}, job.out = each; break;
    case OpKind::kGather:
      job.in = {bytes};
      if (isRoot) job.out = each;
      break;
    case OpKind::kScatter:
      job.out = {bytes};
      if (isRoot) job.in = each;
      break;
    case OpKind::kReduceScatter: {
      const uint64_t block = bytes / elementBytes / ranks * elementBytes;
      job.in.assign(ranks, block);
      job.out = {block};
      break;
    }
    case OpKind::kAllToAll: job.in = job.out = each; break;
    default: break;
  }
  return job;
}

}  // namespace mycoll
