// How the ranks of a group find each other: each leaves its address in the rendezvous store, and
// waits for those of the others.
//
// Keys, all under the group's own prefix of the store, two for each rank:
//   join/<rank>        how often this rank of this group was joined: the generation
//   <generation>/<rank>  world size, secret (rank 0's counts), address
// Generations keep groups of the same name apart that are made and destroyed in one job.
//
// Thread contract: blocks the calling thread until the deadline; keeps nothing.
#pragma once

#include "engine/communicator.h"
#include "engine/store.h"
#include "transport/mailbox.h"

namespace mycoll {

Status meet(const GroupOptions& options, Store& store, const PeerAddress& self,
            GroupAddress* result);

}  // namespace mycoll
