// Kept: holds the memory that an operation uses until the operation is done.
//
// Any thread may complete an operation: the engine's, the watchdog's, or one that works on the
// queue while it waits. None of these may wait for the GIL, which one C call of the program can
// hold for seconds. So Kept holds storages and not tensors: dropping one of the last two references
// to a tensor that Python knows takes the GIL. Dropping a storage takes the GIL if Python knows the
// storage itself (untyped_storage()) or owns the memory (numpy, DLPack); such a storage, and one on
// a device, is passed to CallbackPool::drop(). All others are dropped in place, at no cost.
//
// Thread contract: one thread at a time. May be destroyed on any thread, with or without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <utility>

namespace mycoll {

class Kept {
 public:
  Kept() = default;
  Kept(Kept&& other) noexcept : storages_(std::move(other.storages_)) { other.storages_.clear(); }
  Kept& operator=(Kept&& other) noexcept {
    std::swap(storages_, other.storages_);
    return *this;
  }
  ~Kept() {
    if (!storages_.empty()) letGo();
  }

  void add(const at::Tensor& tensor) { storages_.push_back(tensor.storage()); }
  void add(Kept&& others) {
    for (c10::Storage& storage : others.storages_) storages_.push_back(std::move(storage));
    others.storages_.clear();
  }
  bool empty() const { return storages_.empty(); }
  // For a thread that may wait for the GIL: drops all storages here, without the pool.
  void dropHere() { storages_.clear(); }

 private:
  void letGo() noexcept;

  c10::SmallVector<c10::Storage, 2> storages_;
};

// An output that the engine cannot write in place, and the plain memory that it writes instead. May
// be destroyed on any thread.
struct CopyBack {
  // offset: in bytes, in packedMemory, which several targets may share.
  CopyBack(const at::Tensor& packedMemory, const at::Tensor& target, int64_t offset = 0);

  // Copies the result to the target, on the CPU.
  void run() const;

  Kept memory;  // of both; before the tensors, so that it is dropped after them
  at::Tensor packed;
  at::Tensor target;  // not the program's own tensor object, which Python knows
  int64_t offsetBytes;
};

using CopyBacks = c10::SmallVector<CopyBack, 1>;

}  // namespace mycoll
