#include "transport/loss.h"

namespace mycoll {
namespace {

std::string inBrackets(const std::string& detail) {
  return detail.empty() ? "" : " (" + detail + ")";
}

}  // namespace

std::string Loss::describe(bool mayHaveLeft) const {
  switch (reason) {
    case LossReason::kNone: break;
    case LossReason::kEnded:
      return mayHaveLeft ? "has ended (killed, crashed or left while others still need it)"
                         : "has ended (killed, crashed or left without destroy_process_group)";
    case LossReason::kClosed:
    case LossReason::kLeft: return "closed its connection" + inBrackets(detail);
    case LossReason::kSilent:
      return "no longer responds: its host or the network has failed" + inBrackets(detail);
    case LossReason::kClosedInMessage:
      return "closed its connection in the middle of a message" + inBrackets(detail);
    case LossReason::kNotListening:
      return "has left the group (destroy_process_group) or ended before anything reached it: its "
             "process does not listen any more (" +
             detail + ")";
    case LossReason::kUnreachable:
    case LossReason::kUnauthenticated: return "cannot be reached: " + detail;
    case LossReason::kNotAFrame: return "sent something that is not a mycoll frame";
    case LossReason::kChanged:
      return "sent data that was changed on the way (MYCOLL_ENCRYPT found it): a failing network, "
             "or "
             "an attack";
    case LossReason::kNotItsName: return "sent a message in the name of another rank";
    case LossReason::kNoMemory: return "sent what this process had no memory for";
  }
  return "is lost";
}

}  // namespace mycoll
