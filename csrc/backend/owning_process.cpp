#include "backend/owning_process.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>

namespace mycoll {
namespace {

std::atomic<int> forkCount{0};
[[maybe_unused]] const int kForkHandler =
    pthread_atfork(nullptr, nullptr, [] { forkCount.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

OwningProcess::OwningProcess() : forks_(forkCount.load(std::memory_order_relaxed)) {}

bool OwningProcess::isHere() const { return forkCount.load(std::memory_order_relaxed) == forks_; }

void OwningProcess::refuse(const std::string& group, const char* function) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str("mycoll group '", group, "': ", function,
               ": this process was forked after the group was made, and a group cannot be used "
               "on both sides of a fork; make the group "
               "in the child, or start processes with torch.multiprocessing's 'spawn'"));
}

}  // namespace mycoll
