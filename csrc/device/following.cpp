// The group's half that follows operations to their end: the watchdog's work.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "base/log.h"
#include "device/device_group.h"
#include "device/host_road.h"
#include "device/nccl_road.h"
#include "device/watchdog.h"
#include "nccl/cudart.h"
#include "observe/black_box.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL often sees that a rank is gone before anybody knows why; the engine is given this time to
// find the cause.
constexpr auto kCauseGrace = std::chrono::milliseconds(1000);
// The engine's group and NCCL are asked about failures this often.
constexpr auto kAskEvery = std::chrono::milliseconds(20);

// Dropped by threads of the user's, as it may need the GIL, and calls the allocator. Those of any
// group: one that is not called again would keep it for ever.
struct Released {
  std::mutex mutex;
  std::vector<at::Tensor> tensors;  // guarded by mutex
  std::atomic<bool> isThere{false};
};

// "train.py:57 in step", if it is known.
std::string placeOf(const Followed& followed) {
  if (followed.op) return followed.op->record().place();
  return BlackBox::process().placeOf(followed.calledAt).describe();
}

Released& released() {
  static Released* const kReleased = new Released;
  return *kReleased;
}

}  // namespace

void DeviceGroup::follow(Followed followed) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const c10::Device device = followed.operation->device();
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
      devices_.push_back(device);
    }
    const bool wasBusy = !inOrder_.empty() || !followed_.empty();
    if (followed.external) {
      inOrder_.push_back(std::move(followed));
    } else {
      followed_.push_back(std::move(followed));
    }
    if (wasBusy) return;
  }
  // Where the device does all of it, its end may be seen a little later: to wake a thread for every
  // operation would cost more than the operation. The host road's next step waits for us.
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/knownRoad() != DeviceRoad::kNccl);
}

// Of one message, or a batch of them. No text is made before it is needed.
void DeviceGroup::followMessages(const DeviceOperationPtr& operation, MessagesCalled called) {
  Followed followed;
  followed.operation = operation;
  followed.isMessage = true;
  followed.ownsDeadline = true;
  followed.timeout = called.timeout;
  followed.deadline = Deadline::after(called.timeout);
  followed.messages = std::move(called.messages);
  followed.calledAt = called.calledAt;
  if (called.isRecorded) {
    for (const ExternalMessage& message : followed.messages) {
      followed.records.push_back(place_.control->recordMessage(message, called.calledAt));
    }
  }
  follow(std::move(followed));
}

std::string DeviceGroup::describe(const Followed& followed) const {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(followed.messages.size(), kShown); ++i) {
    const ExternalMessage& message = followed.messages[i];
    text += std::string(i > 0 ? ", " : "") + (message.isSend ? "send to " : "recv from ") +
            place_.control->describeRank(message.peer) + " of " + std::to_string(message.bytes) +
            " bytes";
  }
  if (followed.messages.size() > 1) {
    text = "a batch of " + std::to_string(followed.messages.size()) + " sends and receives (" +
           text + (followed.messages.size() > kShown ? ", ..." : "") + ")";
  }
  const std::string place = placeOf(followed);
  return text + (place.empty() ? "" : " (" + place + ")");
}

void DeviceGroup::followCaptured(const c10::Stream& stream) {
  const c10::Stream usual =
      c10::impl::VirtualGuardImpl(stream.device_type()).getDefaultStream(stream.device());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const c10::Stream& one : {stream, usual}) {
      const bool isKnown =
          std::find(capturedOn_.begin(), capturedOn_.end(), one) != capturedOn_.end();
      if (!isKnown) capturedOn_.push_back(one);
    }
  }
  isCaptured_.store(true, std::memory_order_release);
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/false);
}

// A captured operation may be under way: a stream is busy on which graphs are replayed as a rule.
bool DeviceGroup::mayReplay() const {
  if (!isCaptured_.load(std::memory_order_acquire)) return false;
  std::vector<c10::Stream> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streams = capturedOn_;
  }
  const nccl::RelaxedCapture relaxed;
  return std::any_of(streams.begin(), streams.end(), [](const c10::Stream& stream) {
    try {
      return !isCapturing(stream) && !stream.query();
    } catch (const std::exception&) {
      return false;  // the device tells its users itself
    }
  });
}

