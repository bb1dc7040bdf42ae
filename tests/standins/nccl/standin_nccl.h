// A pretend NCCL: libnccl.so.2 of our own, for machines without a GPU. It moves data between
// processes and between threads of one, through memory that they share, in the order of streams of
// ../device; it checks what NCCL checks, and some that NCCL leaves to luck; and it can be told to
// misbehave. It shows that mycoll's use of NCCL is right. It shows nothing about NCCL, nor speed.
//
// The script, from the variable STANDIN_NCCL or mycoll_standin_nccl_script(), is a list of
// key=value separated by commas. It is read anew by each call.
//
//   version=21801        what ncclGetVersion says; 22809 by default
//   progress_ms=20       how long non-blocking work stays in progress; 0 by default
//   rank=1               what follows is for this rank of a communicator only; by default for all
//   hang=init+op         what never ends (until the script changes or, the first five, an abort):
//                          connect  ncclCommInitRankConfig does not return
//                          init     the communicator stays in progress, be it a child of another
//                          enqueue  the call does not return
//                          op       it does, and the stream stands still
//                          finalize, destroy, abort
//   fail=init            init fails with an internal error; enqueue: the call returns one; id:
//                        ncclGetUniqueId returns a system error
//   error_after=3        the operations after the third of a communicator never end, and it reports
//   error=1              this asynchronous error (1: unhandled cuda error)
//   mismatch=error       what ranks that differ get: an asynchronous error, or by default what NCCL
//                        has for them, which is that nothing ever ends
//   duplicate_gpu=1      init is refused: two ranks on one GPU
//   window=none          symmetric windows are registered, and none is made: so NCCL answers where
//                        the machine cannot have them
//   init_syncs=0         what makes, connects, registers or ends something does not wait for all
//                        streams of its device, as cudaMalloc and cudaFree may do in NCCL
//   one_thread=0         two threads that are inside NCCL for one device do not end the process,
//                        unless with one communicator
//   connect=eagerly      the first collective of a kind and of a size class (up to 64 KiB, up to
//                        1 MiB, above) does not wait in its caller for all ranks, as NCCL's do
//   peer_death=hang      nobody notices that a peer's process is gone; by default that is an error
//
// Thread contract: [any thread], except that calls that enqueue on one communicator must not meet:
// that ends the process with a sentence. So does a communicator that is used after its end, that is
// freed while a thread is inside NCCL with it, or that is split while operations are outstanding.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STANDIN_NCCL_API __attribute__((visibility("default")))

// Replaces what STANDIN_NCCL says; null: back to it.
STANDIN_NCCL_API void mycoll_standin_nccl_script(const char* script);

// How often a function of NCCL was called ("ncclAllReduce"), and of this process so far:
//   comms        communicators that are neither destroyed nor aborted
//   launches     that ran on streams
//   mismatches   that were noticed
//   aborted      launches that an abort ended
STANDIN_NCCL_API int64_t mycoll_standin_nccl_count(const char* what);

// Copies the ncclConfig_t that was accepted last.
STANDIN_NCCL_API void mycoll_standin_nccl_last_config(void* config, uint64_t bytes);

#ifdef __cplusplus
}
#endif
