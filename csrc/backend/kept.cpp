#include "backend/kept.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <new>

#include "backend/callback_pool.h"
#include "backend/layout.h"
#include "backend/plain_dispatch.h"
#include "backend/shared_tensors.h"

namespace mycoll {
namespace {

// Whether freeing the memory runs only torch's code and ours, and Python does not know the storage.
bool isPlainMemory(const c10::Storage& storage) {
  static const c10::DeleterFnPtr kTorchs = c10::GetDefaultCPUAllocator()->raw_deleter();
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (impl->pyobj_slot()->load_pyobj() != nullptr) return false;
  const c10::DeleterFnPtr deleter = impl->_mutable_data_ptr_no_checks().get_deleter();
  return deleter == kTorchs || isSharedTensorDeleter(deleter);
}

// Frees memory with its device as the current one, on which the device's runtime may make a
// context.
struct LastReference {
  explicit LastReference(c10::Storage&& last) : storage(std::move(last)) {}
  ~LastReference() {
    const c10::DeviceGuard guard(storage.device());
    storage = c10::Storage();
  }
  c10::Storage storage;
};

// Returns the same tensor as an object that Python does not know.
at::Tensor unknown(const at::Tensor& tensor) {
  const PlainDispatch guard;
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/true));
}

}  // namespace

void Kept::letGo() noexcept {
  try {
    for (c10::Storage& storage : storages_) {
      if (!storage || isPlainMemory(storage)) continue;
      CallbackPool::get().drop(std::make_shared<LastReference>(std::move(storage)));
    }
  } catch (const std::bad_alloc&) {
    // The destructor drops the rest here, and may have to wait for the GIL.
  }
}

CopyBack::CopyBack(const at::Tensor& packedMemory, const at::Tensor& given, int64_t offset)
    : packed(packedMemory), target(unknown(given)), offsetBytes(offset) {
  memory.add(packed);
  memory.add(target);
}

void CopyBack::run() const {
  unpack(static_cast<const char*>(packed.const_data_ptr()) + offsetBytes, target);
}

}  // namespace mycoll
