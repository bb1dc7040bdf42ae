// A simulated accelerator without torch: streams that run concurrently with their caller, events
// that complete later, memory that the host cannot access, and graphs that record work. It detects
// mistakes that show only rarely on a real device:
//
//   a missing wait        streams are threads; each task is delayed by a random time
//                         (STANDIN_DELAY_US)
//   a host that reads     device addresses are mapped without access, so dereferencing one on the
//   device memory         host raises SIGSEGV. Work on a stream gets the bytes from touch()
//   memory freed early    free() takes effect in the order of the stream that allocated the memory,
//                         at the next allocation there (when a caching allocator might reuse it).
//                         Then the bytes are poisoned and kept for some time. Work that touches
//                         them aborts the process with a message; so does a write without touch(),
//                         when it is detected
//   a write past the end  detected when the memory is freed
//
// Thread contract: all functions [any thread] unless documented otherwise. Work on a stream runs on
// that stream's thread, in order; it may enqueue, and must not wait for its own stream.
// Lifetimes: streams live as long as the process. Memory, events and graphs belong to the caller.
// Functions that can refuse return null on success, or else a message that remains valid until this
// thread's next call. Misuse with undefined results on a real device aborts the process with a
// message.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STANDIN_API __attribute__((visibility("default")))

// --- devices. Their number is STANDIN_DEVICES, 4 by default.

STANDIN_API int mycoll_standin_device_count(void);
STANDIN_API const char* mycoll_standin_device_synchronize(int device);
STANDIN_API int mycoll_standin_current_device(void);  // of this thread; initially 0
STANDIN_API void mycoll_standin_set_current_device(int device);
// The devices on which this process has a context, as bits. A call that needs a context calls
// enter(), which makes one on the thread's current device; a thread that never set a device
// therefore makes it on device 0. On a GPU each context takes half a gigabyte.
STANDIN_API void mycoll_standin_enter(void);
STANDIN_API uint64_t mycoll_standin_device_contexts(void);

// --- streams. Null stands for the current device's default stream, as in CUDA.

STANDIN_API void* mycoll_standin_default_stream(int device);
STANDIN_API void* mycoll_standin_stream(void* stream);  // resolves null to the default stream
// priority: lower is more urgent, as in CUDA; it is only recorded.
STANDIN_API void* mycoll_standin_stream_create(int device, int priority);
STANDIN_API int mycoll_standin_stream_device(void* stream);
STANDIN_API int mycoll_standin_stream_priority(void* stream);
STANDIN_API const char* mycoll_standin_stream_synchronize(void* stream);
STANDIN_API const char* mycoll_standin_stream_query(void* stream, int* isDone);

// Runs fn(argument) in order on the stream. Under capture it is recorded, and runs once for each
// launch of the graph: `argument` must then live as long as the graph.
STANDIN_API void mycoll_standin_enqueue(void* stream, void (*fn)(void*), void* argument);
// The same; also calls destroy(argument) once, when fn cannot run again.
STANDIN_API void mycoll_standin_enqueue_owned(void* stream, void (*fn)(void*), void* argument,
                                              void (*destroy)(void*));

// Blocks the stream for a time, or until the gate is opened. Not recorded under capture.
STANDIN_API void mycoll_standin_stream_sleep(void* stream, int64_t microseconds);
STANDIN_API void* mycoll_standin_gate_close(void* stream);
STANDIN_API void mycoll_standin_gate_open(void* gate);  // frees the gate

// Delays every task by a random time up to this. Replaces STANDIN_DELAY_US.
STANDIN_API void mycoll_standin_set_delay(int64_t microseconds);

// --- events

STANDIN_API void* mycoll_standin_event_create(void);
STANDIN_API void mycoll_standin_event_destroy(void* event);
STANDIN_API const char* mycoll_standin_event_record(void* event, void* stream);
STANDIN_API const char* mycoll_standin_event_block(void* event, void* stream);
// An event that was never recorded is done.
STANDIN_API const char* mycoll_standin_event_query(void* event, int* isDone);
STANDIN_API const char* mycoll_standin_event_synchronize(void* event);
STANDIN_API const char* mycoll_standin_event_elapsed(void* start, void* end, double* milliseconds);

