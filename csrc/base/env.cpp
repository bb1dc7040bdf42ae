#include "base/env.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "base/os.h"
#include "base/topology.h"

#ifndef MYCOLL_VERSION  // CMakeLists.txt sets it from python/mycoll/_version.py
#define MYCOLL_VERSION "unknown"
#endif

namespace mycoll {
namespace {

// ---- how values are written --------------------------------------------------------------------

// The values that a variable accepts, as text for people, and the function that reads them. It
// returns false for any other value and leaves the field unchanged.
struct Kind {
  std::string accepted;
  std::function<bool(std::string_view value, Env* env)> read;
};

bool parseInteger(std::string_view text, int64_t least, int64_t most, int64_t* result) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least || value > most) return false;
  *result = value;
  return true;
}

// The words map to 0, 1, 2 and so on: the values of an enum, or a bool.
template <typename T>
Kind choice(T Env::* field, std::vector<std::string> words) {
  std::string accepted = words.front();
  for (size_t i = 1; i < words.size(); ++i) {
    accepted += (i + 1 < words.size() ? ", " : " or ") + words[i];
  }
  return {accepted, [field, words](std::string_view value, Env* env) {
            const auto found = std::find(words.begin(), words.end(), value);
            if (found == words.end()) return false;
            env->*field = static_cast<T>(found - words.begin());
            return true;
          }};
}
Kind flag(bool Env::* field) { return choice(field, {"0", "1"}); }

template <typename T>
Kind number(T Env::* field, int64_t least, int64_t most) {
  return {std::to_string(least) + " to " + std::to_string(most),
          [=](std::string_view value, Env* env) {
            int64_t parsed = 0;
            if (!parseInteger(value, least, most, &parsed)) return false;
            env->*field = static_cast<T>(parsed);
            return true;
          }};
}

// "262144", "256K", "1M".
Kind bytes(size_t Env::* field, size_t most, const char* mostText, size_t multipleOf = 1) {
  std::string accepted = std::string("0 to ") + mostText;
  if (multipleOf > 1) accepted += ", a multiple of " + std::to_string(multipleOf);
  return {accepted + "; suffixes K, M and G", [=](std::string_view value, Env* env) {
            const std::string_view suffixes = "KMG";
            int shift = 0;
            if (!value.empty()) {
              const size_t suffix = suffixes.find(static_cast<char>(std::toupper(value.back())));
              if (suffix != suffixes.npos) {
                shift = 10 * (static_cast<int>(suffix) + 1);
                value.remove_suffix(1);
              }
            }
            int64_t parsed = 0;
            if (!parseInteger(value, 0, static_cast<int64_t>(most >> shift), &parsed)) return false;
            const size_t scaled = static_cast<size_t>(parsed) << shift;
            if (scaled % multipleOf != 0) return false;
            env->*field = scaled;
            return true;
          }};
}

Kind path(std::string Env::* field) {
  return {"a path", [field](std::string_view value, Env* env) {
            env->*field = value;
            return true;
          }};
}

Kind pattern(std::string Env::* field) {
  return {"a path; %h is the host, %p the process, %r the rank, %% a percent sign",
          [field](std::string_view value, Env* env) {
            for (size_t i = value.find('%'); i != value.npos; i = value.find('%', i + 2)) {
              if (value.substr(i + 1).find_first_of("hpr%") != 0) return false;
            }
            env->*field = value;
            return true;
          }};
}

Kind interfaces() {
  return {"name prefixes (eth,ib), exact names (=eth0,eth1), or what to leave out (^docker,^=eth3)",
          [](std::string_view value, Env* env) {
            InterfaceFilter parsed;
            if ((parsed.isExclusion = value.starts_with('^'))) value.remove_prefix(1);
            if ((parsed.isExact = value.starts_with('='))) value.remove_prefix(1);
            for (bool isLast = value.empty() && !parsed.isExclusion && !parsed.isExact; !isLast;) {
              const size_t comma = value.find(',');
              const std::string_view word = value.substr(0, comma);
              if (word.empty() || word.find_first_of(" \t^=/:") != word.npos) return false;
              parsed.names.emplace_back(word);
              isLast = comma == value.npos;
              if (!isLast) value.remove_prefix(comma + 1);
            }
            env->socketInterfaces = std::move(parsed);
            return true;
          }};
}

// Read by Python, when torch is imported (python/mycoll/replace.py).
Kind replaced() {
  return {"gloo", [](std::string_view value, Env*) { return value.empty() || value == "gloo"; }};
}

