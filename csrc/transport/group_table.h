// GroupTable: the groups that this process is in, was in, or is about to be in, as the transport
// knows them: by context and rank. Keeps the frames that come before their group is made, as far as
// there is room. Of the groups that were left only the latest kMostLeft are remembered: a process
// may make groups for as long as it lives. A peer that still names an older one is told, as for a
// group that is not made yet, to ask again, and its call ends at its timeout.
//
// Thread contract: the mesh's I/O lock, for all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/frame.h"
#include "transport/handshake.h"
#include "transport/io_lock.h"

namespace mycoll {

class Mailbox;
struct PeerAddress;

// A whole frame that came before its group was made here.
struct EarlyFrame {
  std::string uid;  // of the process that sent it
  FrameHeader header;
  std::string payload;
};

class GroupTable {
 public:
  // The most that all kept frames take together.
  static constexpr size_t kMaxEarlyBytes = 64 * 1024 * 1024;
  static constexpr size_t kMostLeft = 4096;

  // Those of its peers that were in none of the groups so far.
  std::vector<const PeerAddress*> add(Mailbox* mailbox) REQUIRES(ioRole);
  // Needs no memory.
  void remove(Mailbox* mailbox) REQUIRES(ioRole);

  Mailbox* find(uint64_t context, int rank) const REQUIRES(ioRole);
  // How the group of this rank stands here: kNotYet if it was never made.
  Standing standing(uint64_t context, int rank) const REQUIRES(ioRole);
  // Whether this process is in one of the groups.
  bool names(const std::string& uid) const REQUIRES(ioRole) { return memberships_.count(uid) > 0; }
  // The groups that both are in, the oldest first.
  std::vector<Mailbox*> commonWith(const std::string& uid) const REQUIRES(ioRole);
  const std::vector<Mailbox*>& all() const REQUIRES(ioRole) { return byAge_; }

  // Whether a frame of so many bytes for a group that is not made yet can be kept: then keep() is
  // to follow. The group that has waited longest, which is probably never made, gives way.
  bool makeRoom(uint64_t context, int rank, size_t bytes) REQUIRES(ioRole);
  void keep(EarlyFrame frame) REQUIRES(ioRole);
  // Those for this group, in order of arrival. isComplete: there was room for all of them.
  std::vector<EarlyFrame> takeEarly(uint64_t context, int rank, bool* isComplete) REQUIRES(ioRole);

 private:
  using Key = std::pair<uint64_t, int>;  // context and rank

  std::map<Key, Mailbox*> mailboxes_ GUARDED_BY(ioRole);  // null: this process has left it
  std::list<Key> left_ GUARDED_BY(ioRole);                // those, the first to be left first
  std::list<Key> spare_ GUARDED_BY(ioRole);  // nodes for left_: one for each group that it is in
  std::vector<Mailbox*> byAge_ GUARDED_BY(ioRole);  // those that it is in, the oldest first
  // By uid: in how many of the groups it is.
  std::unordered_map<std::string, int> memberships_ GUARDED_BY(ioRole);
  std::vector<EarlyFrame> early_ GUARDED_BY(ioRole);  // in order of arrival
  size_t earlyBytes_ GUARDED_BY(ioRole) = 0;
  // Groups some of whose frames found no room: they fail when they are made.
  std::set<Key> overflown_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
