// Channels: a group's NCCL communicators, each with the stream of its asynchronous operations.
// There is one for each device that the group uses, for collectives and batches, and one for each
// pair of ranks that exchange messages outside of a batch, so that a send meets its receive
// whatever collectives either rank has enqueued before it.
//
// Thread contract: [any thread]. Functions that connect block their caller until the other ranks
// have connected, as NCCL must not connect on a second thread beside the caller's operations.
// Lifetime: a part of its DeviceGroup.
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

// Throws if connecting has failed, and fails the group. onlyHere: for the end of this rank's error.
void throwUnlessConnected(const DevicePlace& place, const Status& status,
                          const std::string& onlyHere = "");
// Runs a collective that the group's ranks need to agree. kept: the memory that it uses, which it
// keeps if a signal ends the wait. Throws if it fails or a signal ends the wait, and fails the
// group: the ranks' next collectives would not match.
void runOnControl(const DevicePlace& place, Call call, std::shared_ptr<void> kept);

class Channels {
 public:
  explicit Channels(const DevicePlace& place) : place_(place) {}

  // To be called on all ranks; the first call connects them.
  Channel ofGroup(c10::Device device);
  // To be called on both ranks; the first call connects them. One thread at a time for each peer.
  Channel ofPair(c10::Device device, int peer);
  bool hasPair(c10::Device device, int peer) const;
  // NCCL's handle of the communicator of all ranks on the current device; null: not connected yet.
  nccl::RawComm* handleHere() const;

  // To be called on all ranks of the group: gives the child, a group of some of them, a part of
  // this group's communicator. child: null on ranks that are in none. Ranks with the same color
  // belong to the same child. isWilling: false if this rank has no child although it should.
  // Returns false on all ranks if no part was given: the child then connects like any other group.
  bool split(Channels* child, int color, bool isWilling);

  // Returns an error that NCCL reports. [watchdog]
  Status check() const;
  // Stops all communicators, on threads of its own. Later attempts to connect fail.
  void beginAbort(const Status& why);
  // As beginAbort(), and waits until all have stopped, at most until the deadline.
  void abort(Deadline deadline, const Status& why);
  // Waits for running operations and frees the communicators, at most until the deadline, and while
  // `check` returns ok; then stops the others. Later attempts to connect fail.
  Status close(Deadline deadline, const nccl::Comm::Check& check);
  // The process ends: the communicators are not freed, which would wait for other ranks.
  void keepForever();
  // For a barrier: adds the streams of this group's collectives. Not those of messages between two
  // ranks: the other rank may send or receive after the barrier.
  void addStreams(std::vector<c10::Stream>* streams) const;

 private:
  using Pair = std::pair<c10::DeviceIndex, int>;  // and the peer
  using Comms = std::vector<std::shared_ptr<nccl::Comm>>;

  nccl::CommOptions optionsOn(c10::Device device) const;
  Channel join(c10::Device device, int rank, int ranks, const std::string& name,
               const nccl::UniqueId& id) const;
  // Ends NCCL's waits: not ok if the group has failed, or a signal must be handled.
  Status interruption() const;
  // Adds a channel, or throws if the group has ended while NCCL connected.
  template <typename Map, typename Key>
  Channel add(Map* channels, const Key& key, Channel channel);
  Comms all() const REQUIRES(mutex_);
  Comms end();  // returns all of them at the first call, then none

  const DevicePlace& place_;
  Mutex connectMutex_;  // held while all ranks connect; taken before mutex_
  mutable Mutex mutex_;
  std::map<c10::DeviceIndex, Channel> ofGroup_ GUARDED_BY(mutex_);
  std::map<Pair, Channel> ofPairs_ GUARDED_BY(mutex_);
  std::set<Pair> readyPairs_ GUARDED_BY(mutex_);  // those that are connected
  bool isEnded_ GUARDED_BY(mutex_) = false;
};

}  // namespace mycoll
