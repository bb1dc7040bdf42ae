// Every MYCOLL_* variable, documented in one table (env.cpp). Nothing else reads the environment.
// Thread contract: all [any thread], as long as nobody calls setenv() at the same time.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mycoll {

// mycoll's own, "1.2.3".
const char* version();

enum class TransportChoice { kAuto, kShm, kTcp };
enum class DistanceChoice { kMeasured, kNear, kFar };
enum class CpuBackend { kEngine, kGloo };
enum class CudaPath { kAuto, kNccl, kHost };
enum class CallSites { kNever, kWaiting, kAlways };
// kFailure: the first failure of a group, once in a process.
enum class LogLevel { kOff, kFailure, kError, kWarn, kInfo, kDebug };

// Which network interfaces may be used, written as for NCCL_SOCKET_IFNAME:
//   eth,ib      names that begin so        =eth0,eth1    exactly these
//   ^docker,lo  all but those              ^=eth3,eth4   all but exactly these
struct InterfaceFilter {
  bool isExclusion = false;
  bool isExact = false;
  std::vector<std::string> names;  // empty: no preference

  bool isSet() const { return !names.empty(); }
  // True for any interface when nothing was set.
  bool matches(std::string_view interfaceName) const;
};

// What a group asks of NCCL (ncclConfig_t); what is not set is left to NCCL. MYCOLL_NCCL_BLOCKING
// fills in isBlocking, the rest are a program's Options.
struct NcclEnv {
  std::optional<bool> isBlocking;
  std::optional<int> minCtas;
  std::optional<int> maxCtas;
  std::optional<int> cgaClusterSize;
  std::optional<int> nvlsCtas;
  std::optional<int> ctaPolicy;
  std::optional<int> trafficClass;
  std::string netName;
};

// A message that its receiver must be ready to buffer is never larger, whatever the environment of
// its sender says: receivers take a larger one for an attack.
constexpr size_t kMaxEagerBytes = 16 * 1024 * 1024;

struct Env {
  TransportChoice transport = TransportChoice::kAuto;
  InterfaceFilter socketInterfaces;
  CpuBackend cpu = CpuBackend::kEngine;
  LogLevel logLevel = LogLevel::kFailure;
  std::string logFile;  // empty: stderr. May hold %h %p %r %%
  bool checksum = false;
  int networkSeconds = 10;
  int killAfterSeconds = 0;
  std::string secretFile;   // empty: the secret comes through the store
  size_t traceEntries = 0;  // operations remembered of each group; 0: none
  std::string traceFile;    // as logFile; empty: chosen by observe/trace_file; "off": none
  CallSites callSites = CallSites::kWaiting;
  std::string metricsFile;  // as logFile; empty: none
  int metricsSeconds = 15;
  int spinMicros = -1;    // -1: chosen by base/wait
  size_t chunkBytes = 0;  // 0: chosen by engine/prepare
  DistanceChoice distance = DistanceChoice::kMeasured;
  size_t smallBytes = 0;
  size_t eagerBytes = 0;
  CudaPath cuda = CudaPath::kAuto;
  bool cudaBlockingWait = false;
  std::string ncclLibrary;  // empty: found by itself
  NcclEnv nccl;

  // Reads the environment afresh. The first invalid value is an error that names the variable,
  // the value and what is accepted; *env then holds defaults in place of every invalid value.
  static Status load(Env* env);

  // As it was at the first call, with defaults in place of invalid values: for those that cannot
  // fail, such as the log. Whoever starts a group calls load() and reports.
  static const Env& process();
};

struct EnvEntry {
  std::string name;
  std::string defaultValue;
  std::string help;
  std::string value;  // what is in force; as written in the environment when isSet
  bool isSet = false;
  std::string source;  // "default", or the variable that says so: its own, or torch's for the same
};

std::vector<EnvEntry> describeEnv();

// A path with %h, %p, %r and %% filled in; rank below 0: not known.
std::string expandPattern(std::string_view pattern, int rank);

// MYCOLL_* variables in the environment that mycoll does not know, most likely misspelt.
struct UnknownVariable {
  std::string name;
  std::string nearest;  // a known name that resembles it; empty when none does
};

std::vector<UnknownVariable> unknownVariables();

}  // namespace mycoll
