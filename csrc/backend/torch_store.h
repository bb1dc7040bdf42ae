// TorchStore: torch's rendezvous store behind the engine's interface.
// Thread contract: that of mycoll::Store, without the GIL: a store written in Python takes it.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/store.h"

namespace mycoll {

class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store);

  Status set(const std::string& key, const std::string& value) override;
  Status tryGet(const std::string& key, bool* found, std::string* value) override;
  Status compareSet(const std::string& key, const std::string& expected, const std::string& value,
                    std::string* now) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const bool isTcp_;
};

// Whether rank 0 itself serves the store, which is torch's default if no launcher serves it.
bool isServedByRankZero(const c10::intrusive_ptr<c10d::Store>& store);

// The host on which a TCPStore listens; empty for other stores.
std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace mycoll
