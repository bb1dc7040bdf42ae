// Pairs: messages between this rank and one other, outside of batches. Before the first of them can
// leave, both ranks agree on its road, and on NCCL's make a communicator for the two of them: each
// waits for the other's first message. A ring of isends would wait for itself if their callers did
// that waiting. So messages are put aside until a short-lived thread has connected, which then
// carries them, in order.
//
// Thread contract: as DeviceGroup.
// Lifetimes: a part of its DeviceGroup, which that thread holds.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>

#include "device/device_group.h"

namespace mycoll {

// Of what two ranks tell each other while they connect: the message that waits for it has a
// deadline of its own, and its text names what the user called.
constexpr std::chrono::milliseconds kNoDeadline = std::chrono::milliseconds::max();

class Pairs {
 public:
  Pairs(const DevicePlace& place, NcclRoad& nccl, HostRoad& host);
  ~Pairs();

  // request: one message. Its operation is on its road, or put aside.
  DeviceOperationPtr carry(DeviceGroup& group, Request& request, bool isTimed);

 private:
  struct Aside;
  struct Pair;
  using PairPtr = std::shared_ptr<Pair>;

  PairPtr pairWith(int peer);
  bool isReady(const Pair& pair, c10::Device device) const;
  DeviceOperationPtr carryBy(bool isOnNccl, DeviceGroup& group, Request& request, bool isTimed,
                             EventPtr ready = nullptr);
  DeviceOperationPtr putAside(DeviceGroup& group, const PairPtr& pair, Request& request,
                              bool isTimed);
  void connect(DeviceGroup& group, Pair& pair, c10::Device device);
  bool isPairOnNccl(const DeviceGroup& group, c10::Device device, int peer);
  void serve(DeviceGroup& group, Pair& pair);
  void carryAside(DeviceGroup& group, const Pair& pair, Aside& aside);

  const DevicePlace& place_;
  NcclRoad& nccl_;
  HostRoad& host_;
  std::mutex mutex_;
  std::map<int, PairPtr> pairs_;  // guarded by mutex_; by peer
};

}  // namespace mycoll
