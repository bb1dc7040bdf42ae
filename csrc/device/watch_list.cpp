#include "device/watch_list.h"

#include <algorithm>
#include <utility>

#include "base/mutex.h"
#include "observe/black_box.h"

namespace mycoll {

std::string WatchedMessages::place() const { return BlackBox::process().placeOf(calledAt); }

std::string Watched::place() const {
  if (collective) return collective->record().place();
  return messages ? messages->place() : "";
}

void WatchList::addDeviceLocked(c10::Device device) {
  const bool isKnown = std::find(devices_.begin(), devices_.end(), device) != devices_.end();
  if (!isKnown) devices_.push_back(device);
}

void WatchList::addDevice(c10::Device device) {
  MutexLock lock(mutex_);
  addDeviceLocked(device);
}

bool WatchList::add(Watched watched) {
  MutexLock lock(mutex_);
  addDeviceLocked(watched.operation->device());
  const bool wasEmpty = collectives_.empty() && others_.empty();
  if (watched.collective) {
    collectives_.push_back(std::move(watched));
  } else {
    others_.push_back(std::move(watched));
  }
  return wasEmpty;
}

void WatchList::onOver(const DeviceOperationPtr& operation, std::function<void(const Status&)> fn) {
  MutexLock lock(mutex_);
  awaited_.push_back({operation, std::move(fn)});
}

bool WatchList::isBusy() const {
  MutexLock lock(mutex_);
  return !collectives_.empty() || !others_.empty() || !awaited_.empty();
}

bool WatchList::hasUndrained() const {
  MutexLock lock(mutex_);
  return !collectives_.empty() ||
         std::any_of(others_.begin(), others_.end(),
                     [](const Watched& each) { return each.operation->isReliedOn(); });
}

bool WatchList::hasOfGroup() const {
  MutexLock lock(mutex_);
  return !collectives_.empty() || std::any_of(others_.begin(), others_.end(), [](const auto& each) {
    return each.messages && !each.messages->isOfPair;
  });
}

std::vector<c10::Device> WatchList::devices() const {
  MutexLock lock(mutex_);
  return devices_;
}

std::vector<DeviceOperationPtr> WatchList::queued() const {
  std::vector<DeviceOperationPtr> found;
  MutexLock lock(mutex_);
  forEach([&](const Watched& each) {
    if (!each.isMessage && !each.operation->isEnqueued()) found.push_back(each.operation);
  });
  return found;
}

// No other thread removes entries.
void WatchList::takeEndedCollectives(std::vector<Watched>* ended,
                                     const OnDeviceError& onDeviceError) {
  constexpr size_t kAtOnce = 64;
  size_t count = 0;
  do {
    std::vector<std::pair<DeviceOperationPtr, std::shared_ptr<CollectiveOp>>> oldest;
    {
      MutexLock lock(mutex_);
      for (size_t i = 0; i < std::min(kAtOnce, collectives_.size()); ++i) {
        oldest.emplace_back(collectives_[i].operation, collectives_[i].collective);
      }
    }
    for (count = 0; count < oldest.size(); ++count) {
      const auto& [operation, collective] = oldest[count];
      if (!operation->isOver()) break;
      if (operation->isDeviceError()) onDeviceError(operation->status());
      collective->external->finish(operation->status());
    }
    MutexLock lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      ended->push_back(std::move(collectives_.front()));
      collectives_.pop_front();
    }
  } while (count == kAtOnce);
}

// Queries each operation once, as a second query may have another result. Other threads only append
// entries meanwhile.
template <typename Entry>
std::vector<Entry> WatchList::takeOverOf(std::vector<Entry>* entries) {
  std::vector<DeviceOperationPtr> operations;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : *entries) operations.push_back(entry.operation);
  }
  std::vector<bool> areOver;
  for (const DeviceOperationPtr& operation : operations) areOver.push_back(operation->isOver());
  std::vector<Entry> over, left;
  MutexLock lock(mutex_);
  for (size_t i = 0; i < entries->size(); ++i) {
    const bool isOver = i < areOver.size() && areOver[i];
    (isOver ? over : left).push_back(std::move((*entries)[i]));
  }
  *entries = std::move(left);
  return over;
}

bool WatchList::takeOver(const OnDeviceError& onDeviceError) {
  std::vector<Watched> ended;
  takeEndedCollectives(&ended, onDeviceError);
  for (Watched& each : takeOverOf(&others_)) {
    if (each.operation->isDeviceError()) onDeviceError(each.operation->status());
    ended.push_back(std::move(each));
  }
  for (const Watched& each : ended) {
    if (each.messages) {
      const bool isOk = each.operation->status().ok();
      for (const OpRecord& record : each.messages->records) record.finish(isOk, steadyNanos());
    }
    lingering_.push_back(each.operation);
  }
  return !ended.empty();
}

void WatchList::callAwaited() {
  for (Awaited& entry : takeOverOf(&awaited_)) entry.fn(entry.operation->status());
}

std::shared_ptr<const WatchedMessages> WatchList::late() const {
  Watched found;
  {
    MutexLock lock(mutex_);
    const auto first = std::find_if(others_.begin(), others_.end(), [](const Watched& each) {
      return each.messages && each.messages->deadline.expired();
    });
    if (first == others_.end()) return nullptr;
    found = *first;
  }
  return found.operation->isOver() ? nullptr : found.messages;
}

WatchList::Failed WatchList::failAll(const Status& cause) {
  std::vector<Watched> all;
  {
    MutexLock lock(mutex_);
    forEach([&](const Watched& each) { all.push_back(each); });
  }
  Failed failed;
  for (const Watched& each : all) {
    if (each.operation->isOver()) continue;
    const CollectiveOp* const op = each.collective.get();
    const bool hasText = op != nullptr && op->done() && !op->status().ok();
    each.operation->fail(hasText ? op->status() : cause);
    if (each.operation->status().ok()) continue;
    failed.isAny = true;
    const bool isOnNccl = each.collective || each.messages;
    if (!isOnNccl || !each.operation->isReliedOn()) continue;
    const bool isLater =
        !failed.lost || each.operation->reliedOnSince() > failed.lost->operation->reliedOnSince();
    if (isLater) failed.lost = each;
  }
  return failed;
}

bool WatchList::releaseMemory() {
  std::erase_if(lingering_, [](const DeviceOperationPtr& operation) {
    Kept released;  // which a thread of the CallbackPool drops
    return operation->releaseUnused(&released);
  });
  return lingering_.empty();
}

}  // namespace mycoll
