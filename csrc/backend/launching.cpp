// Turns a request into operations: of the engine, immediately or when callbacks have run, or of a
// device.
#include <ATen/record_function.h>

#include <utility>

#include "backend/call_site.h"
#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// Messages are matched by rank and tag, not by their order among the collectives.
bool isMessage(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
         type == c10d::OpType::RECVANYSOURCE;
}

// Cheap enough for every call.
bool isProfiling() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

// Consumes the request's calls.
MycollWork::Ops submit(Communicator& communicator, Request& request,
                       const std::shared_ptr<Kept>& kept, uint32_t site) {
  const std::chrono::milliseconds timeout =
      request.timeout > std::chrono::milliseconds(0) ? request.timeout : kGroupTimeout;
  MycollWork::Ops ops;
  if (request.composite) [[unlikely]] {
    ops.push_back(communicator.submitComposite(request.compositeKind, std::move(request.composite),
                                               kept, !request.async, timeout));
  }
  for (Call& call : request.calls) {
    if (call.kind == OpKind::kSend) {
      ops.push_back(communicator.send(
          {call.in.front(), request.peer, request.tag, call.dtype, call.opaqueType}, kept,
          !request.async, timeout));
    } else if (call.kind == OpKind::kRecv) {
      ops.push_back(communicator.recv(
          {call.out.front(), request.peer, request.tag, call.dtype, call.opaqueType}, kept,
          !request.async, timeout));
    } else {
      ops.push_back(communicator.submit(std::move(call), kept, !request.async, timeout));
    }
  }
  if (site) [[unlikely]] {
    for (const OpPtr& op : ops) op->record().setSite(site);
  }
  return ops;
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::run(Request& request, at::TensorList inputs,
                                          at::TensorList outputs) {
  if (!isDescribed_.load(std::memory_order_relaxed)) [[unlikely]] {
    // A group is shown with torch's name everywhere ("0" is the default group), and with its
    // description if it has one; torch sets that some time after the group was made.
    isDescribed_.store(true, std::memory_order_relaxed);
    std::string description = pg_desc_ == "undefined" ? std::string() : pg_desc_;
    if (shown_) {
      description +=
          (description.empty() ? "in the place of " : ", in the place of ") + shown_->backend;
    }
    communicator()->record().describe(description);
  }
  if (isProfiling()) [[unlikely]] {
    request.given = inputs;
    return runProfiled(request, outputs);
  }
  return launch(request, outputs, /*isProfiled=*/false);
}

void MycollBackend::awaitCallbacks(const Request& request, CallbackOrder& order) const {
  const Milliseconds timeout =
      request.timeout > Milliseconds(0) ? request.timeout : Milliseconds(timeout_.load());
  switch (order.pass(Deadline::after(timeout), isInterruptPending)) {
    case CallbackOrder::Outcome::kIdle: return;
    case CallbackOrder::Outcome::kInterrupted: throwStatus(interrupted());
    case CallbackOrder::Outcome::kTimeout: throwStatus(heldTooLong(describe(request), timeout));
  }
}

std::string MycollBackend::describe(const Request& request) const {
  return c10::str("mycoll group '", groupName_, "': ", request.site.function);
}

MycollBackend::WorkPtr MycollBackend::launch(Request& request, at::TensorList outputs,
                                             bool isProfiled) {
  if (!request.device.is_cpu()) return launchOnDevice(request, outputs);
  if (isMessage(request.type)) {
    if (isCoalescing()) {
      request.async = true;  // the block's Work waits for it
      coalescedMessages_.emplace_back(std::move(request), outputs, isProfiled, callSiteOfCall());
      return nullptr;
    }
  } else if (!callbacks_->isIdle()) [[unlikely]] {
    const CallbackOrder::Ptr order = CallbackOrder::here(callbacks_);
    if (order->isBlocked()) {
      if (request.async) {
        HeldOperation held = hold(request, outputs, isProfiled);
        held.work->setEntry(order->hold(std::move(held.begin)));
        return held.work;
      }
      awaitCallbacks(request, *order);
    }
  }
  return launchNow(request, outputs, isProfiled, callSiteOfCall());
}

MycollBackend::WorkPtr MycollBackend::launchNow(Request& request, at::TensorList outputs,
                                                bool isProfiled, uint32_t site) {
  const auto kept = std::make_shared<Kept>(std::move(request.keep));
  const std::shared_ptr<Communicator> communicator = this->communicator();
  MycollWork::Ops ops = submit(*communicator, request, kept, site);
  WorkPtr work = finishLaunch(*communicator, request, outputs, std::move(ops), isProfiled);
  // If the operations are done by now, the caller drops their memory.
  if (!request.async || kept.use_count() == 1) kept->dropHere();
  return work;
}

MycollBackend::HeldOperation MycollBackend::hold(Request& request, at::TensorList outputs,
                                                 bool isProfiled) {
  MycollWork::Extras extras = extrasOf(request, isProfiled);
  extras.heldCall = describe(request);
  const auto work = track(request, outputs, {}, std::move(extras));
  return {work, [communicator = keptCommunicator(), work, site = callSiteOfCall(),
                 held = std::make_shared<Request>(std::move(request))] {
            const auto kept = std::make_shared<Kept>(std::move(held->keep));
            work->begin(submit(*communicator, *held, kept, site));
          }};
}

MycollBackend::WorkPtr MycollBackend::launchOnDevice(Request& request, at::TensorList outputs) {
  const auto device = this->device();
  if (!device) {
    refuse(request.site,
           c10::str("there are tensors on ", request.device, ", but ", whyNoDevices()));
  }
  // The operation is not held: whatever the program enqueues on its stream next must come after it.
  const bool isOrdered = !isMessage(request.type);
  CallbackOrder::Ptr order = isOrdered ? CallbackOrder::here(callbacks_) : nullptr;
  if (order && order->isBlocked()) [[unlikely]] {
    awaitCallbacks(request, *order);
  }
  if (isCoalescing()) {
    device->addToBatch(std::move(request), outputs);
    return nullptr;
  }
  return device->launch(request, outputs, {isTimed_, hookFor(request.type), std::move(order)});
}

MycollBackend::WorkPtr MycollBackend::finishLaunch(Communicator& communicator, Request& request,
                                                   at::TensorList outputs, MycollWork::Ops ops,
                                                   bool isProfiled) {
  if (request.async) {
    return track(request, outputs, std::move(ops), extrasOf(request, isProfiled));
  }
  if (hasHook_.load(std::memory_order_relaxed)) [[unlikely]] {
    track(request, outputs, std::move(ops), extrasOf(request, isProfiled))->wait();
    return nullptr;
  }
  const DropScope afterwards;
  for (const OpPtr& op : ops) {
    const Status status = communicator.wait(op, Deadline::never());
    if (!status.ok()) stayIfExiting();
    throwIfFailed(status);
  }
  for (const CopyBack& copy : request.copyBacks) {
    unpack(static_cast<const char*>(copy.packed.const_data_ptr()) + copy.offsetBytes, copy.target);
  }
  return nullptr;
}

MycollWork::Extras MycollBackend::extrasOf(Request& request, bool isProfiled) {
  MycollWork::Extras extras;
  extras.copyBacks = std::move(request.copyBacks);
  extras.isTimed = isTimed_;
  extras.started = MycollWork::Clock::now();
  extras.timeout =
      request.timeout > Milliseconds(0) ? request.timeout : Milliseconds(timeout_.load());
  if (!isMessage(request.type)) extras.order = CallbackOrder::here(callbacks_);
  extras.hook = workHook();
  extras.perList = request.perList;
  if (isProfiled && request.async) {
    extras.profilingTitle = titleOf(request);
    extras.profiledInputs = request.given.vec();
  }
  return extras;
}

c10::intrusive_ptr<MycollWork> MycollBackend::track(const Request& request, at::TensorList outputs,
                                                    MycollWork::Ops ops,
                                                    MycollWork::Extras extras) {
  auto work = c10::make_intrusive<MycollWork>(keptCommunicator(), request.type, std::move(ops),
                                              outputs.vec(), std::move(extras));
  work->start();
  if (request.async && isCoalescing()) coalesced_.push_back(work);
  return work;
}

}  // namespace mycoll
