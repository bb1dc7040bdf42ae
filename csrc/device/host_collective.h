// HostCollective: one collective of device tensors through host memory: a task of the `host` group.
//
//   device -> host    | 0 | 1 | 2 | 3 |
//   between ranks         | 0 | 1 | 2 | 3 |
//   host -> device            | 0 | 1 | 2 | 3 |
//
// While one chunk is transferred between the ranks, the next is copied from the device, and the
// former to it. All ranks make the same number of chunks: each is a collective of the engine.
//
// Thread contract: one thread at a time, the one that runs the group's queue; no GIL.
// Lifetimes: held by its task. The staging belongs to the path, and is used by one task at a time:
// the one at the head of the queue.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "backend/request.h"
#include "device/operation.h"
#include "engine/communicator.h"

namespace mycoll {

// The size of a chunk, with the parts for all ranks: large enough for a fast copy, small enough for
// an early start of the first transfer.
constexpr size_t kHostChunkBytes = 4 << 20;

// Two buffers in pinned memory, so that one is filled while the other is sent.
struct HostStaging {
  struct Buffer {
    at::Tensor in;
    at::Tensor out;
    EventPtr copiedIn;   // follows the last copy into `in`
    EventPtr copiedOut;  // follows the last copy out of `out`
  };
  Buffer buffers[2];
};

struct HostCollective {
  const std::shared_ptr<HostStaging> staging;
  const DeviceOperationPtr operation;
  const EventPtr ready;  // follows the caller's work on the memory
  const int rank;
  const int ranks;
  const std::vector<Call> calls;
  const CopyBacks copyBacks;
  const c10::Stream stream;  // of all copies: see HostPath
};

// The task. Its frame keeps `all` alive.
Task runThroughHost(std::shared_ptr<const HostCollective> all, CollectiveRunner& runner);

}  // namespace mycoll
