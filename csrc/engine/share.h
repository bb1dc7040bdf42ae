// How the ranks of a host come to share an arena: the first of them makes one and hands it to the
// others as a descriptor; all must have mapped it, or nobody uses it.
//
//   the first    offer ->            descriptor, sent ->              verdict ->
//   others                 -> (map it)                  answer ->
#pragma once

#include <memory>
#include <vector>

#include "base/task.h"
#include "collectives/shm/arena.h"
#include "transport/mailbox.h"

namespace mycoll {

class Membership;

// By all ranks of a group on one host. *arena stays empty where it cannot be shared; the membership
// knows it as soon as this rank has it. Thread contract: as Task; what is referred to outlives it.
Task shareArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena);

// The same by those ranks of a group that are on this host, for their part of collectives that span
// hosts. It tells nothing of failures and departures: messages do.
Task shareHostArena(Mailbox& mailbox, std::vector<int> members, ArenaShape shape,
                    std::unique_ptr<Arena>* arena);

}  // namespace mycoll
