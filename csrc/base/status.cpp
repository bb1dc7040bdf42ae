#include "base/status.h"

namespace mycoll {

const std::string& Status::message() const {
  // Never destroyed: a Status may outlive static destruction in a helper thread.
  static const std::string* const kEmpty = new std::string;
  return rep_ ? rep_->message : *kEmpty;
}

const Cause& Status::cause() const {
  static const Cause kNone;
  return rep_ ? rep_->cause : kNone;
}

bool Status::isSameFailure(const Status& other) const {
  if (ok() || other.ok()) return ok() == other.ok();
  const Cause& a = cause();
  const Cause& b = other.cause();
  if (a.incident != 0 && a.incident == b.incident) return true;
  if (a.group != 0 || b.group != 0) return a.group == b.group;
  return code() == other.code() && message() == other.message();
}

Status inGroup(const std::string& name, const Status& status) {
  static constexpr char kPrefix[] = "mycoll group '";
  const std::string& text = status.message();
  if (status.ok() || status.code() == Code::kDeadlock || text.starts_with(kPrefix)) return status;
  return status.withMessage(kPrefix + name + "': " + text);
}

Status interrupted() { return Status(Code::kInterrupted, "interrupted by a signal"); }

}  // namespace mycoll
