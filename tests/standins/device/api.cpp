// The C functions of standin_device.h over Stream and Memory.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "memory.h"
#include "standin_device.h"
#include "stream.h"

namespace {

using standin::Clock;
using standin::Event;
using standin::Graph;
using standin::Memory;
using standin::Moment;
using standin::Stream;

thread_local int currentDevice = 0;
std::atomic<uint64_t> contexts{0};

Stream* stream(void* handle) {
  return handle != nullptr ? static_cast<Stream*>(handle) : standin::defaultStream(currentDevice);
}
Event* event(void* handle) { return static_cast<Event*>(handle); }

// The last recording of an event; refuses one that was made under capture.
const char* lastOf(Event* event, std::shared_ptr<Moment>* moment) {
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    *moment = event->last;
  }
  return *moment && (*moment)->isCaptured ? standin::refuseCaptured(**moment) : nullptr;
}

bool isPageable(const void* address) {
  return Memory::get().deviceOf(address) < 0 && !Memory::get().isPinned(address);
}

// Calls `destroy` when the task cannot run again.
class Owned {
 public:
  Owned(void* argument, void (*destroy)(void*)) : argument_(argument), destroy_(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (destroy_ != nullptr) destroy_(argument_);
  }
  void* argument() const { return argument_; }

 private:
  void* const argument_;
  void (*const destroy_)(void*);
};

}  // namespace

