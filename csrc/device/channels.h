// Channels: a group's NCCL communicators, each with the stream of its asynchronous operations. One
// for each device that the group is used with, for collectives and batches; one for each pair of
// ranks that send to each other outside of a batch, so that a send meets its receive whatever
// collectives either side has enqueued before it.
//
// Threads: every function [any thread]. Those that connect wait in their caller for the other
// ranks, as NCCL must not connect on a second thread beside the caller's operations. Lifetimes: a
// part of its DeviceGroup.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/place.h"
#include "device/streams.h"
#include "nccl/comm.h"

namespace mycoll {

struct Channel {
  std::shared_ptr<nccl::Comm> comm;
  c10::Stream stream;
};

// Throws where connecting has failed, which ends the group, if nothing has yet.
void throwUnlessConnected(const DevicePlace& place, const Status& status);

class Channels {
 public:
  explicit Channels(const DevicePlace& place) : place_(place) {}

  // On all ranks; connects at first.
  Channel ofGroup(c10::Device device);
  // On both ranks; connects at first. For one thread at a time for each peer.
  Channel ofPair(c10::Device device, int peer);
  bool hasPair(c10::Device device, int peer) const;
  // NCCL's handle of what ofGroup() has connected on the current device; null: nothing yet.
  nccl::RawComm* handleHere() const;

  // On all ranks of the group: gives the child, a group of some of them, a part of this group's
  // communicator; null on ranks that are in no child. Ranks with one color are one child's.
  // isWilling: false where this rank has no child although it should. False: no part was given, on
  // any rank, and the child connects like any other group.
  bool split(Channels* child, int color, bool isWilling);

  // Ok while NCCL has no error to report. [watchdog]
  Status check() const;
  // Stops all there is, on threads of its own. From here on nothing connects any more.
  void beginAbort(const Status& why);
  // The same, and waits for it, also for what began before, by the deadline.
  void abort(Deadline deadline, const Status& why);
  // Waits for what runs and frees it, until the deadline, and for as long as check is ok. What is
  // left then is stopped. From here on nothing connects any more.
  Status close(Deadline deadline, const nccl::Comm::Check& check);
  // For a barrier: the streams that this group's collectives are enqueued on. Not those of messages
  // between two ranks: the other end of one may come after the barrier.
  void addStreams(std::vector<c10::Stream>* streams) const;

 private:
  using Pair = std::pair<c10::DeviceIndex, int>;  // and the peer
  using Comms = std::vector<std::shared_ptr<nccl::Comm>>;

  nccl::CommOptions optionsOn(c10::Device device) const;
  Channel join(c10::Device device, int rank, int ranks, const std::string& name,
               const nccl::UniqueId& id) const;
  // What ends NCCL's waits: the group's end, or a signal.
  Status interruption() const;
  void connectBothWays(const Channel& channel,
                       int peer) const;  // peer: as the communicator counts
  // The group may have ended while NCCL connected. Adds it, or throws.
  template <typename Map, typename Key>
  Channel add(Map* channels, const Key& key, Channel channel);
  Comms all() const REQUIRES(mutex_);
  Comms end();  // all of them at the first call, then none

  const DevicePlace& place_;
  Mutex connectMutex_;  // one connects all ranks at a time; before mutex_
  mutable Mutex mutex_;
  std::map<c10::DeviceIndex, Channel> ofGroup_ GUARDED_BY(mutex_);
  std::map<Pair, Channel> ofPairs_ GUARDED_BY(mutex_);
  std::set<Pair> readyPairs_ GUARDED_BY(mutex_);  // those that are connected
  bool isEnded_ GUARDED_BY(mutex_) = false;
};

}  // namespace mycoll
