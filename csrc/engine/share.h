// How the ranks of a host come to share an arena: rank 0 makes one and hands it to the others as a
// descriptor; all must have mapped it, or nobody uses it.
//
//   rank 0    offer ->            descriptor, sent ->              verdict ->
//   others              -> (map it)                  answer ->
#pragma once

#include <memory>

#include "base/task.h"
#include "collectives/shm/arena.h"
#include "transport/mailbox.h"

namespace mycoll {

class Membership;

// By all ranks of the group. *arena stays empty where it cannot be shared; the membership knows it
// as soon as this rank has it. Thread contract: as Task; what is referred to outlives it.
Task shareArena(Mailbox& mailbox, Membership& membership, std::unique_ptr<Arena>* arena);

}  // namespace mycoll
