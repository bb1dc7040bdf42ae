// Shares an arena among the ranks of a host. The first rank creates it and sends its descriptor to
// the others; the arena is used only if all of them have mapped it.
//
//   the first    offer, descriptor ->                      verdict ->
//   others                            (map it)  answer ->
#pragma once

#include <memory>
#include <vector>

#include "base/task.h"
#include "collectives/shm/arena.h"
#include "transport/mailbox.h"

namespace mycoll {

class Membership;

struct Sharing {
  Mailbox& mailbox;
  // If the members are all ranks of the group: as soon as this rank has the arena, it is attached
  // to the membership. Null: it is for the members' part of collectives that span hosts, and does
  // not report failures and departures; messages do.
  Membership* membership;
  std::vector<int> members;  // the ranks of this host; the first one offers the arena
  // What the members need for their plans, the same on all of them. With a membership, the first
  // member's environment decides instead.
  ArenaShape shape;
};

// Called by all members. *arena stays empty if it cannot be shared. Thread contract: as Task.
// Lifetime: the referenced objects outlive the task.
Task shareArena(Sharing sharing, std::unique_ptr<Arena>* arena);

}  // namespace mycoll
