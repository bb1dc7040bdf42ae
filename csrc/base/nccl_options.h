// Options of a group for NCCL (ncclConfig_t); where one is not set, NCCL chooses. Plain values. In
// base/ because backend/, which reads them from a program, and nccl/ do not include each other.
#pragma once

#include <optional>
#include <string>

namespace mycoll {

struct NcclOptions {
  std::optional<bool> isBlocking;
  std::optional<int> minCtas;
  std::optional<int> maxCtas;
  std::optional<int> cgaClusterSize;
  std::optional<int> nvlsCtas;
  std::optional<int> ctaPolicy;
  std::optional<int> trafficClass;
  std::string netName;
};

}  // namespace mycoll
