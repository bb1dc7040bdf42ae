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

class HostCollective {
 public:
  // ready: after this event, the caller's inputs are valid and its outputs may be written.
  HostCollective(std::shared_ptr<HostStaging> staging, DeviceOperationPtr operation, EventPtr ready,
                 int rank, int ranks, std::vector<Call> calls, CopyBacks copyBacks);

  // self: keeps the collective alive in the task's frame.
  static Task run(std::shared_ptr<HostCollective> self, CollectiveRunner& runner);

 private:
  // The memory of the device that a call reads and writes.
  struct Sides {
    Spans reads;
    Spans writes;
  };

  Task runCall(const Call& call, CollectiveRunner& runner);
  Status deviceError(const EventPassed& event) const;
  Sides sidesOf(const Call& call) const;
  size_t chunkBytesOf(const Call& call, uint64_t longest) const;
  HostStaging::Buffer& buffer(uint64_t chunk) const { return staging_->buffers[chunk % 2]; }

  Status begin();
  Status copyIn(const Sides& sides, size_t chunkBytes, uint64_t chunk);
  Status copyOut(const Sides& sides, size_t chunkBytes, uint64_t chunk);
  Status chunkOf(const Call& call, const Sides& sides, size_t chunkBytes, uint64_t chunk,
                 Call* chunked);
  Status end();

  const std::shared_ptr<HostStaging> staging_;
  const DeviceOperationPtr operation_;
  const EventPtr ready_;
  const int rank_;
  const int ranks_;
  const std::vector<Call> calls_;
  const CopyBacks copyBacks_;
  const c10::Stream inward_;
  const c10::Stream outward_;
};

}  // namespace mycoll