extern "C" {

int mycoll_standin_device_count(void) {
  static const int count = [] {
    const char* text = std::getenv("STANDIN_DEVICES");
    return text != nullptr ? std::atoi(text) : 4;
  }();
  return count;
}

const char* mycoll_standin_device_synchronize(int device) {
  const std::vector<Stream*> streams = standin::streamsOf(device);
  if (const char* refusal = standin::refuseDuringCapture("a device was waited for")) return refusal;
  for (Stream* each : streams) {
    if (each->capture()) return standin::refuse("a stream of the device is being captured");
  }
  const auto awaitAll = [&] {
    std::vector<std::shared_ptr<Moment>> moments;
    for (Stream* each : streams) moments.push_back(each->mark());
    for (const auto& moment : moments) moment->await();
  };
  awaitAll();
  // All work that may use the released memory has run.
  for (Stream* each : streams) Memory::get().reclaim(each);
  awaitAll();
  return nullptr;
}

int mycoll_standin_current_device(void) { return currentDevice; }
void mycoll_standin_set_current_device(int device) { currentDevice = device; }

void mycoll_standin_enter(void) {
  const uint64_t bit = uint64_t{1} << currentDevice;
  if ((contexts.load(std::memory_order_relaxed) & bit) == 0) contexts |= bit;
}
uint64_t mycoll_standin_device_contexts(void) { return contexts; }

void* mycoll_standin_default_stream(int device) { return standin::defaultStream(device); }
void* mycoll_standin_stream(void* handle) { return stream(handle); }

void* mycoll_standin_stream_create(int device, int priority) {
  return new Stream(device, priority);
}
int mycoll_standin_stream_device(void* handle) { return stream(handle)->device; }
int mycoll_standin_stream_priority(void* handle) { return stream(handle)->priority; }
const char* mycoll_standin_stream_synchronize(void* handle) {
  return stream(handle)->synchronize();
}

const char* mycoll_standin_stream_query(void* handle, int* isDone) {
  bool done = false;
  const char* refusal = stream(handle)->query(&done);
  *isDone = done ? 1 : 0;
  return refusal;
}

void mycoll_standin_enqueue(void* handle, void (*fn)(void*), void* argument) {
  stream(handle)->enqueue([fn, argument] { fn(argument); });
}

void mycoll_standin_enqueue_owned(void* handle, void (*fn)(void*), void* argument,
                                  void (*destroy)(void*)) {
  auto owned = std::make_shared<Owned>(argument, destroy);
  stream(handle)->enqueue([fn, owned] { fn(owned->argument()); });
}

void mycoll_standin_stream_sleep(void* handle, int64_t microseconds) {
  if (standin::isIdle()) return;
  stream(handle)->enqueueNow(
      [microseconds] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

void* mycoll_standin_gate_close(void* handle) {
  auto gate = std::make_shared<Moment>();
  if (!standin::isIdle()) stream(handle)->enqueueNow([gate] { gate->await(); });
  return new std::shared_ptr<Moment>(gate);
}

void mycoll_standin_gate_open(void* gate) {
  std::unique_ptr<std::shared_ptr<Moment>> moment(static_cast<std::shared_ptr<Moment>*>(gate));
  (*moment)->pass();
}

void mycoll_standin_set_delay(int64_t microseconds) { standin::setDelay(microseconds); }

void* mycoll_standin_event_create(void) { return new Event; }
void mycoll_standin_event_destroy(void* handle) { delete event(handle); }

const char* mycoll_standin_event_record(void* handle, void* onStream) {
  return stream(onStream)->record(event(handle));
}

const char* mycoll_standin_event_block(void* handle, void* onStream) {
  return stream(onStream)->block(event(handle));
}

const char* mycoll_standin_event_query(void* handle, int* isDone) {
  *isDone = 0;
  if (const char* refusal = standin::refuseWhenBroken()) return refusal;
  if (const char* refusal = standin::refuseDuringCapture("an event was queried")) return refusal;
  std::shared_ptr<Moment> moment;
  const char* refusal = lastOf(event(handle), &moment);
  *isDone = refusal == nullptr && (!moment || moment->isPassed()) ? 1 : 0;
  return refusal;
}

const char* mycoll_standin_event_synchronize(void* handle) {
  if (const char* refusal = standin::refuseDuringCapture("an event was waited for")) return refusal;
  std::shared_ptr<Moment> moment;
  if (const char* refusal = lastOf(event(handle), &moment)) return refusal;
  if (moment) moment->await();
  return nullptr;
}

const char* mycoll_standin_event_elapsed(void* start, void* end, double* milliseconds) {
  std::shared_ptr<Moment> from, to;
  if (const char* refusal = lastOf(event(start), &from)) return refusal;
  if (const char* refusal = lastOf(event(end), &to)) return refusal;
  if (!from || !to) return standin::refuse("an event that was never recorded has no time");
  if (!from->isPassed() || !to->isPassed()) return standin::refuse("the event has not passed yet");
  *milliseconds = std::chrono::duration<double, std::milli>(to->time() - from->time()).count();
  return nullptr;
}

void mycoll_standin_break(const char* sentence) {
  standin::breakDevice(sentence != nullptr ? sentence : "");
}

void* mycoll_standin_malloc(size_t bytes, void* onStream) {
  return Memory::get().allocate(bytes, stream(onStream));
}

void* mycoll_standin_host_malloc(size_t bytes) { return Memory::get().allocatePinned(bytes); }
void mycoll_standin_free(void* address) { Memory::get().release(address); }
void mycoll_standin_record_use(void* address, void* onStream) {
  Memory::get().recordUse(address, stream(onStream));
}
int mycoll_standin_is_pinned(const void* address) {
  return Memory::get().isPinned(address) ? 1 : 0;
}
int mycoll_standin_pointer_device(const void* address) { return Memory::get().deviceOf(address); }

void* mycoll_standin_touch(const void* address, size_t bytes, const char* what) {
  return Memory::get().touch(address, bytes, what);
}

const char* mycoll_standin_copy(void* target, const void* source, size_t bytes, void* onStream) {
  const bool isTargetPageable = isPageable(target);
  if (isTargetPageable && stream(onStream)->capture()) {
    return standin::refuse("a copy to memory that is not pinned waits, which a capture forbids");
  }
  if (isPageable(source)) {
    const auto* first = static_cast<const unsigned char*>(source);
    auto taken = std::make_shared<const std::vector<unsigned char>>(first, first + bytes);
    stream(onStream)->enqueue([target, taken] {
      void* to = Memory::get().touch(target, taken->size(), "a copy");
      std::memcpy(to, taken->data(), taken->size());
    });
  } else {
    stream(onStream)->enqueue([target, source, bytes] {
      const void* from = Memory::get().touch(source, bytes, "a copy");
      std::memmove(Memory::get().touch(target, bytes, "a copy"), from, bytes);
    });
  }
  return isTargetPageable ? stream(onStream)->synchronize() : nullptr;
}

void mycoll_standin_fill(void* target, int byte, size_t bytes, void* onStream) {
  stream(onStream)->enqueue([target, byte, bytes] {
    std::memset(Memory::get().touch(target, bytes, "a fill"), byte, bytes);
  });
}

void mycoll_standin_verify(void) { Memory::get().verify(); }

const char* mycoll_standin_capture_begin(void* handle, int mode) {
  return stream(handle)->beginCapture(mode);
}
uint64_t mycoll_standin_capture_id(void* handle) {
  const std::shared_ptr<Graph> capture = stream(handle)->capture();
  return capture ? capture->id : 0;
}
int mycoll_standin_is_capturing(void* handle) { return stream(handle)->capture() ? 1 : 0; }

const char* mycoll_standin_capture_end(void* handle, void** graph) {
  std::shared_ptr<Graph> ended;
  if (const char* refusal = stream(handle)->endCapture(&ended)) return refusal;
  *graph = new std::shared_ptr<Graph>(std::move(ended));
  return nullptr;
}

void mycoll_standin_set_strict_capture(int isStrict) { standin::setStrictCapture(isStrict != 0); }
int mycoll_standin_exchange_capture_mode(int mode) { return standin::exchangeCaptureMode(mode); }

void mycoll_standin_graph_launch(void* graph, void* onStream) {
  stream(onStream)->launch(*static_cast<std::shared_ptr<Graph>*>(graph));
}

void mycoll_standin_graph_destroy(void* graph) {
  delete static_cast<std::shared_ptr<Graph>*>(graph);
}

void* mycoll_standin_graph_share(void* graph) {
  return new std::shared_ptr<Graph>(*static_cast<std::shared_ptr<Graph>*>(graph));
}

int mycoll_standin_is_idle(void) { return standin::isIdle() ? 1 : 0; }
void mycoll_standin_spend(int isNccl) { standin::spend(isNccl != 0); }

void mycoll_standin_count(struct mycoll_standin_counts* counts) {
  *counts = Memory::get().totals();
}

}  // extern "C"