bool parsePort(std::string_view text, int* port) {
  int64_t parsed = 0;
  if (!parseInteger(text, 1, 65535, &parsed)) return false;
  *port = static_cast<int>(parsed);
  return true;
}

Kind ports() {
  return {"a range (20000-20099) within 1 to 65535", [](std::string_view value, Env* env) {
            PortRange range;
            const size_t dash = value.find('-');
            if (!value.empty()) {
              if (dash == value.npos || !parsePort(value.substr(0, dash), &range.first) ||
                  !parsePort(value.substr(dash + 1), &range.last) || range.last < range.first) {
                return false;
              }
            }
            env->ports = range;
            return true;
          }};
}

Kind advertised() {
  return {"an address, and a port if it differs: 203.0.113.7, 203.0.113.7:9000, [2001:db8::7]:9000",
          [](std::string_view value, Env* env) {
            AdvertisedAddress parsed;
            std::string_view address = value;
            const bool isBracketed = value.starts_with('[');
            size_t end = isBracketed ? value.find(']') : value.find(':');
            // Several colons and no brackets: IPv6 without a port.
            if (!isBracketed && end != value.rfind(':')) end = value.npos;
            if (isBracketed && end == value.npos) return false;
            if (end != value.npos) {
              address = isBracketed ? value.substr(1, end - 1) : value.substr(0, end);
              std::string_view rest = value.substr(end + (isBracketed ? 1 : 0));
              if (!rest.empty() && (rest[0] != ':' || !parsePort(rest.substr(1), &parsed.port))) {
                return false;
              }
            }
            if (!value.empty() &&
                (address.empty() ||
                 address.find_first_not_of("0123456789abcdefABCDEF.:") != address.npos)) {
              return false;
            }
            parsed.address = address;
            env->advertised = parsed;
            return true;
          }};
}

// ---- the table ---------------------------------------------------------------------------------

struct Variable {
  const char* name;
  const char* defaultValue;
  Kind kind;
  const char* help;
  // torch's variables with the same meaning, used where this one is not set.
  std::vector<const char*> others = {};
};

constexpr size_t kGiB = size_t{1} << 30;

