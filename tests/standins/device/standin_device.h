// A pretend accelerator without torch: streams that really run beside their caller, events that
// complete later, memory that the host cannot touch, and a graph that records instead of running.
// It exists to make mistakes visible that a real one shows once a month:
//
//   a missing wait        streams are threads, with random delays (STANDIN_DELAY_US) before each
//                         task
//   a host that reads     device addresses are mapped without access: a host that follows one ends
//   device memory         in SIGSEGV. Work on a stream asks touch() for the bytes behind an address
//   memory freed early    free() takes effect in the order of the stream that allocated it, with
//   the
//                         next allocation there (as with a caching allocator, which then may give
//                         it away). Then the bytes are poisoned and kept for a while. Work that
//                         touches them ends the process with a sentence; so does a write that did
//                         not ask, once it is noticed
//   a write past the end  noticed when the memory is freed
//
// Thread contract: everything [any thread] unless it says otherwise. Work on a stream runs on that
// stream's thread, in order; it may enqueue, and must not wait for its own stream.
// Lifetimes: streams live as long as the process. Memory, events and graphs belong to the caller.
// Functions that can be refused return null, or a sentence that stays valid until this thread's
// next call. Misuse that a real device would not survive ends the process with a sentence.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STANDIN_API __attribute__((visibility("default")))

// --- devices: STANDIN_DEVICES of them, 4 by default

STANDIN_API int mycoll_standin_device_count(void);
STANDIN_API const char* mycoll_standin_device_synchronize(int device);
STANDIN_API int mycoll_standin_current_device(void);  // of this thread: 0, until it is set
STANDIN_API void mycoll_standin_set_current_device(int device);
// Devices on which this process has a context, as bits. One comes with the first call that needs
// it, which says so by enter(): on the thread's current device, so that a thread that never chose
// one makes it on device 0. On a GPU each takes half a gigabyte.
STANDIN_API void mycoll_standin_enter(void);
STANDIN_API uint64_t mycoll_standin_device_contexts(void);

// --- streams. Null stands for the current device's default stream, as in CUDA.

STANDIN_API void* mycoll_standin_default_stream(int device);
STANDIN_API void* mycoll_standin_stream(void* stream);  // the same; the default one for null
// priority: lower is more urgent, as everywhere; it is only recorded.
STANDIN_API void* mycoll_standin_stream_create(int device, int priority);
STANDIN_API int mycoll_standin_stream_device(void* stream);
STANDIN_API int mycoll_standin_stream_priority(void* stream);
STANDIN_API const char* mycoll_standin_stream_synchronize(void* stream);
STANDIN_API const char* mycoll_standin_stream_query(void* stream, int* isDone);

// Runs fn(argument) in order on the stream. Under capture it is recorded, and runs once for each
// launch of the graph: then `argument` has to live as long as the graph.
STANDIN_API void mycoll_standin_enqueue(void* stream, void (*fn)(void*), void* argument);
// The same; destroy(argument) is called once, when it cannot run again.
STANDIN_API void mycoll_standin_enqueue_owned(void* stream, void (*fn)(void*), void* argument,
                                              void (*destroy)(void*));

// The stream stands still for a while, or until the gate is opened. Never recorded.
STANDIN_API void mycoll_standin_stream_sleep(void* stream, int64_t microseconds);
STANDIN_API void* mycoll_standin_gate_close(void* stream);
STANDIN_API void mycoll_standin_gate_open(void* gate);  // frees it

// Every task waits for a random time up to this before it runs. Replaces STANDIN_DELAY_US.
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

// From here on whoever asks for an event or a stream gets this error, as on a device whose work has
// failed; null: no more.
STANDIN_API void mycoll_standin_break(const char* sentence);

// --- memory

// stream: whose order free() keeps. Null when the arena (STANDIN_MEMORY_MB, 8192) is full.
STANDIN_API void* mycoll_standin_malloc(size_t bytes, void* stream);
// Pinned: the host may use it, copies to and from it are asynchronous. Freed at once.
STANDIN_API void* mycoll_standin_host_malloc(size_t bytes);
STANDIN_API void mycoll_standin_free(void* address);
// The memory is used on this stream, too: free() waits for it (torch's record_stream).
STANDIN_API void mycoll_standin_record_use(void* address, void* stream);
STANDIN_API int mycoll_standin_is_pinned(const void* address);
STANDIN_API int mycoll_standin_pointer_device(const void* address);  // -1: not device memory

// Where the bytes of a range can be read and written by work that runs on a stream; other addresses
// are returned as they are. Ends the process when part of the range is not allocated at this
// moment. what: names the work in that sentence.
STANDIN_API void* mycoll_standin_touch(const void* address, size_t bytes, const char* what);

// As cudaMemcpyAsync: from memory that is not pinned, the bytes are taken at once; to such memory,
// the call waits until they are there.
STANDIN_API const char* mycoll_standin_copy(void* target, const void* source, size_t bytes,
                                            void* stream);
STANDIN_API void mycoll_standin_fill(void* target, int byte, size_t bytes, void* stream);

// Looks for writes into freed memory now, and ends the process where there was one.
STANDIN_API void mycoll_standin_verify(void);

// --- graphs

// From begin to end, work for the stream is recorded. A stream that waits for an event of a capture
// joins it; it must be joined back (by an event) before the end. Whoever asks for such an event, or
// waits for it on the host, spoils the capture.
// mode: cudaStreamCaptureMode, see mycoll_standin_set_strict_capture.
STANDIN_API const char* mycoll_standin_capture_begin(void* stream, int mode);
STANDIN_API int mycoll_standin_is_capturing(void* stream);
STANDIN_API uint64_t mycoll_standin_capture_id(void* stream);  // 0: none
STANDIN_API const char* mycoll_standin_capture_end(void* stream, void** graph);
// Runs what was recorded, in the order in which it was recorded, on one stream.
STANDIN_API void mycoll_standin_graph_launch(void* graph, void* stream);
// Memory that was allocated under capture and freed meanwhile goes with the graph.
STANDIN_API void mycoll_standin_graph_destroy(void* graph);
STANDIN_API void* mycoll_standin_graph_share(void* graph);  // the same once more, to be destroyed

// CUDA's rule, off by default: events and streams may not be asked or waited for by a thread that
// captures, unless the capture is relaxed (2), and, while another thread captures in global mode
// (0), by no thread whose own mode is global. A relaxed thread may always. Other calls are refused,
// and the capture fails at its end.
STANDIN_API void mycoll_standin_set_strict_capture(int isStrict);
STANDIN_API int mycoll_standin_exchange_capture_mode(int mode);  // of this thread; returns the old

// --- an idle device, for measuring how much CPU time its callers need: STANDIN_IDLE=RUNTIME,NCCL.
// Nothing runs, everything has happened at once, and numbers are garbage. A call of the CUDA
// runtime takes RUNTIME nanoseconds, one of NCCL's NCCL.

STANDIN_API int mycoll_standin_is_idle(void);
STANDIN_API void mycoll_standin_spend(int isNccl);  // where it is not idle: nothing

// --- what happened so far, for tests

struct mycoll_standin_counts {
  int64_t streams, tasks, eventWaits, eventQueries, recordedUses, graphLaunches;
  int64_t liveAllocations, liveBytes, pinnedBytes;
};
STANDIN_API void mycoll_standin_count(struct mycoll_standin_counts* counts);

#ifdef __cplusplus
}
#endif
