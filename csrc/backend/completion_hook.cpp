#include "backend/completion_hook.h"

#include "backend/errors.h"
#include "base/log.h"
#include "base/wait.h"

namespace mycoll {

bool CompletionHook::set(Call&& hook) {
  const MutexLock lock(mutex_);
  if (isSet()) return false;
  // Never copied, as that may take the GIL: all operations share this one.
  call_ = std::move(hook);
  isSet_.store(true, std::memory_order_release);
  return true;
}

void CompletionHook::run(std::shared_ptr<c10d::WorkInfo> info) {
  const std::string operation =
      c10::str(c10d::opTypeToString(info->opType), ", operation ", info->seq);
  try {
    call_(std::move(info));
  } catch (...) {
    const bool isFirst = !hasThrown_.exchange(true, std::memory_order_relaxed);
    MYCOLL_LOG_AT(isFirst ? LogLevel::kFailure : LogLevel::kError,
                  "group '%s': the completion hook has failed after %s: %s", group_.c_str(),
                  operation.c_str(), describeException().c_str());
  }
}

std::shared_ptr<void> CompletionHook::addPending() {
  const MutexLock lock(mutex_);
  ++pending_;
  return {nullptr, [self = shared_from_this()](void*) {
            const MutexLock done(self->mutex_);
            --self->pending_;
            self->changed_.notify_all();
          }};
}

CompletionHook::Call CompletionHook::forWork() {
  if (!isSet()) return {};
  return [this, pending = addPending()](std::shared_ptr<c10d::WorkInfo> info) {
    run(std::move(info));
  };
}

CompletionHook::CallWhenOver CompletionHook::forDevice(c10d::OpType type, uint64_t sequence) {
  if (!isSet()) return {};
  return [this, type, sequence, pending = addPending()](std::chrono::nanoseconds took) {
    const auto ended = std::chrono::steady_clock::now();
    run(std::make_shared<c10d::WorkInfo>(type, sequence, ended - took, ended,
                                         std::chrono::duration<float, std::nano>(took)));
  };
}

void CompletionHook::awaitAll() {
  MutexLock lock(mutex_);
  while (pending_ != 0) {
    changed_.wait_for(lock.native(), kWaitTick);
    if (pending_ == 0) return;
    lock.unlock();
    if (isInterruptPending()) throwStatus(interrupted());
    lock.lock();
  }
}

}  // namespace mycoll
