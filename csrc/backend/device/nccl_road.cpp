#include "backend/device/nccl_road.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "backend/call_site.h"
#include "backend/device/copies.h"
#include "backend/errors.h"
#include "base/env.h"
#include "nccl/cudart.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

// Marks the note by which the lower rank of a pair tells NCCL's id, beside any tag of a user's.
constexpr uint64_t kPairTag = uint64_t{1} << 49;

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

std::string& wheelFile() {
  static std::string* const kFile = new std::string;
  return *kFile;
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

// Of a batch, one signature that differs where any of its calls does.
Signature signatureOf(const std::vector<Request*>& requests) {
  Signature all;
  bool isFirst = true;
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      const Signature one = call.signature();
      if (std::exchange(isFirst, false)) {
        all = one;
        continue;
      }
      all.bytes += one.bytes;
      uint64_t words[3];
      std::memcpy(words, &one, sizeof(words));
      for (const uint64_t word : words) {
        all.layout = (all.layout ^ word) * 0x9e3779b97f4a7c15u;
        all.layout ^= all.layout >> 29;
      }
    }
  }
  return all;
}

bool isPointToPoint(const Call& call) {
  return call.kind == OpKind::kSend || call.kind == OpKind::kRecv;
}

bool isPointToPoint(const std::vector<Request*>& requests) {
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      if (!isPointToPoint(call)) return false;
    }
  }
  return true;
}

}  // namespace

void setNcclWheelFile(std::string path) { wheelFile() = std::move(path); }

void useNccl(const std::string& path) {
  const nccl::Library* library = nullptr;
  throwIfFailed(nccl::Library::open(path, &library));
  nccl::Library::adopt(library);
}

// ---- whether to --------------------------------------------------------------------------------

NcclRoad::Report NcclRoad::report(c10::Device device) {
  Report report;
  const Env& env = Env::process();
  report.choice = static_cast<uint8_t>(env.cuda);
  const nccl::Library* library = nullptr;
  const Status status = nccl::Library::get(wheelFile(), &library);
  if (status.ok()) {
    report.version = library->version();
    put(report.gpu, gpuOf(device, *library));
  } else {
    put(report.reason, status.message());
  }
  return report;
}

Status NcclRoad::judge(const std::vector<Report>& reports, const std::vector<int>& ranks) {
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
      if (reports[i].gpu[0] == '\0' || std::strcmp(reports[i].gpu, reports[j].gpu) != 0) continue;
      reason = "rank " + std::to_string(ranks[j]) + " and " + rank + " use the same GPU (" +
               reports[i].gpu +
               "), which NCCL refuses; give every rank one of its own, by "
               "torch.cuda.set_device(local_rank)";
    }
  }
  if (reason.empty()) return Status();
  return Status(choice == CudaPath::kNccl ? Code::kInvalidArgument : Code::kUnsupported, reason);
}

// ---- communicators -----------------------------------------------------------------------------

NcclRoad::LinePtr NcclRoad::join(c10::Device device, int rank, int ranks, const std::string& name,
                                 const nccl::UniqueId& id) {
  const nccl::Library& library = *nccl::Library::loaded();
  nccl::CommunicatorOptions options;
  options.fillFrom(place_.options->nccl);
  options.fillFrom(Env::process().nccl);
  // Without it recent NCCLs start a thread for every operation. Connecting has its deadline either
  // way, and what hangs in NCCL is ended by the watchdog's abort.
  if (!options.isBlocking) options.isBlocking = true;
  options.bindDevice = [device] {
    c10::impl::VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
  };
  auto line = std::make_shared<Line>(
      Line{std::make_shared<nccl::Communicator>(library, rank, ranks, name, options),
           sideStream(device)});
  const auto check = [this]() -> Status {
    for (const auto& group : {place_.control, place_.cpu}) {
      Status status = group->error();
      if (!status.ok()) return status;
    }
    return isInterruptPending() ? Status(Code::kInterrupted, "interrupted by a signal") : Status();
  };
  const Status status =
      line->communicator->connect(id, Deadline::after(place_.options->timeout), check);
  if (!status.ok()) {
    // The first cause is the group's; where this rank is the first to know, it tells the others.
    place_.control->fail(status.code() == Code::kInterrupted
                             ? Status(Code::kAborted, "interrupted while NCCL connected")
                             : status);
    throwStatus(status);
  }
  return line;
}

