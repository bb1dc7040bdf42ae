// Many tensors in one call, and many calls in one Work.
#include <utility>

#include "backend/mycoll_backend.h"

namespace mycoll {

// By their callbacks_, as the address of a backend may be used again.
MycollBackend::Blocks& MycollBackend::blocksOfThread() {
  static thread_local Blocks blocks;
  return blocks;
}

MycollBackend::Block* MycollBackend::openBlock() const {
  if (openBlocks_.load(std::memory_order_relaxed) == 0) return nullptr;
  const auto found = blocksOfThread().find(callbacks_);
  return found == blocksOfThread().end() ? nullptr : &found->second;
}

void MycollBackend::startCoalescing() {
  enter("_coalescing_manager");
  dropCoalescing();  // left over if an exception ended a block that torch's manager did not open
  blocksOfThread()[callbacks_].generation = generations_.pinned();
  openBlocks_.fetch_add(1, std::memory_order_relaxed);
}

MycollBackend::WorkPtr MycollBackend::endCoalescing() {
  const UserCall caller = enter("_coalescing_manager");
  Block* const open = openBlock();
  if (open == nullptr) refuse(caller, "nothing was started that could end here");
  Block block = std::move(*open);
  dropCoalescing();
  for (Coalesced& each : block.messages) {
    block.works.push_back(launchNow(each.request, each.outputs));
  }
  if (!block.onDevice.empty()) {
    std::vector<Request*> requests;
    Tensors outputs;
    for (Coalesced& each : block.onDevice) {
      requests.push_back(&each.request);
      outputs.insert(outputs.end(), each.outputs.begin(), each.outputs.end());
    }
    WorkPtr onDevice = launchTogether(requests, outputs, /*isBatch=*/true);
    if (block.works.empty()) return withHooks(std::move(onDevice));
    block.works.push_back(std::move(onDevice));
  }
  return withHooks(c10::make_intrusive<CoalescedWork>(std::move(block.works)));
}

// Collectives on the CPU have been submitted already, and continue: every rank must take part.
void MycollBackend::dropCoalescing() {
  if (openBlock() == nullptr) return;
  blocksOfThread().erase(callbacks_);
  openBlocks_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace mycoll
