// What a group asks of NCCL (ncclConfig_t); what is not set is left to NCCL. Plain values. Here, as
// backend/, which takes them from a program, and nccl/ do not know each other.
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
