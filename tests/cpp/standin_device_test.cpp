// The stand-in device itself: it must be really asynchronous, and detect misuse.
#include "standin_device.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "test.h"

namespace {

void* newStream(int device = 0) { return mycoll_standin_stream_create(device, 0); }

std::vector<unsigned char> read(const void* memory, size_t bytes, void* stream) {
  std::vector<unsigned char> host(bytes);
  EXPECT(mycoll_standin_copy(host.data(), memory, bytes, stream) == nullptr);
  return host;
}

bool isFilledWith(const std::vector<unsigned char>& bytes, unsigned char value) {
  for (unsigned char byte : bytes) {
    if (byte != value) return false;
  }
  return true;
}

bool isDone(void* event) {
  int done = 0;
  EXPECT(mycoll_standin_event_query(event, &done) == nullptr);
  return done != 0;
}

TEST(StandinStream, runsInOrderBesideItsCaller) {
  void* stream = newStream();
  void* gate = mycoll_standin_gate_close(stream);
  static std::vector<int> seen;
  seen.clear();
  for (intptr_t i = 0; i < 100; ++i) {
    mycoll_standin_enqueue(
        stream, [](void* n) { seen.push_back(static_cast<int>(reinterpret_cast<intptr_t>(n))); },
        reinterpret_cast<void*>(i));
  }
  int done = 1;
  EXPECT(mycoll_standin_stream_query(stream, &done) == nullptr);
  EXPECT_EQ(done, 0);
  mycoll_standin_gate_open(gate);
  EXPECT(mycoll_standin_stream_synchronize(stream) == nullptr);
  EXPECT_EQ(seen.size(), 100);
  for (int i = 0; i < static_cast<int>(seen.size()); ++i) EXPECT_EQ(seen[i], i);
}

TEST(StandinStream, eventsOrderStreams) {
  void* first = newStream();
  void* second = newStream();
  void* event = mycoll_standin_event_create();
  EXPECT(isDone(event));  // never recorded
  void* memory = mycoll_standin_malloc(1000, first);
  mycoll_standin_fill(memory, 1, 1000, first);
  EXPECT(mycoll_standin_stream_synchronize(first) == nullptr);

  void* gate = mycoll_standin_gate_close(first);
  mycoll_standin_fill(memory, 2, 1000, first);
  EXPECT(mycoll_standin_event_record(event, first) == nullptr);
  EXPECT(!isDone(event));
  // Without a wait, the other stream reads the old contents.
  EXPECT(isFilledWith(read(memory, 1000, second), 1));
  EXPECT(mycoll_standin_event_block(event, second) == nullptr);
  mycoll_standin_gate_open(gate);
  EXPECT(isFilledWith(read(memory, 1000, second), 2));
  EXPECT(isDone(event));
  mycoll_standin_event_destroy(event);
  mycoll_standin_free(memory);
}

TEST(StandinStream, aWaitIsForTheLastRecordingBeforeIt) {
  void* first = newStream();
  void* second = newStream();
  void* event = mycoll_standin_event_create();
  EXPECT(mycoll_standin_event_record(event, first) == nullptr);
  EXPECT(mycoll_standin_event_block(event, second) == nullptr);
  void* gate = mycoll_standin_gate_close(first);
  EXPECT(mycoll_standin_event_record(event, first) == nullptr);  // a later one, which is pending
  EXPECT(mycoll_standin_stream_synchronize(second) == nullptr);
  mycoll_standin_event_destroy(event);  // allowed while the recording is pending
  mycoll_standin_gate_open(gate);
  EXPECT(mycoll_standin_stream_synchronize(first) == nullptr);
}

TEST(StandinStream, eventsMeasureTime) {
  void* stream = newStream();
  void* start = mycoll_standin_event_create();
  void* end = mycoll_standin_event_create();
  double milliseconds = 0;
  EXPECT(mycoll_standin_event_elapsed(start, end, &milliseconds) != nullptr);
  mycoll_standin_event_record(start, stream);
  mycoll_standin_stream_sleep(stream, 20000);
  void* gate = mycoll_standin_gate_close(stream);
  mycoll_standin_event_record(end, stream);
  EXPECT(mycoll_standin_event_elapsed(start, end, &milliseconds) != nullptr);  // not yet
  mycoll_standin_gate_open(gate);
  EXPECT(mycoll_standin_event_synchronize(end) == nullptr);
  EXPECT(mycoll_standin_event_elapsed(start, end, &milliseconds) == nullptr);
  EXPECT(milliseconds >= 20 && milliseconds < 5000);
  mycoll_standin_event_destroy(start);
  mycoll_standin_event_destroy(end);
}

TEST(StandinCopy, readsPageableMemoryImmediatelyAndPinnedMemoryLater) {
  void* stream = newStream();
  void* memory = mycoll_standin_malloc(64, stream);
  std::vector<unsigned char> pageable(64, 1);
  auto* pinned = static_cast<unsigned char*>(mycoll_standin_host_malloc(64));
  EXPECT(mycoll_standin_is_pinned(pinned + 63) && !mycoll_standin_is_pinned(pageable.data()));
  EXPECT_EQ(mycoll_standin_pointer_device(memory), 0);
  EXPECT_EQ(mycoll_standin_pointer_device(pinned), -1);

  void* gate = mycoll_standin_gate_close(stream);
  EXPECT(mycoll_standin_copy(memory, pageable.data(), 64, stream) == nullptr);
  pageable.assign(64, 9);  // after the copy has read it
  mycoll_standin_gate_open(gate);
  EXPECT(isFilledWith(read(memory, 64, stream), 1));

  gate = mycoll_standin_gate_close(stream);
  std::memset(pinned, 2, 64);
  EXPECT(mycoll_standin_copy(memory, pinned, 64, stream) == nullptr);
  std::memset(pinned, 3, 64);  // before the copy reads it: a mistake, which the result shows
  mycoll_standin_gate_open(gate);
  EXPECT(isFilledWith(read(memory, 64, stream), 3));
  mycoll_standin_free(pinned);
  mycoll_standin_free(memory);
}

TEST(StandinMemory, isFreedInTheOrderOfItsStream) {
  void* stream = newStream();
  void* memory = mycoll_standin_malloc(5000, stream);
  void* copy = mycoll_standin_malloc(5000, stream);
  void* gate = mycoll_standin_gate_close(stream);
  mycoll_standin_fill(memory, 7, 5000, stream);
  mycoll_standin_copy(copy, memory, 5000, stream);
  mycoll_standin_free(memory);  // the work above may still use it
  mycoll_standin_gate_open(gate);
  EXPECT(isFilledWith(read(copy, 5000, stream), 7));
  mycoll_standin_free(copy);
  mycoll_standin_verify();
}

TEST(StandinMemory, isKeptUntilTheNextAllocation) {
  void* owner = newStream();
  void* other = newStream();
  void* memory = mycoll_standin_malloc(100, owner);
  void* gate = mycoll_standin_gate_close(other);
  mycoll_standin_fill(memory, 7, 100, other);
  mycoll_standin_free(memory);
  EXPECT(mycoll_standin_stream_synchronize(owner) == nullptr);
  mycoll_standin_gate_open(gate);  // nothing was allocated there since
  EXPECT(mycoll_standin_stream_synchronize(other) == nullptr);
  EXPECT(mycoll_standin_malloc(100, owner) != nullptr);
  EXPECT(mycoll_standin_stream_synchronize(owner) == nullptr);
}

TEST(StandinMemory, isKeptForRecordedStreams) {
  void* owner = newStream();
  void* other = newStream();
  void* memory = mycoll_standin_malloc(100, owner);
  void* gate = mycoll_standin_gate_close(other);
  mycoll_standin_fill(memory, 7, 100, other);
  mycoll_standin_record_use(memory, other);
  mycoll_standin_free(memory);
  EXPECT(mycoll_standin_malloc(100, owner) != nullptr);
  mycoll_standin_gate_open(gate);
  EXPECT(mycoll_standin_stream_synchronize(other) == nullptr);
  EXPECT(mycoll_standin_stream_synchronize(owner) == nullptr);
}

TEST(StandinMemory, addressesAreUsedAgain) {
  void* stream = newStream();
  mycoll_standin_counts before, after;
  mycoll_standin_count(&before);
  std::set<void*> addresses;
  for (int i = 0; i < 40;
       ++i) {  // 40 x 8 MiB: more than the stand-in keeps before it reuses memory
    void* memory = mycoll_standin_malloc(8 << 20, stream);
    ASSERT(memory != nullptr);
    addresses.insert(memory);
    mycoll_standin_free(memory);
    EXPECT(mycoll_standin_stream_synchronize(stream) == nullptr);
  }
  EXPECT(addresses.size() < 40);
  mycoll_standin_count(&after);
  EXPECT_EQ(before.liveAllocations, after.liveAllocations);
  EXPECT_EQ(before.liveBytes, after.liveBytes);
}

// The children of these start streams after a fork, which TSan does not support well.
#if !defined(__SANITIZE_THREAD__)
// Runs `body` in a child. Returns what the child wrote if it died, otherwise "".
std::string lastWords(void (*body)()) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t got; (got = ::read(ends[0], part, sizeof part)) > 0;) text.append(part, got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) || WEXITSTATUS(status) != 0 ? "died: " + text : "";
}

