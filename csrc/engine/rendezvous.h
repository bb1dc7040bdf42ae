// How the ranks of a group find each other: through one key of the rendezvous store, and along a
// tree of connections that lasts until the group is made.
//
//   rank 0        root = its card: a fresh number, world size, address           2 operations
//   every rank    waits for root, reads it, connects to rank 0 and shows its     2 operations
//                 own card. Rank 0 keeps it, or sends it to a rank of its own
//                 host that is there already (beyond 64 hosts: to one of theirs)
//
//               rank 0                   cards, confirmations, losses go up;
//              /   |   \                 roster, commit, failures go down
//        rank 1  rank 8  rank 16
//               / | \     | | |          a connection is liveness: when it ends,
//              9 10 11 ..                the rank is gone, and rank 0 hears of it
//
//   rank 0        when all are there: roster = all addresses, and a number
//   every rank    has the roster: confirms its number
//   rank 0        when all have confirmed the roster that stands: commit
//
// Ranks that have a group in common already know where rank 0 is, and ask it instead of the store:
// they knock there until it has come, and it sends them its card. After a second both sides turn to
// the store as well: there may be a rank that has no such group, or one that cannot be reached.
//
// Rank 0 decides what happened and tells all in the same words: two processes with one rank, other
// world sizes or settings, a rank that ended or gave up and did not come again within a second, who
// is missing at the first deadline, a rank that another group of one of these processes has lost. A
// rank that loses its place in the tree, but not rank 0, takes another.
//
// The store may hold what an earlier group of this name has left, and nothing in it says so. What
// root names is believed when that process proves that it still holds this meeting. If not, those
// that have read it wait for its successor: whoever writes root writes the same to after/<number of
// the card before>. Who cannot be heard otherwise writes a card with the reason to root: a rank
// that cannot start or cannot connect (rank 0 looks there now and then), or rank 0, for those that
// come later.
//
// Thread contract: blocks the calling thread until the deadline; keeps nothing.
#pragma once

#include "engine/communicator.h"
#include "engine/store.h"
#include "transport/mailbox.h"

namespace mycoll {

// engine: this process's; it knows of ranks that other groups have lost.
Status meet(const GroupOptions& options, Store& store, Engine& engine, GroupAddress* result);

// Instead of meet(), by a rank that cannot even begin: the others hear why, and do not wait for it.
void stayAway(const GroupOptions& options, Store& store, const Status& why);

// The group's number, from its secret and its name. Everybody may know it: it does not give the
// secret away.
void setContext(GroupAddress* address);

}  // namespace mycoll
