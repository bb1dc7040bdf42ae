#include "backend/completion_hook.h"

#include <chrono>

#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "base/log.h"
#include "base/wait.h"

namespace mycoll {

void callWhenOver(const c10::intrusive_ptr<c10d::Work>& work,
                  std::function<void(c10d::WorkResult)> fn) {
  work->getFutureResult()->addCallback([work, fn = std::move(fn)](c10::ivalue::Future& future) {
    const auto result = static_cast<c10d::WorkResult>(future.value().toInt());
    const auto call = [work, fn, result] {
      runCallbacks(work->retrieveOpType(), [&] { fn(result); });
    };
    // If the work is over already, this is the thread that launched it.
    CallbackPool::isHere() ? call() : CallbackPool::get().post(call);
  });
}

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

void CompletionHook::runAfter(const c10::intrusive_ptr<c10d::Work>& work) {
  callWhenOver(work, [this, work = work.get(), pending = addPending()](c10d::WorkResult) {
    const auto ended = std::chrono::steady_clock::now();
    const std::chrono::duration<float, std::milli> took(work->getDuration());
    run(std::make_shared<c10d::WorkInfo>(
        work->retrieveOpType(), work->getSequencenumber(),
        ended - std::chrono::duration_cast<std::chrono::nanoseconds>(took), ended, took));
  });
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
