#include "device/path_choice.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "backend/errors.h"
#include "base/bytes.h"
#include "base/env.h"
#include "base/os.h"
#include "base/text.h"
#include "base/topology.h"
#include "device/channels.h"
#include "device/nccl_memory.h"
#include "nccl/cudart.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

// The tag of the messages of two ranks that agree on a path; users' tags are smaller.
constexpr uint64_t kPathTag = uint64_t{1} << 48;

bool isSet(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// "node1 0000:3b:00.0"; empty if it is unknown, or if the user has configured NCCL so that ranks
// may share it.
std::string gpuOf(c10::Device device, const nccl::Library& library) {
  if (isSet("NCCL_HOSTID")) return "";
  const bool knowsSharing = library.version() >= nccl::versionCode(2, 30, 3);
  if (knowsSharing && isSet("NCCL_MULTI_RANK_GPU_ENABLE")) return "";
  std::string bus;
  if (!nccl::Cudart::get().busId(device.index(), &bus)) return "";
  return hostName().substr(0, 30) + " " + bus;
}

const char* nameOf(uint8_t choice) {
  switch (static_cast<CudaPath>(choice)) {
    case CudaPath::kNccl: return "nccl";
    case CudaPath::kHost: return "host";
    default: return "auto";
  }
}

// Warns once in a process for each reason; not if the user has chosen this path.
void warnOfHostPath(const std::string& reason) {
  struct Warned {
    Mutex mutex;
    std::set<std::string> reasons GUARDED_BY(mutex);
  };
  {
    Warned& warned = perProcess<Warned>();
    const MutexLock lock(warned.mutex);
    if (reason.empty() || !warned.reasons.insert(reason).second) return;
  }
  TORCH_WARN("mycoll carries device tensors through host memory: ", reason,
             ". MYCOLL_CUDA=nccl makes this an error.");
}

// The properties of a rank that decide. Plain bytes, which ranks exchange.
struct Report {
  int32_t version = 0;     // of NCCL; 0: none, and `reason` says why
  uint8_t choice = 0;      // CudaPath
  uint8_t capability = 0;  // of the GPU: 90 for sm_90; 0: unknown
  uint32_t kernel = 0;     // hash that distinguishes machines of one name
  uint64_t host = 0;       // hash of the machine and its network namespace
  char gpu[48] = {};       // the GPU and its host; empty: unknown
  char reason[200] = {};
};

// Two ranks send each other a proposal once, before their first message.
struct Proposal {
  DevicePath path = DevicePath::kUnknown;  // the group's, if this rank knows it already
  Report report;
};

Report reportOf(c10::Device device) {
  Report report;
  report.choice = static_cast<uint8_t>(Env::process().cuda);
  report.host = fnv1a(hostIdentity());
  if (Env::process().cuda == CudaPath::kHost) return report;
  const nccl::Library* library = nullptr;
  const Status status = findNccl(&library);
  if (status.ok()) {
    report.version = library->version();
    report.capability = static_cast<uint8_t>(nccl::Cudart::get().capability(device.index()));
    report.kernel = static_cast<uint32_t>(fnv1a(kernelIdentity()));
    std::snprintf(report.gpu, sizeof(report.gpu), "%s", gpuOf(device, *library).c_str());
  } else {
    std::snprintf(report.reason, sizeof(report.reason), "%s", status.message().c_str());
  }
  return report;
}

// Returns ok if these ranks can use NCCL together; kUnsupported with the reason if they cannot, and
// host memory can replace it; another code if they must not continue, as MYCOLL_CUDA differs or
// requires NCCL.
Status checkNccl(const std::vector<Report>& reports, const std::vector<int>& ranks) {
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
               nccl::versionText(first.version) + ", " + rank + " has " +
               nccl::versionText(reports[i].version);
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
  const auto isElsewhere = [&](const Report& each) { return each.host != first.host; };
  if (Env::process().encrypts() && std::any_of(reports.begin(), reports.end(), isElsewhere)) {
    reason = "NCCL does not encrypt what it sends between hosts, as MYCOLL_ENCRYPT=1 asks for";
  }
  if (reason.empty()) return Status();
  return Status(choice == CudaPath::kNccl ? Code::kInvalidArgument : Code::kUnsupported, reason);
}

}  // namespace