bool DeviceGroup::isBusy() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !inOrder_.empty() || !followed_.empty() || !awaited_.empty();
}

bool DeviceGroup::needsWatch() const {
  return isBusy() || (!isClosed_.load() && !isSpread_ && (isCaptured_.load() || isDead()));
}

void DeviceGroup::onOver(const DeviceOperationPtr& operation,
                         std::function<void(const Status&)> fn) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_.push_back({operation, std::move(fn)});
  }
  Watchdog::get().add(shared_from_this(), /*isUrgent=*/true);
}

// Those of inOrder_ that are over. The device is asked without the mutex, which every call of the
// user's takes; nobody else takes entries away.
void DeviceGroup::takeEnded(std::vector<Followed>* ended) {
  constexpr size_t kAtOnce = 64;
  size_t count = 0;
  do {
    std::vector<std::pair<DeviceOperationPtr, std::shared_ptr<External>>> oldest;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < std::min(kAtOnce, inOrder_.size()); ++i) {
        oldest.emplace_back(inOrder_[i].operation, inOrder_[i].external);
      }
    }
    for (count = 0; count < oldest.size(); ++count) {
      const auto& [operation, external] = oldest[count];
      if (!operation->isOver()) break;
      external->finish(operation->status());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      ended->push_back(std::move(inOrder_.front()));
      inOrder_.pop_front();
    }
  } while (count == kAtOnce);
}

// The device is asked without the mutex, once for each: a second answer may be another one. Entries
// are only added meanwhile, behind these.
template <typename Entry>
std::vector<Entry> DeviceGroup::takeOver(std::vector<Entry>* entries) {
  std::vector<DeviceOperationPtr> operations;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& entry : *entries) operations.push_back(entry.operation);
  }
  std::vector<bool> areOver;
  for (const DeviceOperationPtr& operation : operations) areOver.push_back(operation->isOver());
  std::vector<Entry> over, left;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < entries->size(); ++i) {
    const bool isOver = i < areOver.size() && areOver[i];
    (isOver ? over : left).push_back(std::move((*entries)[i]));
  }
  *entries = std::move(left);
  return over;
}

DeviceGroup::Watched DeviceGroup::watch() {
  Watched seen;
  hearOfFailures();
  std::vector<Followed> ended;
  takeEnded(&ended);
  for (Followed& entry : takeOver(&followed_)) ended.push_back(std::move(entry));
  endFollowed(ended);
  releaseLingering();
  failLate();
  const bool hasNotes = place_.control->watchExternal();
  seen.wantsSoon = host_->advance();
  tellAwaited();
  seen.hasMoved = !ended.empty();
  const bool isReleasing = !lingering_.empty() && !isClosed_.load();
  seen.isBusy = needsWatch() || seen.wantsSoon || hasNotes || isReleasing;
  return seen;
}

// The first message that is late ends the group.
void DeviceGroup::failLate() {
  Followed late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(followed_.begin(), followed_.end(), [](const Followed& entry) {
      return entry.ownsDeadline && entry.deadline.expired();
    });
    if (found == followed_.end()) return;
    late = *found;
  }
  if (late.operation->isOver() || !error().ok()) return;
  fail(Status(Code::kTimeout,
              "[Rank " + std::to_string(place_.rank) + "]: mycoll group '" + place_.name + "': " +
                  describe(late) + " TIMED OUT after " + std::to_string(late.timeout.count()) +
                  " ms: the other side never came, or the device is busy with something else."));
}

void DeviceGroup::hearOfFailures() {
  const auto now = Clock::now();
  const bool isNews = isDead() && !isSpread_;
  if (!isNews && now - askedAt_ < kAskEvery) return;
  askedAt_ = now;
  Status cause = error();
  if (isLeft_.load()) return;  // in this order: it is set before the groups end
  if (cause.ok()) {
    const Status ofNccl = nccl_->check();
    if (ofNccl.ok()) {
      ncclErrorSince_ = {};
    } else if (ncclErrorSince_ == Clock::time_point{}) {
      ncclErrorSince_ = now;
    } else if (now - ncclErrorSince_ > kCauseGrace) {
      cause = Status(ofNccl.code(), "mycoll group '" + place_.name + "': rank " +
                                        std::to_string(place_.rank) + ": " + ofNccl.message());
    }
    if (cause.ok()) return;
  }
  fail(cause);
  endWith(cause);
  if (!isSpread_.exchange(true)) nccl_->beginAbort(cause);
}

