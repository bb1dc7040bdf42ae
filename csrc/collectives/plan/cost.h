// What plans cost: a walk over the plans of all ranks that counts messages and bytes, and a model
// of the time that they take. For people who want to know what a cluster would do before they have
// it.
//
// Plain functions: nothing blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/plan/plan.h"

namespace mycoll {

struct Network {
  double bandwidth = 1.25e9;          // of a host's link, bytes a second in each direction
  double latency = 50e-6;             // one way
  double overhead = 5e-6;             // of a rank, for a message
  double memoryRate = 5e9;            // of a rank, for bytes that it copies or adds up
  uint64_t eagerBytes = 1024 * 1024;  // longer messages ask first; in large groups it is less
};

struct PhaseCost {
  uint64_t messages = 0;  // between hosts, of all ranks
  uint64_t perRank = 0;   // most messages of a rank
  uint64_t sent = 0;      // most bytes that a host sends to others
  uint64_t received = 0;  // and receives from others
  uint64_t inside = 0;    // most bytes of a rank: messages inside the host, copied, added up
  double seconds = 0;
};

struct PlanCost {
  std::vector<PhaseCost> phases;  // of one chunk
  uint64_t chunks = 1;
  uint64_t sent = 0;      // by the host that sends most, in all
  uint64_t messages = 0;  // between hosts, in all
  uint64_t scratch = 0;   // most bytes of a rank
  uint64_t peers = 0;     // most ranks on other hosts that a rank talks to
  double seconds = 0;
};

// Equal blocks, see evenJob().
PlanCost costOf(const Shape& shape, OpKind kind, int root, uint64_t bytes, uint64_t elementBytes,
                uint64_t wideBytes, const Network& network);

}  // namespace mycoll