// The group may have ended while NCCL connected.
NcclRoad::LinePtr NcclRoad::keepUnlessEnded(LinePtr line) {
  if (!isEnded_) return line;
  const Status ended(Code::kAborted, "the group has ended while NCCL connected");
  (void)line->communicator->abort(Deadline::after(std::chrono::seconds(1)), ended);
  throwStatus(ended);
}

NcclRoad::LinePtr NcclRoad::lineFor(c10::Device device) {
  if (LinePtr known = find(lines_, device.index())) return known;
  std::lock_guard<std::mutex> connecting(connectMutex_);
  if (LinePtr known = find(lines_, device.index())) return known;
  nccl::UniqueId id{};
  if (place_.rank == 0) {
    const Status made = nccl::Communicator::createId(*nccl::Library::loaded(), &id);
    if (!made.ok()) place_.control->fail(made);
    throwIfFailed(made);
  }
  Call tell;
  tell.kind = OpKind::kBroadcast;
  tell.dtype = DType::kUInt8;
  tell.root = 0;
  tell.out = {{&id, sizeof(id)}};
  throwIfFailed(place_.control->wait(
      place_.control->submit(std::move(tell), nullptr, /*willWait=*/true), Deadline::never()));
  LinePtr line = join(device, place_.rank, place_.ranks, place_.name, id);
  std::lock_guard<std::mutex> lock(mutex_);
  return lines_[device.index()] = keepUnlessEnded(std::move(line));
}

NcclRoad::LinePtr NcclRoad::pairFor(c10::Device device, int peer) {
  const std::pair<c10::DeviceIndex, int> key(device.index(), peer);
  if (LinePtr known = find(pairs_, key)) return known;
  std::lock_guard<std::mutex> connecting(connectMutex_);
  if (LinePtr known = find(pairs_, key)) return known;
  Communicator& control = *place_.control;
  nccl::UniqueId id{};
  const bool isLower = place_.rank < peer;
  if (isLower) throwIfFailed(nccl::Communicator::createId(*nccl::Library::loaded(), &id));
  const Span span{&id, sizeof(id)};
  const OpPtr told =
      isLower ? control.send(span, peer, kPairTag, DType::kUInt8, 0, nullptr, /*willWait=*/true)
              : control.recv(span, peer, kPairTag, DType::kUInt8, 0, nullptr, /*willWait=*/true);
  throwIfFailed(control.wait(told, Deadline::never()));
  const std::string name = place_.name + " " + std::to_string(std::min(place_.rank, peer)) + "-" +
                           std::to_string(std::max(place_.rank, peer));
  LinePtr line = join(device, isLower ? 0 : 1, 2, name, id);
  std::lock_guard<std::mutex> lock(mutex_);
  return pairs_[key] = keepUnlessEnded(std::move(line));
}

// ---- carrying ----------------------------------------------------------------------------------

void NcclRoad::enqueue(nccl::Issue& issue, const Request& request, void* stream) {
  for (const Call& call : request.calls) {
    nccl::Form form;
    form.isFlat = request.isFlat;
    Status status;
    if (call.kind == OpKind::kSend) {
      status = nccl::send(issue, call.in.front(), request.peer, stream);
    } else if (call.kind == OpKind::kRecv) {
      status = nccl::receive(issue, call.out.front(), request.peer, stream);
    } else {
      status = nccl::enqueue(issue, call, stream, form);
    }
    if (!status.ok()) return;  // issue.end() tells it
  }
}

