// mycoll's calls on device memory, as calls of NCCL. Spans are device memory here; streams are
// cudaStream_t. Nothing waits for the device.
//
// Thread contract: [any thread]; an Issue belongs to one thread.
// Lifetimes: the caller keeps the memory until the stream has passed the operation.
#pragma once

#include "base/call.h"
#include "nccl/issue.h"

namespace mycoll::nccl {

// How a call is to be carried out, where the call itself does not say it.
struct Form {
  // A promise that holds on all ranks or on none: the parts of a list are equal in size and lie one
  // after the other, also on the other ranks. Then NCCL has one function for the operation. Without
  // it, even if it is true here, a list travels as a group of transfers: another rank's may not be.
  bool isFlat = false;
  int capability = 0;  // of the oldest GPU of all ranks, 90 for sm_90; 0: not known
};

// Whether NCCL can do it, before anything is sent: the same answer on all ranks that ask the same.
Status check(const Library& library, const Call& call, const Form& form = {});

// Enqueues the call on the stream; of a failure, see Issue::take(). The lists of `call` are as
// base/call.h has them, and:
//   kBarrier   out[0] is 4 bytes of device memory whose content does not matter (an all_reduce)
// Elements are moved as bytes whatever their type. Parts of no length are left out on both sides.
Status enqueue(Issue& issue, const Call& call, CudaStream stream, const Form& form = {});

// Point to point. Both of a pair in one group (Issue::group()) if this rank sends and receives.
Status send(Issue& issue, Span data, int peer, CudaStream stream);
Status receive(Issue& issue, Span data, int peer, CudaStream stream);

}  // namespace mycoll::nccl
