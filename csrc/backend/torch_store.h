// torch's rendezvous store, as the engine wants it.
// Thread contract: that of mycoll::Store, without the GIL: a store written in Python takes it.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/store.h"

namespace mycoll {

class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store);

  Status set(const std::string& key, const std::string& value) override;
  Status tryGet(const std::string& key, bool* found, std::string* value) override;
  bool waitsItself() const override { return !isTcp_ && canWait_; }
  Status wait(const std::string& key, std::chrono::milliseconds atMost, bool* found) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const bool isTcp_;
  bool canWait_ = true;
};

// Whether it is served by rank 0 itself, as torch does by default where no launcher does.
bool isServedByRankZero(const c10::intrusive_ptr<c10d::Store>& store);

// The host at which a TCPStore listens; empty for other stores.
std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace mycoll
