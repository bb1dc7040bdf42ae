// What a group does with the events of its mailbox (transport/event.h): the one place where
// something that has come changes it.
#pragma once

#include "engine/agreement.h"
#include "engine/membership.h"
#include "transport/event.h"
#include "transport/mailbox.h"

namespace mycoll {

// False: a control frame that is for neither.
bool handleEvent(const Event& event, Mailbox& mailbox, Membership& membership, Agreement& agreement)
    REQUIRES(ioRole);

}  // namespace mycoll
