#include "device/watch_list.h"

#include <algorithm>
#include <utility>

#include "observe/black_box.h"

namespace mycoll {
namespace {

constexpr size_t kAtOnce = 64;  // of a list in order

}  // namespace

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

bool WatchList::isBusy() const {
  MutexLock lock(mutex_);
  return !collectives_.empty() || !others_.empty();
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

std::vector<DeviceOperationPtr> WatchList::besideChannels() const {
  std::vector<DeviceOperationPtr> found;
  MutexLock lock(mutex_);
  forEach([&](const Watched& each) {
    const bool isOnChannel = each.collective && each.operation->isEnqueued();
    if (!each.isMessage && !isOnChannel) found.push_back(each.operation);
  });
  return found;
}

// Queries each operation once, as a second query may have another result, and a list in order up to
// the first that is not over, a part of it at a time. Other threads only append meanwhile.
size_t WatchList::takeOverOf(std::deque<Watched>* list, bool isInOrder,
                             const OnDeviceError& onDeviceError) {
  std::vector<Watched> watched;
  {
    MutexLock lock(mutex_);
    const size_t count = isInOrder ? std::min(kAtOnce, list->size()) : list->size();
    watched.assign(list->begin(), list->begin() + static_cast<std::ptrdiff_t>(count));
  }
  std::vector<bool> areOver;
  for (const Watched& each : watched) {
    const DeviceOperationPtr& operation = each.operation;
    areOver.push_back(operation->isOver());
    if (!areOver.back() && isInOrder) break;
    if (!areOver.back()) continue;
    const Status status = operation->status();
    if (operation->isDeviceError()) onDeviceError(status);
    if (each.collective) each.collective->external->finish(status);
    if (each.messages) {
      for (const OpRecord& record : each.messages->records) {
        record.finish(status.ok(), steadyNanos());
      }
    }
    if (each.onOver) (*each.onOver)(status);
    lingering_.push_back(operation);
  }
  MutexLock lock(mutex_);
  const auto end = list->begin() + static_cast<std::ptrdiff_t>(watched.size());
  size_t index = 0;
  const auto isOver = [&](const Watched&) { return index < areOver.size() && areOver[index++]; };
  list->erase(std::remove_if(list->begin(), end, isOver), end);
  return static_cast<size_t>(std::count(areOver.begin(), areOver.end(), true));
}

bool WatchList::takeOver(const OnDeviceError& onDeviceError) {
  size_t all = 0, count = 0;
  do {
    all += count = takeOverOf(&collectives_, /*isInOrder=*/true, onDeviceError);
  } while (count == kAtOnce);
  return all + takeOverOf(&others_, /*isInOrder=*/false, onDeviceError) > 0;
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
