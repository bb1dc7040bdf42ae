// Turns a request into operations: of the engine, immediately or when callbacks have run, or of a
// device.
#include <ATen/record_function.h>

#include <utility>

#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// Cheap enough for every call.
bool isProfiling() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

// Consumes the request's calls.
MycollWork::Ops submit(Communicator& communicator, Request& request,
                       const std::shared_ptr<Kept>& kept) {
  const bool willWait = !request.async;
  MycollWork::Ops ops;
  if (request.composite) [[unlikely]] {
    ops.push_back(communicator.submitComposite(request.compositeKind, std::move(request.composite),
                                               kept, willWait, request.timeout));
  }
  for (Call& call : request.calls) {
    if (!request.isMessage()) {
      ops.push_back(communicator.submit(std::move(call), kept, willWait, request.timeout));
      continue;
    }
    const bool isSend = call.kind == OpKind::kSend;
    Message message{isSend ? call.in.front() : call.out.front(), request.peer, request.tag,
                    call.dtype, call.opaqueType};
    message.isTimedLater = true;
    ops.push_back(isSend ? communicator.send(message, kept, willWait, request.timeout)
                         : communicator.recv(message, kept, willWait, request.timeout));
  }
  if (request.place) [[unlikely]] {
    for (const OpPtr& op : ops) op->record().setSite(request.place);
  }
  return ops;
}

}  // namespace

// A group is shown with torch's name everywhere ("0" is the default group), and with its
// description if it has one; torch sets that some time after the group was made.
void MycollBackend::describeGroup(const UserCall& caller) {
  isDescribed_.store(true, std::memory_order_relaxed);
  std::string description = pg_desc_ == "undefined" ? std::string() : pg_desc_;
  if (shown_) {
    description +=
        (description.empty() ? "in the place of " : ", in the place of ") + shown_->backend;
  }
  caller.communicator()->record().describe(description);
}

MycollBackend::WorkPtr MycollBackend::run(Request& request, at::TensorList inputs,
                                          at::TensorList outputs) {
  if (!isDescribed_.load(std::memory_order_relaxed)) [[unlikely]] {
    describeGroup(request.caller);
  }
  if (isProfiling()) [[unlikely]] {
    request.isProfiled = true;
    request.given = inputs.vec();
    return runProfiled(request, outputs);
  }
  return launch(request, outputs);
}

void MycollBackend::awaitCallbacks(const Request& request) const {
  if (callbacks_->isIdle() || request.isMessage()) [[likely]]
    return;
  const Milliseconds timeout = timeoutOf(request);
  const CallbackOrder::Ptr order = CallbackOrder::here(callbacks_);
  throwUnlessIdle(order->pass(Deadline::after(timeout), isInterruptPending), describe(request),
                  timeout);
}

std::string MycollBackend::describe(const Request& request) const {
  return c10::str("mycoll group '", groupName_, "': ", request.caller.function);
}

MycollBackend::WorkPtr MycollBackend::launch(Request& request, at::TensorList outputs) {
  return withHooks(launchOnItsPath(request, outputs));
}

#if MYCOLL_TORCH_HAS_COMPLETION_HOOKS
// The key of a Work is its address: it is kept until the hooks have been called.
MycollBackend::WorkPtr MycollBackend::withHooks(WorkPtr work) const {
  if (!work || completionHooks_->isEmpty()) return work;
  const bool isTimed = isTimed_ && dynamic_cast<CoalescedWork*>(work.get()) == nullptr;
  callWhenOver(work, [hooks = completionHooks_, work = work.get(), isTimed](auto result) {
    if (result != c10d::WorkResult::SUCCESS) return;
    c10d::CompletionHookArgs over;
    over.completionKey = work->getCompletionKey();
    if (isTimed) over.duration_ms = work->getDuration();
    for (const auto& hook : hooks->all()) (*hook)(over);
  });
  return work;
}
#else
MycollBackend::WorkPtr MycollBackend::withHooks(WorkPtr work) const { return work; }
#endif

MycollBackend::WorkPtr MycollBackend::launchOnItsPath(Request& request, at::TensorList outputs) {
  if (extensions_->isAny()) [[unlikely]] {
    request.timeout = extensions_->extend(timeoutOf(request), &request.extension);
  }
  if (!request.device.is_cpu()) return launchOnDevice(request, outputs);
  request.place = callSiteOfCall();
  if (request.isMessage()) {
    if (Block* const block = openBlock()) {
      request.async = true;  // the block's Work waits for it
      block->messages.push_back({std::move(request), outputs.vec()});
      return nullptr;
    }
  } else if (!request.async) {
    awaitCallbacks(request);
  } else if (!callbacks_->isIdle()) [[unlikely]] {
    const CallbackOrder::Ptr order = CallbackOrder::here(callbacks_);
    if (order->isBlocked()) return hold(request, outputs, *order);
  }
  return launchNow(request, outputs);
}