// Never destroyed: helper threads may log during static destruction.
const std::vector<Variable>& variables() {
  static const auto* const kVariables = new std::vector<Variable>{
      {"MYCOLL_TRANSPORT", "auto", choice(&Env::transport, {"auto", "shm", "tcp"}),
       "auto: shared memory within a host, sockets between hosts. shm: refuse groups that span "
       "hosts. tcp: sockets everywhere."},
      {"MYCOLL_SOCKET_IFNAME", "", interfaces(),
       "Network interfaces to use, written as for NCCL_SOCKET_IFNAME; large messages are spread "
       "over all that are named. Unset: the one that leads to the other ranks."},
      {"MYCOLL_FLOWS", "0", number(&Env::flows, 0, 64),
       "Sockets to each rank on another host, which large messages are spread over; a network "
       "that limits each of them, as clouds do, carries more over several. 0: one, several where "
       "the other host is far away, and at least one for each network interface. The value of the "
       "rank that connects counts."},
      {"MYCOLL_PORTS", "", ports(),
       "Ports to listen on, for firewalls: each process takes the first free one. Unset: the "
       "system chooses."},
      {"MYCOLL_ADVERTISE", "", advertised(),
       "The address by which ranks on other hosts reach this process, behind NAT or in a "
       "container. Unset: the interface's own."},
      {"MYCOLL_ENCRYPT", "0", flag(&Env::encrypt),
       "1: all that ranks on different hosts send each other is encrypted and authenticated, by "
       "TLS 1.3 with a key made of MYCOLL_SECRET_FILE. Must be the same on all ranks."},
      {"MYCOLL_CPU", "engine", choice(&Env::cpu, {"engine", "gloo"}),
       "What carries CPU tensors: mycoll's engine, or torch's gloo (to compare, or to rule mycoll "
       "out)."},
      {"MYCOLL_REPLACE", "", replaced(),
       "gloo: in this process and all that it starts, mycoll is in gloo's place: every group that "
       "would be gloo's is mycoll's. Read when torch is imported."},
      {"MYCOLL_CUDA", "auto", choice(&Env::cuda, {"auto", "nccl", "host"}),
       "What carries CUDA tensors. nccl: NCCL, or an error. host: host memory and the engine. "
       "auto: NCCL, or host memory where NCCL cannot work (no library, two ranks on one GPU)."},
      {"MYCOLL_CUDA_BLOCKING_WAIT", "0", flag(&Env::cudaBlockingWait),
       "0: waiting for CUDA tensors makes the current stream wait, as with NCCL. 1: it returns "
       "when the operation is over, and raises if it failed."},
      {"MYCOLL_LOG", "failure",
       choice(&Env::logLevel, {"off", "failure", "error", "warn", "info", "debug"}),
       "What mycoll logs. failure: one line for the first failure of a group in the process, and "
       "for the first exception of a completion hook."},
      {"MYCOLL_LOG_FILE", "", pattern(&Env::logFile), "Where the log goes. Unset: stderr."},
      {"MYCOLL_TRACE_ENTRIES",
       "512",
       number(&Env::traceEntries, 0, 65536),
       "How many recent operations each group remembers for `mycoll status` and traces, rounded up "
       "to a power of two. 0: none. Unset: TORCH_FR_BUFFER_SIZE, where that is set.",
       {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}},
      {"MYCOLL_TRACE_FILE", "", pattern(&Env::traceFile),
       "Where a process writes its record when a group fails, for `mycoll trace`; off: nowhere. "
       "Unset: TORCH_FR_DUMP_TEMP_FILE and the rank, else /tmp/mycoll-UID/JOB/rank_%r, where the "
       "latest 10 jobs are kept, and up to 100 of the last 24 hours."},
      {"MYCOLL_CALL_SITES", "waiting", choice(&Env::callSites, {"never", "waiting", "always"}),
       "Which operations remember the line of the program that called them. waiting: those that "
       "wait a while. always: all of them, which makes every call slower."},
      {"MYCOLL_SECRET_FILE", "", path(&Env::secretFile),
       "File with the secret by which the job's ranks recognise each other. Unset: rank 0 makes "
       "one up and shares it through the store."},
      {"MYCOLL_NETWORK_SECONDS", "10", number(&Env::networkSeconds, 1, 3600),
       "How many seconds a rank on another host may be silent before it is declared dead. Use "
       "similar values on all ranks."},
      {"MYCOLL_SPIN_US", "-1", number(&Env::spinMicros, -1, 1000000),
       "How many microseconds a waiting rank spins before it yields its core. -1: chosen by "
       "whether the host has a core for each of its ranks."},
      {"MYCOLL_CHUNK_BYTES", "0", bytes(&Env::chunkBytes, kGiB, "1G", 4096),
       "Size of the shared-memory buffers that large messages pass through, rounded up if needed "
       "so that every rank gets a slice. A rank has eight of them in the first group and three in "
       "each later one. 0: 256K."},
      {"MYCOLL_DISTANCE", "measured", choice(&Env::distance, {"measured", "near", "far"}),
       "How shared memory is written. near: through the CPU's caches. far: past them. measured: "
       "the faster of both. The value of rank 0 counts."},
      {"MYCOLL_SINGLE_COPY", "auto", choice(&Env::singleCopy, {"auto", "on", "off"}),
       "Whether the ranks of a host read each other's large CPU tensors through the kernel "
       "(process_vm_readv) instead of staging them in shared memory. auto: for the kinds and sizes "
       "of calls for which that is measured to be faster, if the kernel permits it. off: other "
       "processes are never permitted to read this one."},
      {"MYCOLL_SMALL_BYTES", "32768", bytes(&Env::smallBytes, kGiB, "1G"),
       "Messages up to this size use the algorithms with the lowest latency, in groups inside one "
       "host. The value of rank 0 counts."},
      {"MYCOLL_EAGER_BYTES", "65536", bytes(&Env::eagerBytes, kMaxEagerBytes, "16M"),
       "A send up to this size completes without waiting for its receiver. The value of the rank "
       "that sends counts."},
      {"MYCOLL_PARTIALS", "wide", choice(&Env::partials, {"wide", "rounded"}),
       "How sums of 8- and 16-bit floats over the ranks of one host travel to other hosts. wide: "
       "as float32, so that the result is rounded once and does not depend on where ranks are. "
       "rounded: in the tensor's own type, in half of the bytes or fewer. Must be the same on all "
       "ranks."},
      {"MYCOLL_SUM_BLOCK", "1", number(&Env::sumBlock, 1, 1024),
       "How many ranks in a row a sum adds up one after the other; these sums are added up along a "
       "binary tree. 3: for hosts of 3, 6, 12, 24, 48 or 96 ranks, which then send one partial sum "
       "each instead of two. Results may differ in their last bits from those with another value. "
       "Must be the same on all ranks."},
      {"MYCOLL_NCCL_LIBRARY", "", path(&Env::ncclLibrary),
       "The NCCL to load; a second copy beside torch's is refused. Unset: the one that torch has "
       "loaded, that of the nvidia-nccl wheel, or the system's libnccl.so.2."},
  };
  return *kVariables;
}

