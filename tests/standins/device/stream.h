// Streams, events and graphs.
//
// Thread contract: [any thread]. One lock guards every capture (captureMutex, in stream.cpp); a
// stream's own lock is taken after it, and a moment's lock after that. Tasks run without a lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace standin {

class Stream;
class Graph;

using Clock = std::chrono::steady_clock;
// Shared, because a graph runs it repeatedly.
using Task = std::shared_ptr<const std::function<void()>>;
using Refusal = const char*;  // null: success

[[noreturn]] void die(const std::string& sentence);
Refusal refuse(std::string sentence);

// A point in the order of a stream, passed once: an event's last recording.
class Moment {
 public:
  void pass();
  bool isPassed() const;
  void await() const;
  Clock::time_point time() const;  // only when passed

  // If it was recorded under capture: the graph, and how many recorded tasks of each stream precede
  // it.
  std::weak_ptr<Graph> graph;
  std::map<Stream*, size_t> before;
  bool isCaptured = false;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool isPassed_ = false;
  Clock::time_point time_;
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Moment> last;  // null until recorded
};

class Graph {
 public:
  ~Graph();
  // Frees the memory when the graph is destroyed.
  void keep(void* address);

  // Guarded by captureMutex until the capture has ended, and constant afterwards.
  std::vector<Task> tasks;
  Stream* origin = nullptr;
  std::thread::id thread;
  int mode = 0;  // cudaStreamCaptureMode
  uint64_t id = 0;
  std::string spoiledBy;  // empty: the capture is valid
  bool hasEnded = false;
  std::map<Stream*, size_t> recorded;  // the number of tasks of each stream that takes part
  // How many of these tasks each stream has waited for.
  std::map<Stream*, std::map<Stream*, size_t>> reached;

 private:
  std::mutex mutex_;
  std::vector<void*> memory_;
};

class Stream {
 public:
  Stream(int device, int priority);

  void enqueue(std::function<void()> work);
  // Runs even if the stream is being captured.
  void enqueueNow(std::function<void()> work);
  std::shared_ptr<Moment> mark();  // passed when everything enqueued so far has run
  Refusal synchronize();
  Refusal query(bool* isDone);

  Refusal record(Event* event);
  Refusal block(Event* event);

  Refusal beginCapture(int mode);
  Refusal endCapture(std::shared_ptr<Graph>* graph);
  std::shared_ptr<Graph> capture() const;  // null: not being captured
  void launch(const std::shared_ptr<Graph>& graph);

  const int device;
  const int priority;

 private:
  void run();
  void push(Task task);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool isBusy_ = false;
  std::shared_ptr<Graph> capture_;  // guarded by captureMutex
};

bool isIdle();  // STANDIN_IDLE: see standin_device.h
void spend(bool isNccl);

std::vector<Stream*> streamsOf(int device);
Stream* defaultStream(int device);
void setDelay(int64_t microseconds);

void setStrictCapture(bool isStrict);
int exchangeCaptureMode(int mode);
// See mycoll_standin_break(). Empty: the device works.
void breakDevice(std::string sentence);
Refusal refuseWhenBroken();
// Returns null if this thread may query and wait now.
Refusal refuseDuringCapture(const char* what);
// A query of what was recorded under capture invalidates that capture, from any thread and in any
// mode, as with CUDA.
Refusal refuseCaptured(const Moment& moment);

}  // namespace standin
