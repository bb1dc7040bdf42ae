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

// Called by all ranks of a group on one host. *arena stays empty if it cannot be shared; as soon as
// this rank has it, it is attached to the membership. Thread contract: as Task. Lifetime: the
// referenced objects outlive the task.
Task shareArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena);

// As shareArena(), called by the ranks of a group that are on this host, for their part of
// collectives that span hosts. This arena does not report failures and departures: messages do.
Task shareHostArena(Mailbox& mailbox, std::vector<int> members, ArenaShape shape,
                    std::unique_ptr<Arena>* arena);

}  // namespace mycoll
