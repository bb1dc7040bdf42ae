// Many tensors in one call, and many calls in one Work.
#include <utility>

#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// An address that no other living thread has.
const void* thisThread() {
  static thread_local char token;
  return &token;
}

}  // namespace

bool MycollBackend::isCoalescing() const {
  const void* owner = coalescingThread_.load(std::memory_order_relaxed);
  return owner != nullptr && owner == thisThread();
}

void MycollBackend::startCoalescing() {
  const CallerInfo caller = enter("_coalescing_manager");
  const void* owner = coalescingThread_.load(std::memory_order_acquire);
  if (owner != nullptr && owner != thisThread()) {
    refuse(caller, "another thread is coalescing operations of this group");
  }
  dropCoalescing();  // left over if an exception ended a block that torch's manager did not open
  coalescingThread_.store(thisThread(), std::memory_order_release);
}

MycollBackend::WorkPtr MycollBackend::endCoalescing() {
  const CallerInfo caller = enter("_coalescing_manager");
  if (!isCoalescing()) refuse(caller, "nothing was started that could end here");
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  std::vector<CoalescedMessage> messages = std::exchange(coalescedMessages_, {});
  coalescingThread_.store(nullptr, std::memory_order_release);
  for (CoalescedMessage& each : messages) {
    each.request.given = each.inputs;
    works.push_back(launchNow(each.request, each.outputs));
  }
  const auto device = generations_.device();
  if (device && device->hasBatch()) {
    WorkPtr onDevice =
        device->endBatch(deviceExtras(c10d::OpType::COALESCED, CallbackOrder::here(callbacks_)));
    if (works.empty()) return withHooks(std::move(onDevice), /*isTimed=*/false);
    works.push_back(std::move(onDevice));
  }
  return withHooks(c10::make_intrusive<CoalescedWork>(std::move(works)), /*isTimed=*/false);
}

// Collectives on the CPU have been submitted already, and continue: every rank must take part.
void MycollBackend::dropCoalescing() {
  if (!isCoalescing()) return;
  coalesced_.clear();
  coalescedMessages_.clear();
  if (const auto device = generations_.device()) device->dropBatch();
  coalescingThread_.store(nullptr, std::memory_order_release);
}

}  // namespace mycoll
