// Status: the outcome of anything that can fail below backend/. Cheap to copy; immutable, so that
// the same story can be handed to every waiter from any thread.
#pragma once

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
  kStore,        // the rendezvous store failed or told something impossible
  kAborted,      // the group was aborted or destroyed
  kInterrupted,  // a signal is waiting for the caller (Ctrl-C)
  kUnsupported,
  kInternal,  // a bug in mycoll
  kDeadlock,  // ranks wait for each other in different calls
};

const char* name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(Code code, std::string message)
      : rep_(std::make_shared<const Rep>(Rep{code, std::move(message)})) {}

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::kOk; }
  // Empty when ok.
  const std::string& message() const;
  // "kTimeout: ..." for logs and tests.
  std::string toString() const;

 private:
  struct Rep {
    Code code;
    std::string message;
  };
  std::shared_ptr<const Rep> rep_;
};

// What a wait ends with when a signal waits for its caller; what was waited for runs on.
Status interrupted();

}  // namespace mycoll

// Returns from the calling function when the expression is not ok.
#define MYCOLL_RETURN_IF_ERROR(expression)         \
  do {                                             \
    ::mycoll::Status mycollStatus_ = (expression); \
    if (!mycollStatus_.ok()) return mycollStatus_; \
  } while (false)
