// PathChoice: whether tensors travel by NCCL or through host memory. All ranks of the group decide
// at its first collective; two ranks that send to each other before that decide for the two of
// them.
//
// Threads: every function [any thread]. agree() and agreeWith() wait for other ranks. Lifetimes: a
// part of its DeviceGroup.
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "device/place.h"

namespace mycoll {

enum class DevicePath : uint8_t { kUnknown, kNccl, kHost };

class PathChoice {
 public:
  // What this rank can bring to the choice. Plain bytes: ranks exchange it as it is.
  struct Report {
    int32_t version = 0;     // of NCCL; 0: none, and `reason` says why
    uint8_t choice = 0;      // CudaPath
    uint8_t capability = 0;  // of the GPU: 90 for sm_90; 0: not known
    uint32_t kernel = 0;     // hash of what tells machines of one name apart
    char gpu[48] = {};       // which GPU of which host, if that can be known
    char reason[200] = {};
  };

  explicit PathChoice(const DevicePlace& place) : place_(place) {}

  // What all ranks have agreed on, or not yet.
  DevicePath known() const { return path_.load(std::memory_order_acquire); }
  // The capability of the oldest GPU of all ranks; 0: not known.
  int capability() const { return capability_.load(std::memory_order_relaxed); }

  // All ranks. caller: what is called, for the error when ranks do not come.
  void agree(c10::Device device, const std::string& caller);
  // On a group that was split off one that uses NCCL.
  void adoptNccl(const PathChoice& parent);

  // For messages between this rank and another one; empty: not decided yet.
  std::optional<DevicePath> knownWith(int peer) const;
  // Both ranks; for one thread at a time for each peer.
  DevicePath agreeWith(c10::Device device, int peer);

 private:
  struct Note;

  static Report report(c10::Device device);
  // Not ok: why these ranks cannot use NCCL together (kUnsupported: host memory can serve), or
  // should not (they were told different things).
  static Status judge(const std::vector<Report>& reports, const std::vector<int>& ranks);
  // Ends the group where the ranks were told different things.
  DevicePath conclude(const Status& judgement, bool warns);
  DevicePath exchangeWith(c10::Device device, int peer);

  const DevicePlace& place_;
  std::atomic<DevicePath> path_{DevicePath::kUnknown};
  std::atomic<int> capability_{0};
  Mutex agreeMutex_;  // held while all ranks meet
  mutable Mutex mutex_;
  std::map<int, DevicePath> withPeers_ GUARDED_BY(mutex_);
};

}  // namespace mycoll
