// mycoll.Options: the options that a user may set for one group (pg_options). Plain values.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/torch_version.h"
#include "base/nccl_options.h"
#include "engine/diagnosis.h"

namespace mycoll {

inline constexpr const char* kBackendName = "mycoll";

struct MycollOptions final : c10d::Backend::Options {
  explicit MycollOptions(std::chrono::milliseconds groupTimeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, groupTimeout) {}
  MycollOptions(const MycollOptions&) = default;

#if MYCOLL_TORCH_HAS_OPTIONS_CLONE
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<MycollOptions>(*this);
  }
#endif

  // How long destroy_process_group() waits for pending operations and for the other ranks.
  std::chrono::milliseconds shutdownTimeout{10'000};
  // How long an operation waits before it logs the ranks that it waits for, and asks them what they
  // wait for.
  std::chrono::milliseconds warnAfter = kDefaultWarnAfter;
  // The implementation for CPU tensors: "engine", or "gloo" (torch's own, to compare or to rule
  // mycoll out). Empty: the value of MYCOLL_CPU.
  std::string cpu;
  // Options of this group's NCCL communicators.
  NcclOptions nccl;
};

}  // namespace mycoll