// Before NCCL is told to stop: then devices go on with what is behind these operations, as if they
// had been carried out, and so would the program.
void DeviceGroup::endWith(const Status& cause) {
  place_.control->watchExternal();  // gives every operation its own text
  std::vector<Followed> followed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    forEachFollowed([&](const Followed& entry) { followed.push_back(entry); });
  }
  const bool isReplayed = mayReplay();
  const Followed* lost = nullptr;
  // Ranks that were called differently, which their devices may have got through: unless there is
  // something under way that fails by it. On all ranks the text names the group that found it.
  bool isWrong = cause.code() == Code::kMismatch && !isTold_.load(std::memory_order_relaxed) &&
                 cause.message().find(kControlSuffix + std::string("':")) != std::string::npos;
  for (const Followed& entry : followed) {
    if (entry.operation->isOver()) continue;
    const bool hasText = entry.op && entry.op->done() && !entry.op->status().ok();
    entry.operation->fail(hasText ? entry.op->status() : cause);
    if (entry.operation->status().ok()) continue;
    isWrong = false;
    // What the host road has enqueued has come from the other ranks by then.
    const bool isOnNccl = entry.external || entry.ownsDeadline;
    if (isOnNccl && entry.operation->isTaken() && lost == nullptr) lost = &entry;
  }
  if ((lost == nullptr && !isReplayed && !isWrong) || hasLost_.exchange(true)) return;
  const std::string place = lost != nullptr ? placeOf(*lost) : "";
  tellProgram(cause, lost != nullptr
                         ? lost->operation->what() + (place.empty() ? "" : " (" + place + ")") +
                               " was under way"
                     : isReplayed ? "a graph with operations of this group may have been under way"
                                  : "this may have been carried out");
}

// By an exception in Python's main thread, wherever that is: the next call would raise, but there
// may be none before the numbers are believed.
void DeviceGroup::tellProgram(const Status& cause, const std::string& what) {
  const Status told(cause.code(), cause.message() + "\n  Here: rank " +
                                      std::to_string(place_.rank) + ", where " + what +
                                      " on the device" + kNotToBeUsed);
  // Not when the program has ended the group itself meanwhile.
  raiseInMainThread(told, [group = weak_from_this(), isAborted = isAbortedHere_.load()] {
    const std::shared_ptr<DeviceGroup> living = group.lock();
    return !(living ? living->isAbortedHere_.load() : isAborted);
  });
}

void DeviceGroup::endFollowed(const std::vector<Followed>& ended) {
  for (const Followed& entry : ended) {
    const bool isOk = entry.operation->status().ok();
    for (const OpRecord& record : entry.records) record.finish(isOk, steadyNanos());
    lingering_.push_back(entry.operation);
  }
}

void DeviceGroup::releaseLingering() {
  std::vector<at::Tensor> tensors;
  std::erase_if(lingering_, [&](const DeviceOperationPtr& operation) {
    if (!operation->mayRelease()) return false;
    for (at::Tensor& tensor : operation->release()) tensors.push_back(std::move(tensor));
    return true;
  });
  if (tensors.empty()) return;
  Released& all = released();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (at::Tensor& tensor : tensors) all.tensors.push_back(std::move(tensor));
  all.isThere.store(true, std::memory_order_release);
}

void DeviceGroup::tellAwaited() {
  for (Awaited& entry : takeOver(&awaited_)) entry.fn(entry.operation->status());
}

void DeviceGroup::clearReleased() {
  Released& all = released();
  if (!all.isThere.load(std::memory_order_acquire)) return;
  std::vector<at::Tensor> tensors;
  std::lock_guard<std::mutex> lock(all.mutex);
  tensors.swap(all.tensors);
  all.isThere.store(false, std::memory_order_relaxed);
}

}  // namespace mycoll
