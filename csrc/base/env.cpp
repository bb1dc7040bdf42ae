#include "base/env.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "base/env_values.h"
#include "base/topology.h"

#ifndef MYCOLL_VERSION  // CMakeLists.txt has it from python/mycoll/_version.py
#define MYCOLL_VERSION "unknown"
#endif

extern "C" char** environ;

namespace mycoll {
namespace {

// A parser returns false when it does not accept the value; `accepted` then tells the user why.
struct Variable {
  const char* name;
  const char* defaultValue;
  const char* accepted;
  const char* help;
  bool (*parse)(std::string_view value, Env* env);
  // torch's variables for the same, in force where this one is not set.
  const char* elsewhere[2] = {};
};

constexpr size_t kGiB = size_t{1} << 30;

const Variable kVariables[] = {
    {"MYCOLL_TRANSPORT", "auto", "auto, shm or tcp",
     "How ranks of one host reach each other. auto: shared memory inside a host, sockets between "
     "hosts; shm: refuse groups that span hosts; tcp: sockets everywhere.",
     [](std::string_view value, Env* env) {
       return parseChoice<TransportChoice>(value,
                                           {{"auto", TransportChoice::kAuto},
                                            {"shm", TransportChoice::kShm},
                                            {"tcp", TransportChoice::kTcp}},
                                           &env->transport);
     }},
    {"MYCOLL_SOCKET_IFNAME", "",
     "a comma-separated list of interface name prefixes, such as eth,ib; =eth0 for exact names; "
     "^docker,lo to exclude; ^=eth3 to exclude exact names",
     "Network interfaces that may be used, written as for NCCL_SOCKET_IFNAME. Unset: the interface "
     "that leads to the other ranks.",
     [](std::string_view value, Env* env) {
       return parseInterfaces(value, &env->socketInterfaces);
     }},
    {"MYCOLL_CHECKSUM", "0", "0 or 1",
     "1: what is sent to other ranks over links (sockets, and messages through shared memory) "
     "carries a CRC-32C; what arrives changed ends the operation in an error.",
     [](std::string_view value, Env* env) {
       if (value != "0" && value != "1") return false;
       env->checksum = value == "1";
       return true;
     }},
    {"MYCOLL_CPU", "engine", "engine or gloo",
     "Who serves CPU tensors: mycoll's own engine, or torch's gloo (to compare or to rule mycoll "
     "out).",
     [](std::string_view value, Env* env) {
       return parseChoice<CpuBackend>(
           value, {{"engine", CpuBackend::kEngine}, {"gloo", CpuBackend::kGloo}}, &env->cpu);
     }},
    {"MYCOLL_CUDA", "auto", "auto, nccl or host",
     "Who serves CUDA tensors. auto: NCCL, and where it cannot (no library, two ranks on one GPU) "
     "the engine, through pinned host memory; nccl: NCCL or an error; host: always through host "
     "memory.",
     [](std::string_view value, Env* env) {
       return parseChoice<CudaPath>(
           value, {{"auto", CudaPath::kAuto}, {"nccl", CudaPath::kNccl}, {"host", CudaPath::kHost}},
           &env->cuda);
     }},
    {"MYCOLL_CUDA_BLOCKING_WAIT", "0", "0 or 1",
     "1: wait() of an operation on a CUDA tensor, and a synchronous operation, return when it is "
     "over, and raise when it failed; 0: they return when the current stream waits for it, as with "
     "NCCL.",
     [](std::string_view value, Env* env) {
       if (value != "0" && value != "1") return false;
       env->cudaBlockingWait = value == "1";
       return true;
     }},
    {"MYCOLL_LOG", "failure", "off, failure, error, warn, info or debug",
     "What mycoll logs. failure: only the first failure of a group in each process, the moment it "
     "is known (a launcher may end the process before its exception is seen).",
     [](std::string_view value, Env* env) {
       return parseChoice<LogLevel>(value,
                                    {{"off", LogLevel::kOff},
                                     {"failure", LogLevel::kFailure},
                                     {"error", LogLevel::kError},
                                     {"warn", LogLevel::kWarn},
                                     {"info", LogLevel::kInfo},
                                     {"debug", LogLevel::kDebug}},
                                    &env->logLevel);
     }},
    {"MYCOLL_LOG_FILE", "",
     "a path in which %h stands for the host name, %p for the process id, %r for the rank and %% "
     "for a percent sign",
     "Where the log goes. Unset: stderr.",
     [](std::string_view value, Env* env) {
       if (!isValidPattern(value)) return false;
       env->logFile = value;
       return true;
     }},
    {"MYCOLL_TRACE_ENTRIES",
     "512",
     "0 to 65536",
     "How many operations of each group are remembered, for `mycoll status` and for the file that "
     "is "
     "written when a group fails; rounded up to a power of two. 0: none, there are only the "
     "counters. Where it is not set, TORCH_FR_BUFFER_SIZE counts.",
     [](std::string_view value, Env* env) {
       const std::optional<int64_t> entries = parseInteger(value);
       if (!entries || *entries < 0 || *entries > 65536) return false;
       env->traceEntries = static_cast<size_t>(*entries);
       return true;
     },
     {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}},
    {"MYCOLL_TRACE_FILE", "",
     "a path in which %h stands for the host name, %p for the process id, %r for the rank and %% "
     "for a percent sign; or off",
     "Where a process writes what it did last when a group fails, for torchfrtrace and "
     "`mycoll trace`; JSON when the name ends with .json. Unset: TORCH_FR_DUMP_TEMP_FILE followed "
     "by "
     "the rank where that is set, else /tmp/mycoll-UID/JOB/rank_%r, of which the latest 10 jobs "
     "are "
     "kept.",
     [](std::string_view value, Env* env) {
       if (!isValidPattern(value)) return false;
       env->traceFile = value;
       return true;
     }},
    {"MYCOLL_CALL_SITES", "waiting", "never, waiting or always",
     "Whose place in the program is remembered. waiting: of operations that have waited a while; "
     "always: of all, which costs time in every call.",
     [](std::string_view value, Env* env) {
       return parseChoice<CallSites>(value,
                                     {{"never", CallSites::kNever},
                                      {"waiting", CallSites::kWaiting},
                                      {"always", CallSites::kAlways}},
                                     &env->callSites);
     }},
    {"MYCOLL_METRICS_FILE", "",
     "a path in which %h stands for the host name, %p for the process id, %r for the rank and %% "
     "for a percent sign",
     "Where a process writes its counters now and then, in Prometheus' text format (for the "
     "textfile "
     "collector of node_exporter: a name that ends with .prom). Unset: nowhere.",
     [](std::string_view value, Env* env) {
       if (!isValidPattern(value)) return false;
       env->metricsFile = value;
       return true;
     }},
    {"MYCOLL_METRICS_SECONDS", "15", "1 to 86400", "How often MYCOLL_METRICS_FILE is written.",
     [](std::string_view value, Env* env) {
       return parseInteger(value, 1, 86400, &env->metricsSeconds);
     }},
    {"MYCOLL_SECRET_FILE", "", "a path",
     "A file whose content is the secret by which ranks prove to each other that they belong to "
     "the job. Unset: rank 0 makes one up and shares it through the rendezvous store.",
     [](std::string_view value, Env* env) {
       env->secretFile = value;
       return true;
     }},
    {"MYCOLL_NETWORK_SECONDS", "10", "1 to 3600",
     "A rank on another host that the network has swallowed for so long is dead. All ranks need "
     "about the same.",
     [](std::string_view value, Env* env) {
       return parseInteger(value, 1, 3600, &env->networkSeconds);
     }},
    {"MYCOLL_KILL_AFTER_FAILURE", "0", "0 to 86400",
     "Seconds. A process that has not destroyed a group so long after its failure is ended by "
     "SIGABRT, so that a launcher can start it again even where its program hears no exception. 0: "
     "never.",
     [](std::string_view value, Env* env) {
       return parseInteger(value, 0, 86400, &env->killAfterSeconds);
     }},
    {"MYCOLL_SPIN_US", "-1", "-1 or a number of microseconds up to 1000000",
     "How long a waiting rank spins before it yields its core. -1: chosen by whether the host has "
     "a core for each of its ranks.",
     [](std::string_view value, Env* env) {
       return parseInteger(value, -1, 1000000, &env->spinMicros);
     }},
    {"MYCOLL_CHUNK_BYTES", "0", "0, or 4096 to 1G, a multiple of 4096; suffixes K, M and G",
     "Large messages pass through shared memory in chunks of up to this size (larger where more "
     "than 64 ranks would not find room in one); a rank has memory for eight in a process's first "
     "group, and for three in further ones. 0: 256K.",
     [](std::string_view value, Env* env) {
       size_t bytes = 0;
       if (!parseBytes(value, 0, kGiB, &bytes) || bytes % 4096 != 0) return false;
       env->chunkBytes = bytes;
       return true;
     }},
    {"MYCOLL_DISTANCE", "measured", "measured, near or far",
     "How shared memory is written: through the caches when the ranks' cores share one (near), or "
     "past them (far). Measured again and again unless it is said. Rank 0 of a group decides.",
     [](std::string_view value, Env* env) {
       return parseChoice<DistanceChoice>(value,
                                          {{"measured", DistanceChoice::kMeasured},
                                           {"near", DistanceChoice::kNear},
                                           {"far", DistanceChoice::kFar}},
                                          &env->distance);
     }},
    {"MYCOLL_SMALL_BYTES", "32768", "0 to 1G; suffixes K, M and G",
     "Messages up to this size take the algorithms of lowest latency. All ranks need the same.",
     [](std::string_view value, Env* env) { return parseBytes(value, 0, kGiB, &env->smallBytes); }},
    {"MYCOLL_EAGER_BYTES", "65536", "0 to 16M; suffixes K, M and G",
     "A send up to this size completes without waiting for its receiver. All ranks need the same.",
     [](std::string_view value, Env* env) {
       return parseBytes(value, 0, kMaxEagerBytes, &env->eagerBytes);
     }},
    {"MYCOLL_NCCL_LIBRARY", "", "a path",
     "The NCCL to load. Unset: the one that torch has loaded, that of the nvidia-nccl wheel, or "
     "libnccl.so.2 where the system finds it. A second copy beside torch's is refused.",
     [](std::string_view value, Env* env) {
       env->ncclLibrary = value;
       return true;
     }},
    {"MYCOLL_NCCL_BLOCKING", "", "0 or 1",
     "1: calls into NCCL return when their work is enqueued; 0: they may return earlier, and "
     "mycoll "
     "waits for them where it can be interrupted. Unset: 1.",
     [](std::string_view value, Env* env) { return parseOptional(value, &env->nccl.isBlocking); }},
};

// An empty value counts as unset, as in NCCL: launchers often export empty variables.
const char* valueOf(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

// source: the variable that it comes from.
const char* valueOf(const Variable& variable, const char** source = nullptr) {
  const char* unused;
  if (!source) source = &unused;
  *source = variable.name;
  if (const char* value = valueOf(variable.name)) return value;
  for (const char* other : variable.elsewhere) {
    const char* value = other ? valueOf(other) : nullptr;
    if (value) {
      *source = other;
      return value;
    }
  }
  return nullptr;
}

size_t editDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

constexpr std::string_view kPrefix = "MYCOLL_";

}  // namespace

const char* version() { return MYCOLL_VERSION; }

bool InterfaceFilter::matches(std::string_view interfaceName) const {
  if (names.empty()) return true;
  const bool isListed = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return isExact ? interfaceName == name : interfaceName.starts_with(name);
  });
  return isListed != isExclusion;
}