TEST(StandinMemory, mistakesEndTheProcess) {
  EXPECT_CONTAINS(lastWords([] {
                    void* stream = newStream();
                    void* other = newStream();
                    void* memory = mycoll_standin_malloc(100, stream);
                    mycoll_standin_free(memory);
                    mycoll_standin_malloc(100, stream);  // may reuse that memory
                    mycoll_standin_stream_synchronize(stream);
                    mycoll_standin_fill(memory, 1, 100, other);
                    mycoll_standin_stream_synchronize(other);
                  }),
                  "a fill touches 100 bytes");
  EXPECT_CONTAINS(lastWords([] {
                    void* stream = newStream();
                    void* memory = mycoll_standin_malloc(100, stream);
                    mycoll_standin_fill(memory, 1, 101, stream);
                    mycoll_standin_stream_synchronize(stream);
                  }),
                  "more than the allocation holds");
  EXPECT_CONTAINS(lastWords([] {
                    void* memory = mycoll_standin_malloc(100, newStream());
                    mycoll_standin_free(memory);
                    mycoll_standin_free(memory);
                  }),
                  "after it was freed");
  EXPECT_CONTAINS(lastWords([] {
                    auto* pinned = static_cast<char*>(mycoll_standin_host_malloc(100));
                    mycoll_standin_free(pinned);
                    pinned[17] = 1;
                    mycoll_standin_verify();
                  }),
                  "byte 17 of the 100 bytes");
  EXPECT_CONTAINS(lastWords([] {
                    void* stream = newStream();
                    void* memory = mycoll_standin_malloc(100, stream);
                    static_cast<char*>(mycoll_standin_touch(memory, 100, "a test"))[103] = 1;
                    mycoll_standin_free(memory);
                    mycoll_standin_malloc(100, stream);
                    mycoll_standin_stream_synchronize(stream);
                  }),
                  "3 bytes past the end of the 100 bytes");
}