MycollBackend::WorkPtr MycollBackend::launchNow(Request& request, at::TensorList outputs) {
  const auto kept = std::make_shared<Kept>(std::move(request.keep));
  MycollWork::Ops ops = submit(*request.caller.communicator(), request, kept);
  WorkPtr work = finishLaunch(request, outputs, std::move(ops));
  // If the operations are done by now, the caller drops their memory.
  if (!request.async || kept.use_count() == 1) kept->dropHere();
  return work;
}

MycollBackend::WorkPtr MycollBackend::hold(Request& request, at::TensorList outputs,
                                           CallbackOrder& order) {
  const auto communicator = generations_.kept(request.caller.communicator());
  auto work = makeWork(request, outputs, {}, describe(request));
  work->setEntry(
      order.hold([communicator, work, held = std::make_shared<Request>(std::move(request))] {
        const auto kept = std::make_shared<Kept>(std::move(held->keep));
        work->begin(submit(*communicator, *held, kept));
      }));
  return work;
}

MycollBackend::WorkPtr MycollBackend::launchOnDevice(Request& request, at::TensorList outputs) {
  if (!request.caller.generation.device) {
    refuse(request.caller, "there are tensors on ", request.device, ", but ", whyNoDevices());
  }
  // The operation is not held: whatever the program enqueues on its stream next must come after it.
  awaitCallbacks(request);
  if (Block* const block = openBlock()) {
    request.async = true;  // the block's Work waits for it
    block->onDevice.push_back({std::move(request), outputs.vec()});
    return nullptr;
  }
  Request* const one = &request;
  WorkPtr work = launchTogether({&one, 1}, outputs, /*isBatch=*/false);
  if (request.async) return work;
  if (work) work->wait();
  return nullptr;
}

MycollBackend::WorkPtr MycollBackend::launchTogether(Requests requests, at::TensorList outputs,
                                                     bool isBatch) {
  std::vector<std::shared_ptr<void>> extensions;
  for (Request* const request : requests) {
    if (request->extension) extensions.push_back(std::move(request->extension));
  }
  const bool isHooked = hook_->isSet();
  DeviceSupport::Extras extras;
  extras.isBatch = isBatch;
  extras.isTimed = isTimed_ || isHooked;
  extras.wantsWork = isHooked || !extensions.empty();
  const Request& first = *requests.front();
  if (isBatch || !first.isMessage()) extras.order = CallbackOrder::here(callbacks_);
  WorkPtr work = first.caller.generation.device->launch(requests, outputs, std::move(extras));
  if (isHooked) hook_->runAfter(work);
  // Holds them until then.
  if (!extensions.empty()) callWhenOver(work, [held = std::move(extensions)](auto) {});
  return work;
}

MycollBackend::WorkPtr MycollBackend::finishLaunch(Request& request, at::TensorList outputs,
                                                   MycollWork::Ops ops) {
  if (request.async || hook_->isSet()) {
    auto work = makeWork(request, outputs, std::move(ops));
    if (request.async) return work;
    work->wait();
    return nullptr;
  }
  const DropScope afterwards;
  for (const OpPtr& op : ops) {
    const Status status = request.caller.communicator()->wait(op, Deadline::never());
    if (!status.ok()) stayIfExiting();
    throwIfFailed(status);
  }
  for (const CopyBack& copy : request.copyBacks) copy.run();
  return nullptr;
}

c10::intrusive_ptr<MycollWork> MycollBackend::makeWork(Request& request, at::TensorList outputs,
                                                       MycollWork::Ops ops, std::string heldCall) {
  const bool isHooked = hook_->isSet();
  MycollWork::Traits traits;
  traits.isTimed = isTimed_ || isHooked;
  traits.timeout = timeoutOf(request);
  if (!request.isMessage()) traits.order = CallbackOrder::here(callbacks_);
  traits.heldCall = std::move(heldCall);
  if (request.isProfiled && request.async) traits.profilingTitle = titleOf(request);
  auto work =
      c10::make_intrusive<MycollWork>(generations_.kept(request.caller.communicator()), request,
                                      std::move(ops), outputs.vec(), std::move(traits));
  work->start();
  if (isHooked) hook_->runAfter(work);
  if (Block* const block = request.async ? openBlock() : nullptr) block->works.push_back(work);
  return work;
}

}  // namespace mycoll