DevicePath PathChoice::pathFor(const Status& checked, bool warns) {
  if (checked.ok()) return DevicePath::kNccl;
  if (checked.code() != Code::kUnsupported) throwUnlessConnected(place_, checked);
  if (warns) warnOfHostPath(checked.message());
  return DevicePath::kHost;
}

void PathChoice::agree(c10::Device device, const std::string& operation) {
  if (known() != DevicePath::kUnknown) return;
  MutexLock lock(agreeMutex_);
  if (known() != DevicePath::kUnknown) return;
  const Status met = place_.control->meetNeighbours();
  throwUnlessConnected(
      place_, met,
      onThisRank(place_.rank) + operation +
          ", the first of the group's operations on devices, for which all ranks meet");
  const auto ranks = static_cast<size_t>(place_.ranks);
  const auto kept = std::make_shared<std::vector<Report>>(ranks);
  std::vector<Report>& reports = *kept;
  Report& mine = reports[static_cast<size_t>(place_.rank)];
  mine = reportOf(device);
  Call exchange;
  exchange.kind = OpKind::kAllGather;
  exchange.dtype = DType::kUInt8;
  exchange.in = {{&mine, sizeof(Report)}};
  for (auto& entry : reports) exchange.out.push_back({&entry, sizeof(entry)});
  runOnControl(place_, std::move(exchange), kept);
  std::vector<int> all;
  int least = 0;
  for (int rank = 0; rank < place_.ranks; ++rank) {
    all.push_back(rank);
    const int theirs = reports[static_cast<size_t>(rank)].capability;
    if (theirs != 0) least = least == 0 ? theirs : std::min(least, theirs);
  }
  const DevicePath path = pathFor(checkNccl(reports, all), /*warns=*/place_.rank == 0);
  if (path == DevicePath::kNccl) capability_.store(least, std::memory_order_relaxed);
  path_.store(path, std::memory_order_release);
}

void PathChoice::adoptNccl(const PathChoice& parent) {
  MutexLock lock(agreeMutex_);
  capability_.store(parent.capability(), std::memory_order_relaxed);
  path_.store(DevicePath::kNccl, std::memory_order_release);
}

DevicePath PathChoice::ownPath() const {
  return Env::process().cuda == CudaPath::kHost ? DevicePath::kHost : known();
}

DevicePath PathChoice::knownWith(int peer) const {
  // To itself, where NCCL's send would wait forever.
  if (peer == place_.rank) return DevicePath::kHost;
  // NCCL's path refuses it.
  if (peer == kAnySource && ownPath() != DevicePath::kHost) return DevicePath::kNccl;
  MutexLock lock(mutex_);
  const auto found = withPeers_.find(peer);
  return found == withPeers_.end() ? DevicePath::kUnknown : found->second;
}

DevicePath PathChoice::agreeWith(c10::Device device, int peer) {
  DevicePath path = knownWith(peer);
  if (path != DevicePath::kUnknown) return path;
  if (peer == kAnySource) {  // each of them may be the sender, which waits for this rank's proposal
    path = DevicePath::kHost;
    for (int rank = 0; rank < place_.ranks; ++rank) (void)agreeWith(device, rank);
  } else {
    path = exchangeWith(device, peer);
  }
  MutexLock lock(mutex_);
  return withPeers_[peer] = path;
}

DevicePath PathChoice::exchangeWith(c10::Device device, int peer) {
  Communicator& control = *place_.control;
  const auto mine = std::make_shared<Proposal>();
  mine->path = known();
  mine->report = reportOf(device);
  const OpPtr sent =
      control.send({{mine.get(), sizeof(Proposal)}, peer, kPathTag, DType::kUInt8}, mine,
                   /*willWait=*/false, kNoDeadline);
  if (ownPath() != DevicePath::kUnknown) return ownPath();
  const auto theirs = std::make_shared<Proposal>();
  const OpPtr came = control.recv({{theirs.get(), sizeof(Proposal)}, peer, kPathTag, DType::kUInt8},
                                  theirs, /*willWait=*/true, kNoDeadline);
  for (const OpPtr& op : {came, sent}) {
    throwUnlessConnected(place_, control.wait(op, Deadline::never()));
  }
  if (theirs->path != DevicePath::kUnknown) return theirs->path;
  const bool isFirst = place_.rank < peer;
  return pathFor(isFirst ? checkNccl({mine->report, theirs->report}, {place_.rank, peer})
                         : checkNccl({theirs->report, mine->report}, {peer, place_.rank}),
                 /*warns=*/isFirst);
}

}  // namespace mycoll