TEST(StandinMemory, theHostCannotReadIt) {
  EXPECT_CONTAINS(lastWords([] {
                    const auto* memory =
                        static_cast<volatile char*>(mycoll_standin_malloc(100, newStream()));
                    (void)memory[0];
                  }),
                  "died");
}
#endif

TEST(StandinGraph, recordsAndReplays) {
  void* stream = newStream();
  void* side = newStream();
  void* event = mycoll_standin_event_create();
  static std::atomic<int> runs, destroyed;
  runs = destroyed = 0;
  void* memory = mycoll_standin_malloc(100, stream);
  mycoll_standin_fill(memory, 0, 100, stream);
  EXPECT(mycoll_standin_stream_synchronize(stream) == nullptr);

  EXPECT(mycoll_standin_capture_begin(stream, 0) == nullptr);
  EXPECT(mycoll_standin_capture_begin(stream, 0) != nullptr);
  EXPECT(mycoll_standin_is_capturing(stream) && !mycoll_standin_is_capturing(side));
  EXPECT(mycoll_standin_stream_synchronize(stream) != nullptr);
  void* inside = mycoll_standin_malloc(100, stream);
  mycoll_standin_fill(inside, 5, 100, stream);
  EXPECT(mycoll_standin_event_record(event, stream) == nullptr);
  EXPECT(mycoll_standin_event_block(event, side) == nullptr);  // joins
  EXPECT(mycoll_standin_is_capturing(side));
  mycoll_standin_enqueue_owned(side, [](void*) { ++runs; }, nullptr, [](void*) { ++destroyed; });
  mycoll_standin_copy(memory, inside, 100, side);
  EXPECT(mycoll_standin_event_record(event, side) == nullptr);
  EXPECT(mycoll_standin_event_block(event, stream) == nullptr);
  mycoll_standin_free(inside);  // the graph keeps it
  void* graph = nullptr;
  EXPECT(mycoll_standin_capture_end(stream, &graph) == nullptr);
  EXPECT(!mycoll_standin_is_capturing(side));
  EXPECT_EQ(runs, 0);
  EXPECT(isFilledWith(read(memory, 100, stream), 0));

  mycoll_standin_graph_launch(graph, stream);
  mycoll_standin_graph_launch(graph, stream);
  EXPECT(isFilledWith(read(memory, 100, stream), 5));
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(destroyed, 0);
  mycoll_standin_graph_destroy(graph);
  EXPECT(mycoll_standin_stream_synchronize(stream) == nullptr);
  EXPECT_EQ(destroyed, 1);
  mycoll_standin_event_destroy(event);
  mycoll_standin_free(memory);
}