// From now on, queries of events and streams return this error, as on a device whose work has
// failed. Null ends that.
STANDIN_API void mycoll_standin_break(const char* sentence);

// --- memory

// free() takes effect in the order of `stream`. Returns null when the arena (STANDIN_MEMORY_MB,
// 8192 by default) is full.
STANDIN_API void* mycoll_standin_malloc(size_t bytes, void* stream);
// Pinned memory: the host may use it, copies to and from it are asynchronous. Freed immediately.
STANDIN_API void* mycoll_standin_host_malloc(size_t bytes);
STANDIN_API void mycoll_standin_free(void* address);
// free() also waits for the work on this stream (torch's record_stream).
STANDIN_API void mycoll_standin_record_use(void* address, void* stream);
STANDIN_API int mycoll_standin_is_pinned(const void* address);
STANDIN_API int mycoll_standin_pointer_device(const void* address);  // -1: not device memory

// Returns where work that runs on a stream can read and write the bytes of a range; returns
// addresses that are not device memory unchanged. Aborts the process if part of the range is not
// allocated now. what: the name of the work in that message.
STANDIN_API void* mycoll_standin_touch(const void* address, size_t bytes, const char* what);

// As cudaMemcpyAsync: a copy from pageable memory reads the bytes during the call; a copy to
// pageable memory returns when they have arrived.
STANDIN_API const char* mycoll_standin_copy(void* target, const void* source, size_t bytes,
                                            void* stream);
STANDIN_API void mycoll_standin_fill(void* target, int byte, size_t bytes, void* stream);

// Aborts the process if freed memory was written to.
STANDIN_API void mycoll_standin_verify(void);

// --- graphs

// From begin to end, work for the stream is recorded. A stream that waits for an event of a capture
// joins it; it must be joined back (by an event) before the end. A query of such an event, or a
// wait for it on the host, invalidates the capture.
//
// mode: cudaStreamCaptureMode, see mycoll_standin_set_strict_capture.
STANDIN_API const char* mycoll_standin_capture_begin(void* stream, int mode);
STANDIN_API int mycoll_standin_is_capturing(void* stream);
STANDIN_API uint64_t mycoll_standin_capture_id(void* stream);  // 0: none
STANDIN_API const char* mycoll_standin_capture_end(void* stream, void** graph);
// Runs the recorded work in the recorded order on one stream.
STANDIN_API void mycoll_standin_graph_launch(void* graph, void* stream);
// Also frees memory that was allocated under capture and released since.
STANDIN_API void mycoll_standin_graph_destroy(void* graph);
STANDIN_API void* mycoll_standin_graph_share(void* graph);  // another reference, to be destroyed

// CUDA's rule, off by default. A thread that captures may not query or wait for events and streams,
// unless the capture is relaxed (2). While a thread captures in global mode (0), no other thread
// whose own mode is global may do so either. A relaxed thread always may. A call that breaks the
// rule is refused, and the capture fails at its end.
STANDIN_API void mycoll_standin_set_strict_capture(int isStrict);
STANDIN_API int mycoll_standin_exchange_capture_mode(int mode);  // of this thread; returns the old

// --- an idle device, to measure how much CPU time its callers need: STANDIN_IDLE=RUNTIME,NCCL.
// No work runs, every event has passed, and results are garbage. A call of the CUDA runtime takes
// RUNTIME nanoseconds, a call of NCCL takes NCCL nanoseconds.

STANDIN_API int mycoll_standin_is_idle(void);
STANDIN_API void mycoll_standin_spend(int isNccl);  // does nothing if the device is not idle

// --- the memory of this process, for tests

struct mycoll_standin_counts {
  int64_t liveAllocations, liveBytes, pinnedBytes;
  int64_t recordedUses;  // calls of mycoll_standin_record_use
};
STANDIN_API void mycoll_standin_count(struct mycoll_standin_counts* counts);

#ifdef __cplusplus
}
#endif
