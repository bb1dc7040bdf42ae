#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>

#include <vector>

#include "accelerator.h"

namespace standin {
namespace {

void release(void* memory) { mycoll_standin_free(memory); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, currentDevice());
    void* memory = nullptr;
    if (bytes != 0) {
      mycoll_standin_enter();
      memory = mycoll_standin_malloc(bytes, handleOf(currentStream()));
      TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "the stand-in device has no ", bytes,
                       " bytes left; STANDIN_MEMORY_MB is its size");
    }
    return {memory, memory, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    check(mycoll_standin_copy(target, source, bytes, handleOf(currentStream())));
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes != 0 ? mycoll_standin_host_malloc(bytes) : nullptr;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

// Random numbers come from the CPU's operators, but torch needs a generator for each device.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return mycoll_standin_device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(mycoll_standin_device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    c10::impl::getDeviceGuardImpl(kDevice)->setDevice({kDevice, device});
  }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = currentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static const std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int i = 0; i < mycoll_standin_device_count(); ++i) {
        made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
      }
      return made;
    }();
    return all.at(device < 0 ? currentDevice() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? currentDevice() : device);
  }

  bool isPinnedPtr(const void* data) const override { return mycoll_standin_is_pinned(data) != 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    const int device = mycoll_standin_pointer_device(data);
    TORCH_CHECK(device >= 0, "not memory of the stand-in device");
    return {kDevice, static_cast<c10::DeviceIndex>(device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resizeStorage(storage, bytes);
  }
};

const bool isRegistered = [] {
  c10::SetAllocator(kDevice, deviceAllocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Allocator* deviceAllocator() {
  static DeviceAllocator& allocator = *new DeviceAllocator;
  return &allocator;
}

void resizeStorage(const c10::Storage& storage, size_t bytes) {
  const size_t kept = std::min(bytes, storage.nbytes());
  const c10::OptionalDeviceGuard guard(storage.device());
  c10::DataPtr grown = deviceAllocator()->allocate(bytes);
  if (kept != 0) {
    check(mycoll_standin_copy(grown.get(), storage.data(), kept, handleOf(currentStream())));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace standin
