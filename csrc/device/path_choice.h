// PathChoice: whether tensors are transferred by NCCL or through host memory. All ranks of the
// group decide at its first collective. Two ranks that exchange messages before that decide for
// these messages.
//
// Thread contract: [any thread]. agree() and agreeWith() wait for other ranks. Lifetime: a part of
// its DeviceGroup.
#pragma once

#include <atomic>
#include <map>
#include <string>

#include "base/mutex.h"
#include "device/place.h"

namespace mycoll {

enum class DevicePath : uint8_t { kUnknown, kNccl, kHost };

class PathChoice {
 public:
  explicit PathChoice(const DevicePlace& place) : place_(place) {}

  // The path on which all ranks have agreed; kUnknown before that.
  DevicePath known() const { return path_.load(std::memory_order_acquire); }
  // The smallest capability of all ranks' GPUs; 0: unknown.
  int capability() const { return capability_.load(std::memory_order_relaxed); }

  // To be called on all ranks. operation: its name, for the error if ranks do not take part.
  void agree(c10::Device device, const std::string& operation);
  // For a group that was split from a group that uses NCCL.
  void adoptNccl(const PathChoice& parent);

  // The path of messages between this rank and another one; kUnknown: not decided yet.
  DevicePath knownWith(int peer) const;
  // To be called on both ranks, by one thread at a time for each peer. To receive from any rank,
  // through host memory, it waits for none.
  DevicePath agreeWith(c10::Device device, int peer);

 private:
  // checked: whether the ranks can use NCCL. Returns the path, or fails the group if the ranks must
  // not continue.
  DevicePath pathFor(const Status& checked, bool warns);
  // The path of this rank's messages that needs no answer of another rank: the group's, or host
  // memory if MYCOLL_CUDA says so. kUnknown: there is none.
  DevicePath ownPath() const;
  // Both ranks get the same result: the group's path, if one of them knows it, or else one that
  // both can use. If MYCOLL_CUDA differs, the rank that waits for the other one fails the group.
  DevicePath exchangeWith(c10::Device device, int peer);

  const DevicePlace& place_;
  std::atomic<DevicePath> path_{DevicePath::kUnknown};
  std::atomic<int> capability_{0};
  Mutex agreeMutex_;  // held while all ranks agree
  mutable Mutex mutex_;
  std::map<int, DevicePath> withPeers_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
