// Makes mycoll's calls on device memory by calls of NCCL. Spans are device memory here; streams are
// cudaStream_t. No function waits for the device.
//
// Thread contract: [any thread]; an Issue belongs to one thread.
// Lifetimes: the caller keeps the memory until the stream has completed the operation.
#pragma once

#include "base/call.h"
#include "nccl/issue.h"

namespace mycoll::nccl {

// Properties of a call that Call does not contain.
struct Form {
  // Of an all_gather or a reduce_scatter. A promise, made by all ranks or by none: the parts of the
  // list are equal in size and contiguous, also on the other ranks. Then NCCL has one function for
  // the operation. Without it a list is a group of transfers even if it is contiguous here, as
  // those of other ranks may not be.
  bool isFlat = false;
  int capability = 0;  // of the oldest GPU of all ranks, 90 for sm_90; 0: not known
};

// Whether NCCL supports the call, before anything is sent: ranks that pass the same get the same
// answer.
Status check(const Library& library, const Call& call, const Form& form = {});

// Enqueues a call that has tensors on the stream; for failures see Issue::take(). Elements are
// moved as bytes whatever their type. Empty parts are skipped on both sides.
Status enqueue(Issue& issue, const Call& call, CudaStream stream, const Form& form = {});

// Point to point. If this rank both sends and receives, both must be in one group (Issue::group()).
Status send(Issue& issue, Span data, int peer, CudaStream stream);
Status receive(Issue& issue, Span data, int peer, CudaStream stream);

}  // namespace mycoll::nccl
