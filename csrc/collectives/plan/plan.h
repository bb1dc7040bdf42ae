// Plan: the steps of one rank in a collective between hosts. It is a pure function of the
// operation, the sizes and the shape of the world: all ranks plan alike, and a verifier proves
// plans without running them (tests/cpp/plan_verifier.h).
//
// Bytes cross the network once for each host that needs them, not once for each rank:
//
//   reduce     ranks of a host -> its driver of the lane: adds up the nodes of the tree that the
//              host has -> the owner of the piece, which adds up the rest and rounds once
//   gather     the owner of a piece -> a driver on each other host -> the ranks of that host
//   all_reduce first a reduce, then a gather; broadcast deals pieces out and gathers them. In large
//              worlds the ranks of a root's host send or receive for it, each for its lane
//   exchange   (gather, scatter, all_to_all) small blocks of a host's ranks for those of another
//              host -> one of its ranks -> one rank of the other host -> the ranks of that host;
//              large blocks go from rank to rank
//
// If the ranks of a host share memory (shm/arena.h), they pass bytes to each other through it: in
// phase 1 each rank copies what others need to its area, and at the end the holder of a shared
// result copies it there. Messages between hosts are the same with and without shared memory, so
// hosts may differ.
//
// A small all_reduce ("whole") has no owner: each host adds up everything, in one hop instead of
// two. Between more than 16 hosts all of this is done level by level (shape.h), so that a rank
// communicates with few others. Large data is split into chunks; several are in flight, each in
// another phase (run.h).
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "collectives/plan/shape.h"

namespace mycoll {

enum class Space : uint8_t { kInput, kOutput, kScratch, kShared };

// Memory of this rank. block: the index of the call's span; begin: relative to where the chunk
// begins in it. kShared: the area of a rank of this host; block: that rank, as Shape::indexOf()
// counts.
struct Place {
  Space space = Space::kScratch;
  int block = 0;
  uint64_t begin = 0;
  uint64_t bytes = 0;
};

// The marks by which the ranks of a host notify each other, each once per chunk, in the order of
// chunks.
enum class Mark : uint8_t {
  kGiven,   // the part of its input that others need is in its area
  kShared,  // the part of the result that it holds is in its area, too
  kDone,    // it no longer needs the areas of this chunk; a wait for this waits for a free area
};

struct Step {
  enum class Act : uint8_t {
    kCopy,  // from inputs[first] to place
    kFold,  // inputs to place
    kMark,  // sets the mark for the ranks of this host
    kWait,  // until all of them have set the mark
    kSend,
    kReceive,
  };
  Act act = Act::kSend;
  Mark mark = Mark::kGiven;
  uint8_t phase = 0;
  bool isResult = false;  // kFold: rounded, and divided
  int peer = -1;
  Place place;
  // kFold, kCopy: a range of Plan::inputs.
  uint32_t first = 0;
  uint32_t inputs = 0;
  uint64_t count = 0;  // kFold: elements
};

struct FoldInput {
  Node node;
  Place place;
  bool isWide = false;
};

// Steps are sorted by phase. A phase first carries out its steps in memory, in order; then all its
// messages are in flight together, those between two ranks in the order of this list. The next
// phase begins when they are over.
struct Plan {
  std::vector<Step> steps;
  std::vector<FoldInput> inputs;
  uint64_t scratchBytes = 0;
  int phases = 0;
};

// A collective, as the input of plans.
struct Job {
  OpKind kind = OpKind::kBarrier;
  int root = -1;
  uint64_t elementBytes = 1;
  uint64_t wideBytes = 1;  // of an element of a partial sum
  // As in Call: the sizes of this rank's blocks. Sizes on which plans of other ranks depend are
  // equal on all ranks.
  std::vector<uint64_t> in;
  std::vector<uint64_t> out;
  // For an exchange by host: the bytes that each rank of this host sends to every rank and receives
  // from it, by Shape::indexOf(). Both ranks of a pair know its size, so that two hosts plan the
  // same messages from one to the other.
  struct Row {
    std::vector<uint64_t> sends, receives;
    bool operator==(const Row&) const = default;
  };
  std::vector<Row> rows = {};
  bool operator==(const Job&) const = default;
};

// Whether it is an exchange in which small blocks are sent together, so that rows are needed.
bool goesByHost(const Shape& shape, OpKind kind);
// Whether its own row alone shows that no block of this rank is sent together with others: then it
// needs no rows.
bool goesByItself(const Shape& shape, const Job& job, int rank);
Job::Row rowOf(const Job& job, int ranks, int rank);

// A job is done in `chunks` chunks; that number is the same on all ranks. A chunk has the bytes of
// every block from chunk * chunkBytes on.
struct Chunking {
  uint64_t chunks = 1;
  uint64_t chunkBytes = ~uint64_t{0};
  uint64_t begin(uint64_t chunk) const { return chunk == 0 ? 0 : chunk * chunkBytes; }
};

// The number of steps (run.h) that a phase may take, so that the network has something to do while
// a step ends: two, or more if chunks are small, as a link with a long delay needs many bytes in
// flight.
uint64_t stepsOfAPhase(const Shape& shape);

Chunking chunkingOf(const Shape& shape, const Job& job);
// Messages of a collective are identified by chunk and phase; those of one phase between two ranks
// are matched in order. No plan of several chunks has this many phases.
constexpr uint64_t kTagsOfAChunk = 16;
constexpr uint64_t tagOf(uint64_t chunk, int phase) {
  return chunk * kTagsOfAChunk + static_cast<uint64_t>(phase);
}
// Whether two chunks of a job have the same plan: as many bytes of each block.
bool areAlike(const Job& job, const Chunking& chunking, uint64_t chunk, uint64_t other);
// sharesMemory: whether the rank shares memory with the others of its host; only if isShared().
Plan planOf(const Shape& shape, const Job& job, int rank, const Chunking& chunking, uint64_t chunk,
            bool sharesMemory);

// Whether ranks of a host that share memory use it for this job; the same on all of them.
bool isShared(const Shape& shape, const Job& job, const Chunking& chunking);
// The bytes of an area, which is for one chunk, and the number of areas that a rank needs.
uint64_t areaBytes(const Shape& shape);
uint64_t areaCount(const Shape& shape);

}  // namespace mycoll
