// A simulated NCCL, libnccl.so.2, for machines without a GPU. It moves data between processes and
// between threads of one, through memory that they share, in the order of streams of ../device. It
// checks what NCCL checks, and some misuse that NCCL does not detect; and a script can make it
// fail. It shows that mycoll uses NCCL correctly. It shows nothing about NCCL itself or about
// speed.
//
// The script, from the variable STANDIN_NCCL or mycoll_standin_nccl_script(), is a list of
// key=value separated by commas. Each call reads it again.
//
//   version=21801        the result of ncclGetVersion; 22809 by default
//   progress_ms=20       how long non-blocking work stays in progress; 0 by default
//   rank=1               the following keys apply to this rank of a communicator only; by default
//                        to all
//   hang=init+op         what never ends (until the script changes or, for the first five, an
//                        abort):
//                          connect  ncclCommInitRankConfig does not return
//                          init     the communicator stays in progress, also as a child
//                          enqueue  the call does not return
//                          op       the call returns, and the stream blocks
//                          finalize, destroy, abort
//   fail=init            init fails with an internal error; enqueue: the call returns one; id:
//                        ncclGetUniqueId returns a system error
//   error_after=3        the operations after the third of a communicator never end, and it reports
//   error=1              this asynchronous error (1: unhandled cuda error)
//   mismatch=error       ranks whose operations differ get an asynchronous error; by default their
//                        operations never end, as in NCCL
//   duplicate_gpu=1      init is refused: two ranks on one GPU
//   window=none          registering a symmetric window succeeds and returns none, as NCCL does on
//                        machines without support for them
//   init_syncs=0         calls that make, connect, register or end something do not wait for all
//                        streams of the device; by default they do, as cudaMalloc and cudaFree may
//   one_thread=0         two threads may be inside NCCL for one device, with different
//                        communicators; by default that aborts the process
//   connect=eagerly      the first collective of a kind and of a size class (up to 64 KiB, up to
//                        1 MiB, above) does not wait in its caller for all ranks, as NCCL's do
//   peer_death=hang      the death of a peer's process is not detected; by default it is an error
//
// Thread contract: [any thread], except that two threads must not enqueue on one communicator at
// the same time: that aborts the process with a message. So does a communicator that is used after
// its end, that is freed while a thread is inside NCCL with it, or that is split while operations
// are outstanding.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STANDIN_NCCL_API __attribute__((visibility("default")))

// Replaces the script of STANDIN_NCCL; null restores it.
STANDIN_NCCL_API void mycoll_standin_nccl_script(const char* script);

// How often this process has called a function of NCCL ("ncclAllReduce"), or one of these numbers:
//   comms        communicators that are neither destroyed nor aborted
//   launches     launches that ran on streams
//   mismatches   mismatches that were detected
//   aborted      launches that an abort ended
STANDIN_NCCL_API int64_t mycoll_standin_nccl_count(const char* what);

// Copies the ncclConfig_t that was accepted last.
STANDIN_NCCL_API void mycoll_standin_nccl_last_config(void* config, uint64_t bytes);

#ifdef __cplusplus
}
#endif
