#include "device/path_choice.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "backend/errors.h"
#include "base/crc32c.h"
#include "base/env.h"
#include "base/mutex.h"
#include "base/text.h"
#include "base/topology.h"
#include "device/channels.h"
#include "device/nccl_memory.h"
#include "nccl/cudart.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

// Marks the notes of two ranks that agree on a path, beside any tag of a user's.
constexpr uint64_t kPathTag = uint64_t{1} << 48;

template <size_t kSize>
void put(char (&field)[kSize], const std::string& text) {
  const size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(field, text.data(), length);
  field[length] = '\0';
}

bool isSet(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// "node1 0000:3b:00.0"; empty where it is not known, or where the user has told NCCL that ranks may
// share it.
std::string gpuOf(c10::Device device, const nccl::Library& library) {
  if (isSet("NCCL_HOSTID")) return "";
  if (isSet("NCCL_MULTI_RANK_GPU_ENABLE") && library.has(nccl::Capability::kSeveralRanksPerGpu)) {
    return "";
  }
  std::string bus;
  if (!nccl::Cudart::get().busId(device.index(), &bus)) return "";
  char host[64] = {};
  gethostname(host, sizeof(host) - 1);
  return std::string(host).substr(0, 30) + " " + bus;
}

std::string ncclVersion(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const char* nameOf(uint8_t choice) {
  switch (static_cast<CudaPath>(choice)) {
    case CudaPath::kNccl: return "nccl";
    case CudaPath::kHost: return "host";
    default: return "auto";
  }
}

// Once in a process for each reason; not where the user has asked for that path.
void warnOfHostPath(const std::string& reason) {
  struct Warned {
    Mutex mutex;
    std::set<std::string> reasons GUARDED_BY(mutex);
  };
  static Warned* const kWarned = new Warned;
  {
    const MutexLock lock(kWarned->mutex);
    if (reason.empty() || !kWarned->reasons.insert(reason).second) return;
  }
  TORCH_WARN("mycoll carries device tensors through host memory: ", reason,
             ". MYCOLL_CUDA=nccl makes this an error.");
}

}  // namespace

// What each of two ranks tells the other, once, before its first message to it.
struct PathChoice::Note {
  DevicePath path = DevicePath::kUnknown;  // the group's, where this rank knows it already
  Report report;
};

PathChoice::Report PathChoice::report(c10::Device device) {
  Report report;
  report.choice = static_cast<uint8_t>(Env::process().cuda);
  const nccl::Library* library = nullptr;
  const Status status = findNccl(&library);
  if (status.ok()) {
    report.version = library->version();
    report.capability = static_cast<uint8_t>(nccl::Cudart::get().capability(device.index()));
    const std::string kernel = kernelIdentity();
    report.kernel = crc32c(kernel.data(), kernel.size());
    put(report.gpu, gpuOf(device, *library));
  } else {
    put(report.reason, status.message());
  }
  return report;
}

Status PathChoice::judge(const std::vector<Report>& reports, const std::vector<int>& ranks) {
  const Report& first = reports.front();
  for (size_t i = 1; i < reports.size(); ++i) {
    if (reports[i].choice == first.choice) continue;
    return Status(Code::kInvalidArgument,
                  "MYCOLL_CUDA differs: it is " + std::string(nameOf(first.choice)) + " on rank " +
                      std::to_string(ranks.front()) + " and " + nameOf(reports[i].choice) +
                      " on rank " + std::to_string(ranks[i]) + "; set it alike on all ranks");
  }
  const auto choice = static_cast<CudaPath>(first.choice);
  if (choice == CudaPath::kHost) return Status(Code::kUnsupported, "");
  std::string reason;
  for (size_t i = 0; i < reports.size() && reason.empty(); ++i) {
    const std::string rank = "rank " + std::to_string(ranks[i]);
    if (reports[i].version == 0) {
      reason = rank + " has no NCCL: " + reports[i].reason;
    } else if (reports[i].version != first.version) {
      reason = "NCCL differs: rank " + std::to_string(ranks.front()) + " has " +
               ncclVersion(first.version) + ", " + rank + " has " + ncclVersion(reports[i].version);
    }
    for (size_t j = 0; j < i && reason.empty(); ++j) {
      if (reports[i].gpu[0] == '\0' || reports[i].kernel != reports[j].kernel ||
          std::strcmp(reports[i].gpu, reports[j].gpu) != 0) {
        continue;
      }
      reason = "rank " + std::to_string(ranks[j]) + " and " + rank + " use the same GPU (" +
               reports[i].gpu +
               "), which NCCL refuses; give every rank one of its own, by "
               "torch.cuda.set_device(local_rank)";
    }
  }
  if (reason.empty()) return Status();
  return Status(choice == CudaPath::kNccl ? Code::kInvalidArgument : Code::kUnsupported, reason);
}

DevicePath PathChoice::conclude(const Status& judgement, bool warns) {
  if (judgement.ok()) return DevicePath::kNccl;
  if (judgement.code() != Code::kUnsupported) {
    const Status refusal = inGroup(place_.name, judgement);
    place_.control->fail(refusal);
    throwStatus(refusal);
  }
  if (warns) warnOfHostPath(judgement.message());
  return DevicePath::kHost;
}

void PathChoice::agree(c10::Device device, const std::string& caller) {
  if (known() != DevicePath::kUnknown) return;
  MutexLock lock(agreeMutex_);
  if (known() != DevicePath::kUnknown) return;
  const Status met = place_.control->meetNeighbours();
  if (!met.ok()) {
    throwStatus(met.withMessage(
        met.message() + onThisRank(place_.rank) + caller +
        ", the first of the group's operations on devices, for which all ranks meet"));
  }
  const auto ranks = static_cast<size_t>(place_.ranks);
  // Kept by the operation: a wait that a signal ends leaves it running.
  const auto kept = std::make_shared<std::vector<Report>>(ranks);
  std::vector<Report>& reports = *kept;
  Report& mine = reports[static_cast<size_t>(place_.rank)];
  mine = report(device);
  Call exchange;
  exchange.kind = OpKind::kAllGather;
  exchange.dtype = DType::kUInt8;
  exchange.in = {{&mine, sizeof(Report)}};
  for (auto& entry : reports) exchange.out.push_back({&entry, sizeof(entry)});
  throwIfFailed(place_.control->wait(
      place_.control->submit(std::move(exchange), kept, /*willWait=*/true), Deadline::never()));
  std::vector<int> everybody;
  int least = 0;
  for (int rank = 0; rank < place_.ranks; ++rank) {
    everybody.push_back(rank);
    const int theirs = reports[static_cast<size_t>(rank)].capability;
    if (theirs != 0) least = least == 0 ? theirs : std::min(least, theirs);
  }
  const DevicePath path = conclude(judge(reports, everybody), /*warns=*/place_.rank == 0);
  if (path == DevicePath::kNccl) capability_.store(least, std::memory_order_relaxed);
  path_.store(path, std::memory_order_release);
}

void PathChoice::adoptNccl(const PathChoice& parent) {
  MutexLock lock(agreeMutex_);
  capability_.store(parent.capability(), std::memory_order_relaxed);
  path_.store(DevicePath::kNccl, std::memory_order_release);
}

std::optional<DevicePath> PathChoice::knownWith(int peer) const {
  // All ranks were told so, or there is no other: alone NCCL's send would wait for its receive.
  if (Env::process().cuda == CudaPath::kHost || peer == place_.rank) return DevicePath::kHost;
  // There is nobody to ask; NCCL's path refuses it.
  if (peer == kAnySource) return known() == DevicePath::kHost ? known() : DevicePath::kNccl;
  MutexLock lock(mutex_);
  const auto found = withPeers_.find(peer);
  if (found == withPeers_.end()) return {};
  return found->second;
}

DevicePath PathChoice::agreeWith(c10::Device device, int peer) {
  if (const auto decided = knownWith(peer)) return *decided;
  const DevicePath path = exchangeWith(device, peer);
  MutexLock lock(mutex_);
  return withPeers_[peer] = path;
}

// Both ranks come to the same answer: the group's, if one of them knows it, else what fits the two.
DevicePath PathChoice::exchangeWith(c10::Device device, int peer) {
  Communicator& control = *place_.control;
  const auto mine = std::make_shared<Note>();
  mine->path = known();
  mine->report = report(device);
  const OpPtr sent = control.send({{mine.get(), sizeof(Note)}, peer, kPathTag, DType::kUInt8}, mine,
                                  /*willWait=*/false, kNoDeadline);
  if (mine->path != DevicePath::kUnknown) return mine->path;
  const auto theirs = std::make_shared<Note>();
  const OpPtr came = control.recv({{theirs.get(), sizeof(Note)}, peer, kPathTag, DType::kUInt8},
                                  theirs, /*willWait=*/true, kNoDeadline);
  for (const OpPtr& op : {came, sent}) {
    throwUnlessConnected(place_, control.wait(op, Deadline::never()));
  }
  if (theirs->path != DevicePath::kUnknown) return theirs->path;
  const bool isFirst = place_.rank < peer;
  return conclude(isFirst ? judge({mine->report, theirs->report}, {place_.rank, peer})
                          : judge({theirs->report, mine->report}, {peer, place_.rank}),
                  /*warns=*/isFirst);
}

}  // namespace mycoll