TEST(StandinGraph, refusesWhatCudaRefuses) {
  void* stream = newStream();
  void* side = newStream();
  void* event = mycoll_standin_event_create();
  void* graph = nullptr;
  EXPECT(mycoll_standin_capture_end(stream, &graph) != nullptr);  // none began

  EXPECT(mycoll_standin_event_record(event, side) == nullptr);
  EXPECT(mycoll_standin_capture_begin(stream, 0) == nullptr);
  EXPECT(mycoll_standin_event_block(event, stream) != nullptr);  // work outside the capture
  EXPECT(mycoll_standin_event_record(event, stream) == nullptr);
  EXPECT(mycoll_standin_event_block(event, side) == nullptr);
  mycoll_standin_enqueue(side, [](void*) {}, nullptr);
  EXPECT(mycoll_standin_capture_end(stream, &graph) != nullptr);  // `side` was not joined back
  EXPECT(mycoll_standin_event_block(event, side) != nullptr);     // that capture has ended
  EXPECT(mycoll_standin_stream_synchronize(side) == nullptr);     // usable again
  mycoll_standin_event_destroy(event);
}

TEST(StandinGraph, aQueryInAnotherThreadInvalidatesACapture) {
  void* stream = newStream();
  void* event = mycoll_standin_event_create();
  void* graph = nullptr;
  mycoll_standin_set_strict_capture(1);
  for (int mode = 0; mode <= 2; ++mode) {  // global, thread-local, relaxed
    EXPECT(mycoll_standin_capture_begin(stream, 0) == nullptr);
    std::thread([&] {
      EXPECT_EQ(mycoll_standin_exchange_capture_mode(mode), 0);
      int done = 0;
      EXPECT_EQ(mycoll_standin_event_query(event, &done) == nullptr, mode != 0);
    }).join();
    EXPECT_EQ(mycoll_standin_capture_end(stream, &graph) == nullptr, mode != 0);
    if (mode != 0) mycoll_standin_graph_destroy(graph);
  }
  // An event of the capture may not be queried in any mode.
  EXPECT(mycoll_standin_capture_begin(stream, 0) == nullptr);
  EXPECT(mycoll_standin_event_record(event, stream) == nullptr);
  std::thread([&] {
    EXPECT_EQ(mycoll_standin_exchange_capture_mode(2), 0);
    int done = 0;
    EXPECT(mycoll_standin_event_query(event, &done) != nullptr);
  }).join();
  EXPECT(mycoll_standin_capture_end(stream, &graph) != nullptr);
  mycoll_standin_set_strict_capture(0);
  mycoll_standin_event_destroy(event);
}

TEST(StandinStream, delaysAreAddedAndTakenAway) {
  void* stream = newStream();
  mycoll_standin_set_delay(3000);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 30; ++i) mycoll_standin_enqueue(stream, [](void*) {}, nullptr);
  EXPECT(mycoll_standin_stream_synchronize(stream) == nullptr);
  EXPECT(std::chrono::steady_clock::now() - start > std::chrono::milliseconds(10));
  mycoll_standin_set_delay(0);
}

TEST(StandinStream, devicesWaitForAllTheirStreams) {
  void* stream = newStream(1);
  static std::atomic<bool> ran;
  ran = false;
  mycoll_standin_stream_sleep(stream, 20000);
  mycoll_standin_enqueue(stream, [](void*) { ran = true; }, nullptr);
  EXPECT(mycoll_standin_device_synchronize(1) == nullptr);
  EXPECT(ran);
}

}  // namespace