Status Env::load(Env* env) {
  *env = Env();
  Status first;
  for (const Variable& variable : kVariables) {
    const char* source;
    const char* value = valueOf(variable, &source);
    if (value != nullptr && variable.parse(value, env)) continue;
    // What torch accepts elsewhere is torch's business.
    if (value != nullptr && source == variable.name && first.ok()) {
      first = Status(Code::kInvalidArgument, std::string(variable.name) + "=" + value +
                                                 " is not valid: expected " + variable.accepted);
    }
    if (!variable.parse(variable.defaultValue, env)) {
      return Status(Code::kInternal,
                    std::string("the default of ") + variable.name + " is invalid");
    }
  }
  if (env->traceFile.empty()) {
    for (const char* name : {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}) {
      const char* prefix = valueOf(name);
      if (!prefix) continue;
      for (const char* letter = prefix; *letter; ++letter) {
        env->traceFile += *letter == '%' ? "%%" : std::string(1, *letter);
      }
      env->traceFile += "%r";
      break;
    }
  }
  return first;
}

const Env& Env::process() {
  // Never destroyed: helper threads may log during static destruction.
  static const Env* const kEnv = [] {
    Env* env = new Env;
    (void)Env::load(env).ok();
    return env;
  }();
  return *kEnv;
}

