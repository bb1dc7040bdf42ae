#include "device/nccl_road.h"

#include <c10/core/StreamGuard.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "backend/call_site.h"
#include "backend/errors.h"
#include "base/crc32c.h"
#include "base/env.h"
#include "base/topology.h"
#include "device/copies.h"
#include "nccl/cudart.h"
#include "nccl/library.h"

namespace mycoll {
namespace {

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

// Of a batch, one signature that differs where any of its collectives does; its messages are
// between pairs of ranks.
Signature signatureOf(const std::vector<Request*>& requests) {
  Signature all;
  bool isFirst = true;
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      if (isPointToPoint(call)) continue;
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

std::string& wheelFile() {
  static std::string* const kFile = new std::string;
  return *kFile;
}

}  // namespace

bool isPointToPoint(const std::vector<Request*>& requests) {
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      if (!isPointToPoint(call)) return false;
    }
  }
  return true;
}

std::vector<ExternalMessage> messagesOf(const std::vector<Request*>& requests) {
  std::vector<ExternalMessage> messages;
  for (const Request* request : requests) {
    for (const Call& call : request->calls) {
      if (!isPointToPoint(call)) continue;
      ExternalMessage message;
      message.peer = request->peer;
      message.isSend = call.kind == OpKind::kSend;
      message.dtype = call.dtype;
      message.opaqueType = call.opaqueType;
      message.bytes = (message.isSend ? call.in : call.out).front().bytes;
      message.tag = request->tag;
      messages.push_back(message);
    }
  }
  return messages;
}

void setNcclWheelFile(std::string path) {
  if (wheelFile().empty()) wheelFile() = std::move(path);
}

void requireNccl(const nccl::Library** library) {
  throwIfFailed(nccl::Library::get(wheelFile(), library));
}

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
    report.capability = static_cast<uint8_t>(nccl::Cudart::get().capability(device.index()));
    const std::string kernel = kernelIdentity();
    report.kernel = crc32c(kernel.data(), kernel.size());
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

void NcclRoad::setCapability(const std::vector<Report>& reports) {
  int least = 0;
  for (const Report& report : reports) {
    if (report.capability == 0) continue;
    least = least == 0 ? report.capability : std::min<int>(least, report.capability);
  }
  capability_.store(least, std::memory_order_relaxed);
}

// ---- carrying ----------------------------------------------------------------------------------

nccl::Form NcclRoad::formOf(const Request& request) const {
  nccl::Form form;
  form.isFlat = request.isFlat();
  form.capability = capability_.load(std::memory_order_relaxed);
  return form;
}

void NcclRoad::enqueue(nccl::Issue& issue, const Request& request, int peer, void* stream) {
  for (const Call& call : request.calls) {
    Status status;
    if (call.kind == OpKind::kSend) {
      status = nccl::send(issue, call.in.front(), peer, stream);
    } else if (call.kind == OpKind::kRecv) {
      status = nccl::receive(issue, call.out.front(), peer, stream);
    } else {
      status = nccl::enqueue(issue, call, stream, formOf(request));
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
      const Status possible = nccl::check(*nccl::Library::loaded(), call, formOf(*request));
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
  const bool isOfPair = isMessage && !isBatch;
  const LinePtr line = isOfPair ? pairFor(first.device, first.peer) : lineFor(first.device);

  const c10::Stream caller = currentStream(first.device);
  const bool isCaptured = isCapturing(caller);
  const c10::Stream stream = first.async ? line->stream : caller;
  auto operation = std::make_shared<DeviceOperation>(first.site.function, caller);
  operation->setCaptured(isCaptured);
  if (isMessage && isAlone) operation->setSource(first.peer);
  if (first.async) {
    recordEvent(caller, false, isCaptured)->block(stream);
  }
  if (isTimed) operation->setStarted(recordEvent(stream, true, isCaptured));
  if (!first.async) operation->setTaken();

  std::vector<ExternalMessage> messages = messagesOf(requests);
  // The operation is followed before NCCL is called: what hangs in there has a deadline too.
  if (isCaptured) {
    group.followCaptured(stream);
  } else if (isMessage) {
    group.followMessages(operation,
                         {std::move(messages), place_.timeoutOf(first), callSiteOfCall()});
  }
  // Nobody waits for the end of what did not begin.
  struct FailUnlessEnqueued {
    ~FailUnlessEnqueued() {
      if (!operation.isEnqueued()) operation.fail(Status(Code::kInternal, "it was not enqueued"));
    }
    DeviceOperation& operation;
  };
  const FailUnlessEnqueued failing{*operation};
  {
    nccl::Issue issue(*line->communicator);
    // Under the issue's mutex, so that the group's order is NCCL's.
    if (!isMessage && !isCaptured) {
      Followed followed;
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
      if (!issue.status().ok()) break;
      const int peer = isOfPair ? (place_.rank < request->peer ? 1 : 0) : request->peer;
      enqueue(issue, *request, peer, stream.native_handle());
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
  return operation;
}

// ---- watching and ending -----------------------------------------------------------------------

std::vector<NcclRoad::LinePtr> NcclRoad::open(bool isEnd) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (isEnded_) return {};
  isEnded_ = isEnd;
  return all();
}

std::vector<NcclRoad::LinePtr> NcclRoad::all() const {
  std::vector<LinePtr> found;
  for (const auto& [key, line] : pairs_) found.push_back(line);
  for (const auto& [index, line] : lines_) found.push_back(line);
  return found;
}

Status NcclRoad::check() {
  for (const LinePtr& line : open(false)) MYCOLL_RETURN_IF_ERROR(line->communicator->check());
  return Status();
}

// All at once: one communicator's abort may wait for what another one has running.
void NcclRoad::beginAbort(const Status& why) {
  for (const LinePtr& line : open(true)) line->communicator->beginAbort(why);
}

void NcclRoad::abort(Deadline deadline, const Status& why) {
  beginAbort(why);
  std::unique_lock<std::mutex> lock(mutex_);
  const std::vector<LinePtr> lines = all();
  lock.unlock();
  for (const LinePtr& line : lines) (void)line->communicator->abort(deadline, why);
}

Status NcclRoad::close(Deadline deadline) {
  Status first;
  for (const LinePtr& line : open(true)) {
    const Status closed = line->communicator->close(deadline);
    if (first.ok()) first = closed;
  }
  return first;
}

void NcclRoad::addStreams(std::vector<c10::Stream>* streams) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [index, line] : lines_) streams->push_back(line->stream);
}

}  // namespace mycoll
