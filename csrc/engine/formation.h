// Formation: how the ranks of a group find each other and agree to be one group.
//
//   rank r    opens a reception and publishes its handle: the key handle/<r> of the store
//   rank 0    collects the handles, and invites the ranks in a round: round.h
//   all       join; when all have, the group is made
//
// So each rank uses the store once, and rank 0 reads each handle once. The connections that the
// invitations open are those of the control tree, which the group uses later.
//
// Ranks that have a group in common know each other's addresses, and can compute each other's
// nonces from its secret; or the caller knows the ranks. They use no store, unless one of them is
// missing after a second: it may have left that group. A rank that fails sends its error to rank 0,
// also before rank 0 has invited it, or writes it to the store; rank 0 sends its own to all others.
//
// A store may hold handles of earlier groups of the same name. An invitation to a stale handle
// finds no reception, so rank 0 waits for its successor. A rank that finds a handle of its own
// number asks the process that published it: if that still waits, two processes have one rank.
//
// Rank 0 decides, and all ranks report the same error: two processes with one rank, other world
// sizes or settings, a rank that gives up, a rank whose process has ended and that did not come
// again within a second, the missing ranks at the first deadline, a rank that another group of one
// of these processes has lost. While ranks are missing, those that are there form rounds without
// them, so that they notice each other's ends. A rank that is in no round looks at the handle of
// rank 0 now and then, where rank 0 writes its error.
//
// Thread contract: [any thread]; formGroup() blocks until the deadline.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "engine/store.h"
#include "transport/peer.h"

namespace mycoll {

// The ranks of the new group, known from another group, or from handles (endpoint.h).
struct KnownPeers {
  // members: the new group's ranks, by their numbers in that group.
  static KnownPeers from(const GroupAddress& group, const std::vector<int>& members,
                         const std::string& name);

  PeerList peers;  // by rank; empty: they are not known
  // The keys of their invitations: the nonces by rank, or a secret that they have in common.
  std::vector<std::string> nonces;
  std::string secret;
  // "rank 2 (node1:4712) has left the group: ..."; empty: this rank does not know that it has left
  // the group from which it is known. asks: asks it, as a later call may know. May be empty.
  std::function<std::string(int rank, bool asks)> departure;
};

// store: null if all ranks are known. connections: to be kept until the group has been added to the
// engine. result: the address of the group.
Status formGroup(const GroupOptions& options, Store* store, Engine& engine, KnownPeers known,
                 std::shared_ptr<void>* connections, GroupAddress* result);

// Instead of a formation, by a rank that cannot even begin: the others then do not wait for it.
// Waits for them for about a second. Returns `why`, or that this rank was interrupted.
Status reportAbsence(const GroupOptions& options, Store& store, const Status& why);

}  // namespace mycoll
