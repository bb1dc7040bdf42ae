// How the ranks of a group find each other, through the rendezvous store.
//
// The store may hold what earlier groups of the same name have left, of this job or of processes
// that are dead, and nothing in it says so. So nothing is believed until everybody has confirmed
// it:
//
//   every rank    card/<rank> = a fresh number, world size, address
//   rank 0        reads the cards; roster = all of them, latest = its number; again whenever a card
//                 changes
//   every rank    whose own fresh card is in the roster: ack/<rank> = the roster's number
//   rank 0        when all have confirmed the roster that stands: commit = its number
//   every rank    done/<rank> = its number, and that of the own card, which is an old one now
//   rank 0        returns last, when all are done: whatever it does next (make the group anew,
//                 or end and take the store with it), nobody still needs what is there
//
//   who fails     refused/<number of a card> = why, for those whom it concerns; but for rank 0, it
//                 marks its own card, for a rank 0 that comes later. Who fails before there was
//                 one leaves a marked card
//
// A card of the dead never confirms, and is replaced when its rank comes. A rank that another group
// of this process has lost, and that nobody has replaced, is not waited for. Whoever is not rank 0
// reads a constant number of keys.
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