DeviceOperationPtr NcclRoad::carry(DeviceGroup& group, const std::vector<Request*>& requests,
                                   bool isTimed, bool isBatch) {
  const Request& first = *requests.front();
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      if (isPointToPoint(call)) continue;
      const Status possible =
          nccl::check(*nccl::Library::loaded(), call, nccl::Form{request->isFlat, nullptr});
      if (!possible.ok()) refuse(request->site, possible.message());
    }
  }
  for (const Request* request : requests) {
    const bool isMessage = request->calls.front().kind == OpKind::kRecv;
    if (isMessage && request->peer == kAnySource) {
      refuse(request->site,
             "NCCL cannot receive from any rank: name the source, or set "
             "MYCOLL_CUDA=host");
    }
  }
  const bool isAlone = requests.size() == 1 && first.calls.size() == 1;
  const bool isMessage = isPointToPoint(requests);
  const LinePtr line =
      isMessage && !isBatch ? pairFor(first.device, first.peer) : lineFor(first.device);

  const c10::Stream caller = currentStream(first.device);
  const bool isCaptured = isCapturing(caller);
  const c10::Stream stream = first.async ? line->stream : caller;
  auto operation = std::make_shared<DeviceOperation>(first.site.function, caller);
  if (isMessage && isAlone) operation->setSource(first.peer);
  if (first.async) recordEvent(caller, false, isCaptured)->block(stream);
  if (isTimed) operation->setStarted(recordEvent(stream, true, isCaptured));

  Followed followed;
  {
    nccl::Issue issue(*line->communicator);
    if (!isMessage && !isCaptured) {
      // Before NCCL is called: what hangs in there has a deadline too. Under the issue's mutex, so
      // that the group's order is NCCL's.
      followed.external = std::make_shared<External>();
      followed.op = place_.control->submitExternal(signatureOf(requests), followed.external,
                                                   place_.timeoutOf(first));
      if (followed.op->done() && !followed.op->status().ok()) throwStatus(followed.op->status());
      if (const uint32_t site = callSiteOfCall()) followed.op->record().setSite(site);
      followed.operation = operation;
      group.follow(followed);
    }
    if (!isAlone && issue.status().ok()) (void)issue.group();
    for (const Request* request : requests) {
      if (issue.status().ok()) enqueue(issue, *request, stream.native_handle());
    }
    const Status status = issue.end();
    if (!status.ok()) {
      // Often the consequence of another rank's end: the engine may know the cause by now.
      const Status known = group.error();
      if (known.ok()) place_.control->fail(status);
      operation->fail(known.ok() ? status : known);
      throwStatus(known.ok() ? status : known);
    }
  }

  bool hasCopies = false;
  for (const Request* request : requests) hasCopies |= !request->copyBacks.empty();
  if (hasCopies) {
    const c10::StreamGuard guard(stream);
    for (const Request* request : requests) copyBackOnDevice(request->copyBacks);
  }
  operation->setEnqueued(stream, recordEvent(stream, isTimed, isCaptured));
  if (first.async) {
    std::vector<at::Tensor> kept;
    for (Request* request : requests) {
      for (at::Tensor& tensor : request->allTensors()) kept.push_back(std::move(tensor));
    }
    operation->keep(std::move(kept));
  }
  if (isMessage && !isCaptured) {
    followed.operation = operation;
    followed.isMessage = true;
    followed.ownsDeadline = true;
    followed.deadline = Deadline::after(place_.timeoutOf(first));
    const bool isSend = first.calls.front().kind == OpKind::kSend;
    followed.description =
        isAlone ? std::string(isSend ? "send to " : "recv from ") +
                      place_.control->describeRank(first.peer)
                : "a batch of " + std::to_string(requests.size()) + " sends and receives";
    group.follow(std::move(followed));
  }
  return operation;
}

// ---- watching and ending -----------------------------------------------------------------------

std::vector<NcclRoad::LinePtr> NcclRoad::open(bool isEnd) {
  std::vector<LinePtr> all;
  std::lock_guard<std::mutex> lock(mutex_);
  if (isEnded_) return all;
  isEnded_ = isEnd;
  for (const auto& [key, line] : pairs_) all.push_back(line);
  for (const auto& [index, line] : lines_) all.push_back(line);
  return all;
}

Status NcclRoad::check() {
  for (const LinePtr& line : open(false)) MYCOLL_RETURN_IF_ERROR(line->communicator->check());
  return Status();
}

void NcclRoad::abort(Deadline deadline, const Status& why) {
  for (const LinePtr& line : open(true)) (void)line->communicator->abort(deadline, why);
}

void NcclRoad::close(Deadline deadline) {
  for (const LinePtr& line : open(true)) (void)line->communicator->close(deadline);
}

void NcclRoad::addStreams(std::vector<c10::Stream>* streams) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [index, line] : lines_) streams->push_back(line->stream);
}

}  // namespace mycoll
