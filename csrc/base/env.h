// Every MYCOLL_* variable, documented in one table (env.cpp). Variables of others, which mycoll
// only takes into account, are read where they count: those of NCCL in device/path_choice.cpp.
//
// Lifetime: read when the first group is made (or by the first line of the log, should that come
// before) and kept for the process: what a program changes in its environment later counts no more.
// Thread contract: all [any thread], as long as nobody calls setenv() during that first reading.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mycoll {

// mycoll's own, "1.2.3".
const char* version();

// In the order in which the table names them.
enum class TransportChoice { kAuto, kShm, kTcp };
enum class DistanceChoice { kMeasured, kNear, kFar };
enum class Partials { kWide, kRounded };
enum class CpuBackend { kEngine, kGloo };
enum class CudaPath { kAuto, kNccl, kHost };
enum class CallSites { kNever, kWaiting, kAlways };
// kFailure: the process's first failure of a group, and what callbacks of the program throw.
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

// A message that its receiver must be ready to buffer is never larger, whatever the environment of
// its sender says: receivers take a larger one for an attack.
constexpr size_t kMaxEagerBytes = 16 * 1024 * 1024;

// From first to last; first 0: the system chooses.
struct PortRange {
  int first = 0;
  int last = 0;
};

// An address that others are told instead of this host's own; empty: none. port 0: the listener's.
struct AdvertisedAddress {
  std::string address;
  int port = 0;
};

// What each field means stands in the table, which also has the defaults.
struct Env {
  TransportChoice transport{};
  InterfaceFilter socketInterfaces;
  PortRange ports;
  int flows = 0;
  AdvertisedAddress advertised;
  bool checksum = false;
  CpuBackend cpu{};
  CudaPath cuda{};
  bool cudaBlockingWait = false;
  LogLevel logLevel{};
  std::string logFile;  // a pattern, see expandPattern(); empty: stderr
  size_t traceEntries = 0;
  std::string traceFile;  // a pattern; empty: chosen by observe/trace_file
  CallSites callSites{};
  std::string secretFile;  // empty: the secret comes through the store
  int networkSeconds = 0;
  int spinMicros = 0;     // -1: chosen by base/wait
  size_t chunkBytes = 0;  // 0: chosen by the engine
  DistanceChoice distance{};
  size_t smallBytes = 0;
  size_t eagerBytes = 0;
  Partials partials{};
  int sumBlock = 1;
  std::string ncclLibrary;  // empty: found by itself
  // torch's TORCHELASTIC_USE_AGENT_STORE: the rendezvous store is torchrun's, not rank 0's.
  bool isStoreOfAgent = false;

  // The process's, with defaults in place of invalid values.
  static const Env& process();
  // The first invalid value, as an error that names the variable, the value and what is accepted.
  // Asked by each new group: as nothing was made of it, a wrong environment may be corrected, and
  // is then read again.
  static Status check();
  // For tests: what the environment says now is the process's from here on. Earlier references stay
  // valid.
  static void readAgainForTest();
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

// A path with %h (host), %p (process), %r (rank) and %% filled in; rank below 0: not known.
std::string expandPattern(std::string_view pattern, int rank);

// MYCOLL_* variables in the environment that mycoll does not know, most likely misspelt.
struct UnknownVariable {
  std::string name;
  std::string nearest;  // a known name that resembles it; empty when none does
};

std::vector<UnknownVariable> unknownVariables();

// The one of `names` that `given` resembles; empty when none does. The first `same` letters, which
// all of them share, are no likeness.
std::string nearestName(std::string_view given, const std::vector<std::string>& names, size_t same);

}  // namespace mycoll
