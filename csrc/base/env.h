// Every MYCOLL_* variable, documented in one table (env.cpp). Variables of other libraries that
// mycoll takes into account are read where they are used: NCCL's in device/path_choice.cpp.
//
// Lifetime: read when the first group is made (or by the first log line, if that comes earlier) and
// kept for the process: later changes of the environment have no effect.
// Thread contract: all [any thread]. No thread may call setenv() during that first reading.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace mycoll {

// mycoll's own version, "1.2.3".
const char* version();

// In the order in which the table lists the words.
enum class TransportChoice { kAuto, kShm, kTcp };
enum class DistanceChoice { kMeasured, kNear, kFar };
enum class SingleCopyUse { kMeasured, kOn, kOff };
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

// The largest message that a receiver must be able to buffer, whatever the environment of the
// sender says: a receiver treats a larger one as an attack.
constexpr size_t kMaxEagerBytes = 16 * 1024 * 1024;

// From first to last; first 0: the system chooses.
struct PortRange {
  int first = 0;
  int last = 0;
};

// The address that other ranks use instead of this host's own; empty: none. port 0: the listener's.
struct AdvertisedAddress {
  std::string address;
  int port = 0;
};

// The certificate of this process and what authorities it trusts, in PEM.
struct TlsFiles {
  std::string key;
  std::string certificate;
  std::string authorities;        // a file
  std::string authoritiesFolder;  // or a folder
  bool isWanted = false;          // encryption, with these files
};

// The table documents each field and has the defaults.
struct Env {
  TransportChoice transport{};
  InterfaceFilter socketInterfaces;
  PortRange ports;
  int flows = 0;
  AdvertisedAddress advertised;
  bool encrypt = false;
  TlsFiles tlsFiles;  // gloo's, in gloo's place
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
  SingleCopyUse singleCopy{};
  size_t smallBytes = 0;
  size_t eagerBytes = 0;
  Partials partials{};
  int sumBlock = 1;
  std::string ncclLibrary;  // empty: found by itself
  // torch's TORCHELASTIC_USE_AGENT_STORE: torchrun hosts the rendezvous store, not rank 0.
  bool isStoreOfAgent = false;

  // Whether sockets between hosts are encrypted.
  bool encrypts() const { return encrypt || tlsFiles.isWanted; }

  // The variables of the process, with defaults in place of invalid values.
  static const Env& process();
  // The first invalid value, as an error that names the variable, the value and what is accepted.
  // Each new group calls it. After an error no group exists, so the program may correct its
  // environment: the next call reads it again.
  static Status check();
  // For tests: reads the environment again; process() returns the new values. Earlier references
  // remain valid.
  static void readAgainForTest();
};

struct EnvEntry {
  std::string name;
  std::string defaultValue;
  std::string help;
  std::string value;  // the value in use; as written in the environment when isSet
  bool isSet = false;
  std::string source;  // "default", or the variable that sets it: its own, or torch's equivalent
};

std::vector<EnvEntry> describeEnv();

// Expands %h (host), %p (process), %r (rank) and %% in a path; rank below 0: not known.
std::string expandPattern(std::string_view pattern, int rank);

}  // namespace mycoll
