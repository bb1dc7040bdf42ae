// The script of the stand-in (standin_nccl.h documents the keys), and its counters.
// Thread contract: [any thread].
#pragma once

#include <cstdint>
#include <string>

#include "nccl/abi.h"

namespace standin::nccl {

struct Script {
  int version = 22809;
  int progressMilliseconds = 0;
  int rank = -1;
  std::string hang;  // "op+abort"
  std::string fail;
  int64_t errorAfter = -1;
  mycoll::nccl::Result error = mycoll::nccl::Result::kUnhandledCudaError;
  bool mismatchIsError = false;
  bool duplicateGpu = false;
  bool peerDeathIsError = true;
  bool hasWindows = true;
  bool initSyncs = true;
  bool oneThread = true;
  bool connectsLazily = true;

  bool concerns(int ofRank) const { return rank < 0 || rank == ofRank; }
  bool hangs(const char* what, int ofRank) const;
  bool fails(const char* what, int ofRank) const;
};

Script script();

// Blocks while the script requests it, until isEnough() (usually: the communicator is aborted).
template <typename Predicate>
void hangWhile(const char* what, int rank, Predicate isEnough);
void nap();

void count(const std::string& what, int64_t change = 1);
int64_t counted(const std::string& what);

// Aborts the process, for misuse whose result is undefined in NCCL.
[[noreturn]] void die(const std::string& sentence);

template <typename Predicate>
void hangWhile(const char* what, int rank, Predicate isEnough) {
  while (script().hangs(what, rank) && !isEnough()) nap();
}

}  // namespace standin::nccl
