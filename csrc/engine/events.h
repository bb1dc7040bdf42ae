// Applies the events of a group's mailbox (transport/event.h) to its membership, its agreement and
// the mailbox itself.
#pragma once

#include "engine/agreement.h"
#include "engine/membership.h"
#include "transport/event.h"
#include "transport/mailbox.h"

namespace mycoll {

// Returns false for a control frame of another part of the group.
bool handleEvent(const Event& event, Mailbox& mailbox, Membership& membership, Agreement& agreement)
    REQUIRES(ioRole);

}  // namespace mycoll
