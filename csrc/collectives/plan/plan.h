// Plan: what one rank does in a collective between hosts, as a list of steps. It is a pure function
// of the operation, the sizes and the shape of the world: all ranks plan alike, and a verifier
// proves plans without running them (tests/cpp/plan_verifier.h).
//
// Bytes cross the network once for each host that needs them, not once for each rank:
//
//   reduce     ranks of a host -> its driver of the lane: adds up the nodes of the tree that the
//              host has -> the owner of the piece, which adds up the rest and rounds once
//   gather     the owner of a piece -> a driver on each other host -> the ranks of that host
//   all_reduce is the one and then the other; broadcast deals pieces out and gathers them. In
//              large worlds the ranks of a root's host send or receive for it, each its lane
//   exchange   (gather, scatter, all_to_all) small blocks of a host's ranks for those of another
//              host -> one of its ranks -> one rank of the other host -> the ranks of that host;
//              large blocks from rank to rank
//
// Where the ranks of a host share memory (shm/arena.h), they pass bytes to each other through it:
// in phase 1 each puts what others need into its area, and what is to be shared at the end, its
// holder puts there. Messages between hosts are the same with and without it, so each host may do
// as it can.
//
// A small all_reduce ("whole") has no owner: each host adds up everything, one hop instead of two.
// Between more than 16 hosts all of this goes from level to level (shape.h), so that a rank talks
// to few others. What is large goes in chunks, of which several are under way, each in another
// phase (run.h).
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "collectives/plan/shape.h"

namespace mycoll {

enum class Space : uint8_t { kInput, kOutput, kScratch, kShared };

// Memory of this rank. block: which of the call's spans; begin: from where the chunk begins in it.
// kShared: the area of a rank of this host; block: which one, as Shape::indexOf() counts.
struct Place {
  Space space = Space::kScratch;
  int block = 0;
  uint64_t begin = 0;
  uint64_t bytes = 0;
};

// What the ranks of a host tell each other, each once for a chunk, in the order of chunks.
enum class Mark : uint8_t {
  kGiven,   // what the others need of its input is in its area
  kShared,  // what it holds of the result, too
  kDone,    // it needs the areas of this chunk no more; waiting for it is waiting for an area that
            // is free
};

struct Step {
  enum class Act : uint8_t {
    kCopy,  // from inputs[first] to place
    kFold,  // inputs to place
    kMark,  // says to the ranks of this host that it has come so far
    kWait,  // for all of them to have come so far
    kSend,
    kReceive,
  };
  Act act = Act::kSend;
  Mark mark = Mark::kGiven;
  uint8_t phase = 0;
  bool isResult = false;  // kFold: rounded, and divided
  int peer = -1;
  Place place;
  // kFold, kCopy: of Plan::inputs.
  uint32_t first = 0;
  uint32_t inputs = 0;
  uint64_t count = 0;  // kFold: elements
};

struct FoldInput {
  Node node;
  Place place;
  bool isWide = false;
};

// Steps are in order of their phases. In a phase first memory is worked on, in order; then all
// messages are under way together, those between two ranks in the order that they stand here. The
// next phase begins when they are over.
struct Plan {
  std::vector<Step> steps;
  std::vector<FoldInput> inputs;
  uint64_t scratchBytes = 0;
  int phases = 0;
};

// A collective as plans see it.
struct Job {
  OpKind kind = OpKind::kBarrier;
  int root = -1;
  uint64_t elementBytes = 1;
  uint64_t wideBytes = 1;  // of an element of a partial sum
  // As in Call: the sizes of this rank's blocks. Those that plans of other ranks depend on are
  // equal on all of them.
  std::vector<uint64_t> in;
  std::vector<uint64_t> out;
  // Of an exchange that goes by host: what each rank of this host sends to every rank and has from
  // it, by Shape::indexOf(). Both sides of a pair know its size, so that two hosts plan alike what
  // goes from one to the other.
  struct Row {
    std::vector<uint64_t> sends, receives;
    bool operator==(const Row&) const = default;
  };
  std::vector<Row> rows = {};
  bool operator==(const Job&) const = default;
};

// Whether it is an exchange in which what is small goes together, so that rows are needed.
bool goesByHost(const Shape& shape, OpKind kind);
// Whether nothing of this rank does, as its own row alone says: then it needs no rows.
bool goesByItself(const Shape& shape, const Job& job, int rank);
Job::Row rowOf(const Job& job, int ranks, int rank);

// A job is done in so many chunks; that number is the same on all ranks. Of every block a chunk has
// the bytes from chunk * chunkBytes.
struct Chunking {
  uint64_t chunks = 1;
  uint64_t chunkBytes = ~uint64_t{0};
  uint64_t begin(uint64_t chunk) const { return chunk == 0 ? 0 : chunk * chunkBytes; }
};

// A phase has so many steps' time (run.h), so that the network has something to do while a step
// ends: two, and more where chunks are small, as a line that is long needs many bytes under way.
uint64_t stepsOfAPhase(const Shape& shape);

Chunking chunkingOf(const Shape& shape, const Job& job);
// Messages of a collective are told apart by chunk and phase; those of one phase between two ranks
// are matched in order. No plan of several chunks has so many phases.
constexpr uint64_t kTagsOfAChunk = 16;
constexpr uint64_t tagOf(uint64_t chunk, int phase) {
  return chunk * kTagsOfAChunk + static_cast<uint64_t>(phase);
}
// Whether two chunks of a job have one plan: as much of each block.
bool areAlike(const Job& job, const Chunking& chunking, uint64_t chunk, uint64_t other);
// sharesMemory: with the other ranks of its host; only where isShared().
Plan planOf(const Shape& shape, const Job& job, int rank, const Chunking& chunking, uint64_t chunk,
            bool sharesMemory);

// Whether ranks of a host that share memory do this job through it; the same on all of them.
bool isShared(const Shape& shape, const Job& job, const Chunking& chunking);
// What they need: so many bytes for a chunk, and areas for so many chunks.
uint64_t areaBytes(const Shape& shape);
uint64_t areaCount(const Shape& shape);

}  // namespace mycoll
