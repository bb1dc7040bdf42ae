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
  const UserCall caller = enter("_coalescing_manager");
  dropCoalescing();  // left over if an exception ended a block that torch's manager did not open
  const void* none = nullptr;
  if (!coalescingThread_.compare_exchange_strong(none, thisThread())) {
    refuse(caller, "another thread is coalescing operations of this group");
  }
  block_.generation = generations_.pinned();
}

MycollBackend::WorkPtr MycollBackend::endCoalescing() {
  const UserCall caller = enter("_coalescing_manager");
  if (!isCoalescing()) refuse(caller, "nothing was started that could end here");
  Block block = std::exchange(block_, {});
  coalescingThread_.store(nullptr, std::memory_order_release);
  for (Coalesced& each : block.messages) {
    each.request.given = each.inputs;
    block.works.push_back(launchNow(each.request, each.outputs));
  }
  if (!block.onDevice.empty()) {
    std::vector<std::shared_ptr<void>> extensions;
    for (Coalesced& each : block.onDevice) {
      if (each.request.extension) extensions.push_back(std::move(each.request.extension));
    }
    DeviceSupport::Extras extras = deviceExtras(CallbackOrder::here(callbacks_));
    const bool isHooked = extras.wantsWork;
    WorkPtr onDevice =
        block.generation.device->launchBatch(std::move(block.onDevice), std::move(extras));
    if (isHooked) hook_->runAfter(onDevice);
    if (!extensions.empty()) callWhenOver(onDevice, [extensions](auto) {});
    if (block.works.empty()) return withHooks(std::move(onDevice));
    block.works.push_back(std::move(onDevice));
  }
  return withHooks(c10::make_intrusive<CoalescedWork>(std::move(block.works)));
}

// Collectives on the CPU have been submitted already, and continue: every rank must take part.
void MycollBackend::dropCoalescing() {
  if (!isCoalescing()) return;
  block_ = {};
  coalescingThread_.store(nullptr, std::memory_order_release);
}

}  // namespace mycoll
