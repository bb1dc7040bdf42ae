// GroupTable: the groups that this process is in, was in, or is about to be in, by context and
// rank. Keeps frames that arrive before their group is made, as far as there is room. It remembers
// only the latest kMostLeft of the groups that were left, as a process may make groups for as long
// as it lives. A peer that still names an older one is answered kNotYet, as for a group that is not
// made yet: it asks again until its call times out.
//
// Thread contract: the mesh's I/O lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transport/frame.h"
#include "transport/handshake.h"
#include "transport/io_lock.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {

class Mailbox;
struct PeerAddress;

// A frame that was received with its payload.
struct WholeFrame {
  std::string uid;  // of the process that sent it, if the frame arrived before its group was made
  FrameHeader header;
  std::string payload;
  SharedPlace place;  // in the payload
  Fd descriptor;      // of other memory than that
};

class GroupTable {
 public:
  // The most memory that all kept frames take together.
  static constexpr size_t kMaxEarlyBytes = 64 * 1024 * 1024;
  static constexpr size_t kMostLeft = 4096;

  // Returns those of its peers that were in none of the groups before.
  std::vector<const PeerAddress*> add(Mailbox* mailbox) REQUIRES(ioRole);
  // Does not allocate memory.
  void remove(Mailbox* mailbox) REQUIRES(ioRole);

  Mailbox* find(uint64_t context, int rank) const REQUIRES(ioRole);
  // Whether this process is in the group as this rank (kAccepted), has left it (kGone), or never
  // made it (kNotYet).
  Outcome standing(uint64_t context, int rank) const REQUIRES(ioRole);
  // Whether the process with this uid is in one of the groups.
  bool names(const std::string& uid) const REQUIRES(ioRole) { return memberships_.count(uid) > 0; }
  // The groups that this process and that one are in, the oldest first.
  std::vector<Mailbox*> commonWith(const std::string& uid) const REQUIRES(ioRole);
  const std::vector<Mailbox*>& all() const REQUIRES(ioRole) { return byAge_; }

  // Whether a frame of this size for a group that is not made yet can be kept by keep(). Makes room
  // by dropping the frames of the group that has waited longest, which is probably never made.
  bool makeRoom(uint64_t context, int rank, size_t bytes) REQUIRES(ioRole);
  void keep(WholeFrame frame) REQUIRES(ioRole);
  // Takes the frames of this group, in order of arrival. *isComplete: none of them was dropped.
  std::vector<WholeFrame> takeEarly(uint64_t context, int rank, bool* isComplete) REQUIRES(ioRole);

 private:
  using Key = std::pair<uint64_t, int>;  // context and rank

  // Frames of this group are dropped.
  void overflow(const Key& group) REQUIRES(ioRole);

  std::map<Key, Mailbox*> mailboxes_ GUARDED_BY(ioRole);  // null: this process has left it
  // The latest ones that were left: a ring, and the place of the oldest. -1: no such group.
  std::vector<Key> left_ GUARDED_BY(ioRole) = std::vector<Key>(kMostLeft, Key{0, -1});
  size_t oldestLeft_ GUARDED_BY(ioRole) = 0;
  std::vector<Mailbox*> byAge_ GUARDED_BY(ioRole);  // not left, the oldest first
  // By uid: the number of groups that the process is in.
  std::unordered_map<std::string, int> memberships_ GUARDED_BY(ioRole);
  std::vector<WholeFrame> early_ GUARDED_BY(ioRole);  // in order of arrival
  size_t earlyBytes_ GUARDED_BY(ioRole) = 0;
  // Groups whose frames were dropped for lack of room. They fail when they are made.
  std::set<Key> overflown_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