// ---- reading -----------------------------------------------------------------------------------

// An empty value counts as unset, as in NCCL: launchers often export empty variables.
const char* valueOf(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

struct Reading {
  Env env;
  Status error;                   // of the first invalid value
  std::vector<EnvEntry> entries;  // as the table
};

std::unique_ptr<const Reading> readEnvironment() {
  auto reading = std::make_unique<Reading>();
  Env* const env = &reading->env;
  for (const Variable& variable : variables()) {
    const char* source = variable.name;
    const char* value = valueOf(source);
    for (auto other = variable.others.begin(); !value && other != variable.others.end(); ++other) {
      value = valueOf(source = *other);
    }
    const bool isOwn = value != nullptr && source == variable.name;
    EnvEntry& entry = reading->entries.emplace_back();
    entry.name = variable.name;
    entry.defaultValue = variable.defaultValue;
    entry.help = std::string(variable.help) + " Accepts " + variable.kind.accepted + ".";
    entry.value = value ? value : variable.defaultValue;
    entry.isSet = isOwn;
    entry.source = value ? source : "default";
    if (value && variable.kind.read(value, env)) continue;
    // An invalid value in a variable of torch's is not an error here.
    if (isOwn && reading->error.ok()) {
      reading->error =
          Status(Code::kInvalidArgument, std::string(variable.name) + "=" + value +
                                             " is not valid: expected " + variable.kind.accepted);
    }
    (void)variable.kind.read(variable.defaultValue, env);
  }
  for (const char* name : {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}) {
    const char* prefix = env->traceFile.empty() ? valueOf(name) : nullptr;
    if (!prefix) continue;
    for (const char* letter = prefix; *letter; ++letter) {
      env->traceFile += *letter == '%' ? "%%" : std::string(1, *letter);
    }
    env->traceFile += "%r";
  }
  const auto text = [](const char* name) {
    const char* value = valueOf(name);
    return std::string(value ? value : "");
  };
  if (text("MYCOLL_REPLACE") == "gloo" && text("GLOO_DEVICE_TRANSPORT") == "TCP_TLS") {
    const std::string prefix = "GLOO_DEVICE_TRANSPORT_TCP_TLS_";
    env->tlsFiles = {text((prefix + "PKEY").c_str()), text((prefix + "CERT").c_str()),
                     text((prefix + "CA_FILE").c_str()), text((prefix + "CA_PATH").c_str()), true};
  }
  const char* const agent = valueOf("TORCHELASTIC_USE_AGENT_STORE");
  env->isStoreOfAgent = agent && std::string_view(agent) == "True";
  return reading;
}

// Readings are never freed, as there may be references to them.
std::atomic<const Reading*> inForce{nullptr};
struct Readings {
  Mutex mutex;
  std::vector<std::unique_ptr<const Reading>> all GUARDED_BY(mutex);
};

const Reading& read(bool again = false) {
  Readings& kept = perProcess<Readings>();
  MutexLock lock(kept.mutex);
  if (kept.all.empty() || again) {
    kept.all.push_back(readEnvironment());
    inForce.store(kept.all.back().get(), std::memory_order_release);
  }
  return *kept.all.back();
}

const Reading& reading() {
  const Reading* const found = inForce.load(std::memory_order_acquire);
  return found ? *found : read();
}

}  // namespace

const char* version() { return MYCOLL_VERSION; }

bool InterfaceFilter::matches(std::string_view interfaceName) const {
  if (names.empty()) return true;
  const bool isListed = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return isExact ? interfaceName == name : interfaceName.starts_with(name);
  });
  return isListed != isExclusion;
}

const Env& Env::process() { return reading().env; }

Status Env::check() {
  const Reading& now = reading();
  return now.error.ok() ? Status() : read(/*again=*/true).error;
}

void Env::readAgainForTest() { (void)read(/*again=*/true); }

std::vector<EnvEntry> describeEnv() { return reading().entries; }

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

}  // namespace mycoll