std::vector<EnvEntry> describeEnv() {
  std::vector<EnvEntry> entries;
  for (const Variable& variable : kVariables) {
    const char* source;
    const char* value = valueOf(variable, &source);
    entries.push_back({variable.name, variable.defaultValue,
                       std::string(variable.help) + " Accepts " + variable.accepted + ".",
                       value != nullptr ? value : variable.defaultValue,
                       value != nullptr && source == variable.name,
                       value != nullptr ? source : "default"});
  }
  return entries;
}

std::string expandPattern(std::string_view pattern, int rank) {
  std::string path;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '%' || i + 1 == pattern.size()) {
      path += pattern[i];
      continue;
    }
    switch (pattern[++i]) {
      case 'h': path += hostName(); break;
      case 'p': path += std::to_string(processId()); break;
      case 'r': path += rank < 0 ? "unknown" : std::to_string(rank); break;
      default: path += pattern[i];
    }
  }
  return path;
}

std::vector<UnknownVariable> unknownVariables() {
  std::vector<UnknownVariable> unknown;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view given = text.substr(0, text.find('='));
    if (!given.starts_with(kPrefix)) continue;
    if (std::any_of(std::begin(kVariables), std::end(kVariables),
                    [&](const Variable& variable) { return given == variable.name; })) {
      continue;
    }
    UnknownVariable found{std::string(given), ""};
    // Beyond half of the letters after the prefix a likeness is chance.
    size_t best = (given.size() - kPrefix.size()) / 2 + 1;
    for (const Variable& variable : kVariables) {
      const size_t distance = editDistance(given, variable.name);
      if (distance < best) {
        best = distance;
        found.nearest = variable.name;
      }
    }
    unknown.push_back(std::move(found));
  }
  std::sort(unknown.begin(), unknown.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return unknown;
}

}  // namespace mycoll
