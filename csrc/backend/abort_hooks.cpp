// Functions of the program that are called when the group has failed.
#include <utility>

#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "backend/mycoll_backend.h"
#include "base/log.h"

namespace mycoll {

// On a thread of the pool: hooks may take the GIL and any time, and may unregister themselves.
void MycollBackend::AbortHooks::call() {
  decltype(all) now;
  {
    const MutexLock lock(mutex);
    now = all;
  }
  for (const auto& entry : now) {
    CallbackPool::get().post([hook = entry.second] {
      try {
        (*hook)();
      } catch (...) {
        MYCOLL_LOG_ERROR("an abort hook has failed: %s", describeException().c_str());
      }
    });
  }
}

#if MYCOLL_TORCH_HAS_ABORT_HOOKS

void MycollBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  enter("register_abort_hook");
  std::shared_ptr<const std::function<void()>> shared =
      std::make_shared<const std::function<void()>>(std::move(hook));
  const MutexLock lock(abortHooks_->mutex);
  std::swap(abortHooks_->all[id], shared);  // one that it replaces is dropped without the lock
}

void MycollBackend::unregisterAbortHook(int64_t id) {
  enter("unregister_abort_hook");
  std::shared_ptr<const std::function<void()>> last;  // dropped without the lock
  const MutexLock lock(abortHooks_->mutex);
  const auto found = abortHooks_->all.find(id);
  if (found == abortHooks_->all.end()) return;
  last = std::move(found->second);
  abortHooks_->all.erase(found);
}

#endif

}  // namespace mycoll
