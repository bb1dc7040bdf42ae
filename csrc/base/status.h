// Status: the outcome of anything that can fail below backend/. Cheap to copy; immutable, so that
// every waiter, in any thread, can be given the same one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace mycoll {

enum class Code {
  kOk,
  kInvalidArgument,  // the caller's mistake, found before anything was sent
  kMismatch,         // ranks called different operations
  kTimeout,
  kPeerLost,     // a rank died, left or became unreachable
  kNetwork,      // no connection could be made
  kStore,        // the rendezvous store failed or returned an invalid value
  kAborted,      // the group was aborted or destroyed
  kInterrupted,  // a signal is waiting for the caller (Ctrl-C)
  kUnsupported,
  kInternal,  // a bug in mycoll
  kDeadlock,  // ranks wait for each other in different calls
};

// The facts of a group's failure. Programs decide by the code and these; the message is for people.
// Plain bytes: it travels between ranks as it is.
struct Cause {
  static constexpr uint64_t kNoSequence = ~uint64_t{0};

  uint64_t group = 0;     // context of the group that failed; 0: none
  uint64_t incident = 0;  // equal where one event ended several groups; 0: it ended only this one
  uint64_t sequence = kNoSequence;  // the collective in which it happened
  int32_t rank = -1;                // the rank that caused it; -1: several, or unknown
  uint32_t reserved = 0;

  bool operator==(const Cause&) const = default;
};
static_assert(sizeof(Cause) == 32);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(Code code, std::string message, const Cause& cause = {})
      : rep_(std::make_shared<const Rep>(Rep{code, std::move(message), cause})) {}
  // The same failure with another text.
  Status withMessage(std::string message) const {
    return Status(code(), std::move(message), cause());
  }

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::kOk; }
  const Cause& cause() const;
  // Whether both describe one event: in one group, or in several that it ended.
  bool isSameFailure(const Status& other) const;
  // Empty when ok.
  const std::string& message() const;

 private:
  struct Rep {
    Code code;
    std::string message;
    Cause cause;
  };
  std::shared_ptr<const Rep> rep_;
};

// Puts the group's name before the text, as in all errors of a group. A deadlock, which is about
// several groups, and a text that begins with a group's name are returned unchanged.
Status inGroup(const std::string& name, const Status& status);

// The result of a wait when a signal is pending for its caller; the operation itself continues.
Status interrupted();

}  // namespace mycoll

// Returns from the calling function when the expression is not ok.
#define MYCOLL_RETURN_IF_ERROR(expression)         \
  do {                                             \
    ::mycoll::Status mycollStatus_ = (expression); \
    if (!mycollStatus_.ok()) return mycollStatus_; \
  } while (false)
