// MycollBackend: the class that torch.distributed calls for a group. It checks a call, translates
// it for the engine, and either waits for it (synchronous calls) or returns a Work.
//
//   mycoll_backend.cpp  makes, closes and aborts a group; answers torch's queries about it
//   reductions.cpp gathers.cpp scatters.cpp point_to_point.cpp sparse.cpp  the operations
//   operators.cpp       the same as torch operators, without a Work
//   launching.cpp       turns a Request into operations of the engine; profiling.cpp: with profiler
//   coalescing.cpp      many calls in one Work
//   subgroups.cpp       split, merge and shrink
//   window.h            one-sided windows
//
// generations.h says what a group's ranks are: those of a group that was made with
// enable_reconfigure change.
//
// Thread contract: [any thread], never with the GIL held. Between startCoalescing() and
// endCoalescing() the calls of that one thread belong together: operations on devices, and
// messages, are launched at the end, and not at all if an exception ends the block.
// Lifetime: a forked child cannot use its parent's groups: calls are refused there, and shutdown()
// does nothing. Works may outlive the backend.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/completion_hook.h"
#include "backend/generations.h"
#include "backend/hook_table.h"
#include "backend/owning_process.h"
#include "backend/request.h"
#include "backend/timeout_extensions.h"
#include "backend/torch_version.h"
#include "backend/work.h"
#include "base/mutex.h"

namespace mycoll {

class MycollBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using Milliseconds = std::chrono::milliseconds;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

  struct Identity {
    std::string name;  // the same on all ranks
    // The job's rank of each member; empty if the group is the whole job, or no part of it.
    std::vector<int64_t> globalRanks;
    bool isOfJob = true;  // as GroupOptions::isOfJob
    // Options of the backend that this one replaces: torch and the program see these, and this
    // backend takes its name from them. Null: it replaces none.
    OptionsPtr shown;
  };

  // Meets the other ranks; returns when all have arrived. makeDevice: empty if this process has no
  // accelerator.
  static c10::intrusive_ptr<MycollBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size, Identity identity,
                                                  c10::intrusive_ptr<MycollOptions> options,
                                                  DeviceFactory makeDevice);
  // What all groups have in common: name, place and timeout, and the callbacks into Python.
  static GroupOptions groupOptions(const std::string& name, int rank, int size,
                                   Milliseconds timeout);
  // For create(), and c10::make_intrusive. communicator: null if there is an endpoint.
  MycollBackend(int rank, int size, std::shared_ptr<Communicator> communicator, Identity identity,
                c10::intrusive_ptr<MycollOptions> options, DeviceFactory makeDevice,
                std::unique_ptr<Endpoint> endpoint = nullptr);
  MycollBackend(const std::shared_ptr<Communicator>& communicator, Identity identity,
                c10::intrusive_ptr<MycollOptions> options, DeviceFactory makeDevice)
      : MycollBackend(communicator->rank(), communicator->ranks(), communicator,
                      std::move(identity), std::move(options), std::move(makeDevice)) {}
  ~MycollBackend() override;

  // Closes all groups of the process, within the timeout in total, for the interpreter's exit. The
  // reason is sent to the other ranks; it may be empty.
  static void closeAll(Milliseconds timeout, const std::string& reason);

  // "shm", "tcp", "shm+tcp" or "self".
  std::string transport() const { return callOf("transport").communicator()->transport(); }
  std::string encryption() const { return callOf("encryption").communicator()->encryption(); }
  // What handles tensors on devices; null: nothing does. For `function` of the program.
  std::shared_ptr<DeviceSupport> device(const char* function) const {
    return enter(function).generation.device;
  }
  int64_t ncclComm() const;
  // The options of this group, with its present timeout: a copy, unless another backend's options
  // are shown.
  OptionsPtr options() const { return shown_ ? shown_ : OptionsPtr(generations_.options()); }
  // A shrunk group has the same name on all of its ranks; torch's own name for it may differ.
  const std::string& groupName() const { return groupName_; }
  // The same on all ranks, and another one after each reconfigure().
  std::string nameOfRanks() const { return callOf("_name").communicator()->options().name; }

  const std::string getBackendName() const override {
    return shown_ ? shown_->backend : kBackendName;
  }
  OptionsPtr getBackendOptions() override { return options(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  // Sums x into another tensor of x's shape and type. Synchronous.
  void allReduceInto(const at::Tensor& sum, const at::Tensor& x);
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // False in place of another backend: programs may expect a Work for each call, as there.
  bool supportsCoalescing() const override { return shown_ == nullptr; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // Replaces endCoalescing() after an exception. Does nothing if this thread has no open block.
  void dropCoalescing();

  // The engine numbers collectives by itself, from 0 on every rank.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  void setTimeout(Milliseconds timeout) override;
#if MYCOLL_TORCH_HAS_EPHEMERAL_TIMEOUT
  void addEphemeralTimeout(const Milliseconds& timeout) override;
#endif
  c10d::ErrorType getError() override;
  void abort() override;
  // For a group that another one replaces: as abort(). Then its ranks may be connected to again,
  // even if the caller keeps this object.
  void discard();
  void shutdown() override;

  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;

  // Returns a group of some of this group's ranks; null on the others. torch calls it once for each
  // device that the group serves, and gets the same backend for the same name.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const OptionsPtr& opts) override;
  // Ranks that may not know each other meet in the store; for torch's merge_remote_group().
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const OptionsPtr& opts, const int& rank,
                                          const int& size) override;
  // Called on all ranks of this group, after some of them have made a child by split(): gives the
  // child a part of NCCL's communicator, if there is one. child: null if this rank is in none;
  // isWilling: whether that is as it should be.
  void splitDevices(MycollBackend* child, bool isWilling);
  // Returns the group of the remaining ranks, all of which call it; for torch's shrink_group().
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                           const OptionsPtr& opts) override;
  // One-sided windows: see window.h.
  bool supportsWindow() const MYCOLL_TORCH_WINDOW_OVERRIDE { return true; }
  c10::intrusive_ptr<TorchWindow> new_window(const std::optional<at::Tensor>& tensor = std::nullopt)
      MYCOLL_TORCH_WINDOW_OVERRIDE;
  // For torch's device_id. All other connections are made when first needed.
  void eagerConnectSingleDevice(at::Device device) override;
#if MYCOLL_TORCH_HAS_IS_INITIALIZED
  bool isInitialized() override { return generations_.current().communicator != nullptr; }
#endif

#if MYCOLL_TORCH_HAS_ABORT_HOOKS
#if MYCOLL_TORCH_HAS_ABORT_HOOK_QUERY
  bool supportsAbortHooks() const override { return true; }
#endif
  // Hooks run on threads of the pool when the group has failed, other than by abort(). A group with
  // tensors on devices may call them more than once.
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    enter("register_abort_hook");
    generations_.abortHooks().add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override {
    enter("unregister_abort_hook");
    generations_.abortHooks().remove(id);
  }
#endif

#if MYCOLL_TORCH_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  // Hooks run on threads of the pool, for each Work of an operation that has succeeded.
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    enter("register_completion_hook");
    completionHooks_->add(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override {
    enter("unregister_completion_hook");
    completionHooks_->remove(id);
  }
#endif

#if MYCOLL_TORCH_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return generations_.endpoint() != nullptr; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Called by the ranks of the next generation, and no others. Returns when all have called it. If
  // it fails, this generation remains usable, unless that has failed already.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  // Waits until the callbacks of earlier futures have run: see CallbackOrder.
  void awaitCallbacks(const Request& request) const;

 private:
  friend class MycollWindow;

  // Throws in a forked child. Otherwise returns a description of the call, which runs in the
  // current generation; in a block of coalesced calls, in the one in which the block began.
  UserCall enter(const char* function) const;
  UserCall callOf(const char* function) const { return callOf(function, generations_.pinned()); }
  UserCall callOf(const char* function, Generation generation) const {
    const int rank = generation.rank, ranks = generation.ranks;
    return {{function, rank, ranks, &groupName_}, std::move(generation), this};
  }
  bool isForked() const { return !owner_.isHere(); }

  // The options of a group that is made from ranks of this one. opts: torch's, or null.
  c10::intrusive_ptr<MycollOptions> childOptions(const OptionsPtr& opts) const;
  std::vector<int64_t> globalRanksOf(const std::vector<int>& ranks) const;
  // Returns when all members have called it, with the same suffix: see Communicator::shrink().
  c10::intrusive_ptr<MycollBackend> childOf(const UserCall& caller, const std::vector<int>& members,
                                            const std::string& suffix, std::string name,
                                            const OptionsPtr& opts);
  // Submits the calls, and waits for them unless the request is asynchronous; to torch, a null Work
  // means "done". inputs: for the profiler. outputs: the value of Work.result() and of its future.
  WorkPtr run(Request& request, at::TensorList inputs, at::TensorList outputs);
  void describeGroup(const UserCall& caller);
  WorkPtr runProfiled(Request& request, at::TensorList outputs);
  std::string titleOf(const Request& request) const;
  WorkPtr launch(Request& request, at::TensorList outputs);
  WorkPtr launchOnItsPath(Request& request, at::TensorList outputs);
  // Returns the Work, and calls the completion hooks when it is over.
  WorkPtr withHooks(WorkPtr work) const;
  WorkPtr launchOnDevice(Request& request, at::TensorList outputs);
  // isBatch: see DeviceSupport::Extras.
  WorkPtr launchTogether(Requests requests, at::TensorList outputs, bool isBatch);
  WorkPtr launchNow(Request& request, at::TensorList outputs);
  WorkPtr finishLaunch(Request& request, at::TensorList outputs, MycollWork::Ops ops);
  // For an asynchronous collective: submits it when the callbacks before it have run.
  WorkPtr hold(Request& request, at::TensorList outputs, CallbackOrder& order);
  // heldCall: see MycollWork::Traits.
  c10::intrusive_ptr<MycollWork> makeWork(Request& request, at::TensorList outputs,
                                          MycollWork::Ops ops, std::string heldCall = {});
  std::string describe(const Request& request) const;
  Milliseconds timeoutOf(const Request& request) const {
    return request.timeout > Milliseconds(0) ? request.timeout : generations_.timeout();
  }

  const std::string groupName_;
  const std::vector<int64_t> globalRanks_;
  const OptionsPtr shown_;  // see Identity; may be null
  Mutex shownMutex_;        // for its timeout
  Generations generations_;
  const std::shared_ptr<CallbackOrder> callbacks_ = std::make_shared<CallbackOrder>();
  const std::shared_ptr<CompletionHook> hook_;
#if MYCOLL_TORCH_HAS_COMPLETION_HOOKS
  using CompletionHooks = HookTable<const c10d::CompletionHookArgs&>;
  const std::shared_ptr<CompletionHooks> completionHooks_ = std::make_shared<CompletionHooks>();
#endif
  const std::shared_ptr<TimeoutExtensions> extensions_ = std::make_shared<TimeoutExtensions>();
  const OwningProcess owner_;
  // True if this is the job's own group, and rank 0 serves its store, which ends with the group: a
  // rank that returns from destroy_process_group() earlier, and makes a new group immediately,
  // would still find the old store, which is about to close.
  bool outstaysStore_ = false;
  std::atomic<bool> isTimed_{false};
  std::atomic<bool> isDescribed_{false};  // to the record of the group

  // Between startCoalescing() and endCoalescing(). Each thread has its own: callbacks run while the
  // program's thread is in a block.
  struct Block {
    Generation generation;
    std::vector<WorkPtr> works;
    // These begin at the end of the block.
    std::vector<Coalesced> messages;
    std::vector<Coalesced> onDevice;
  };
  using Blocks = std::map<std::weak_ptr<CallbackOrder>, Block, std::owner_less<>>;
  static Blocks& blocksOfThread();
  // This thread's, or null.
  Block* openBlock() const;
  std::atomic<int> openBlocks_{0};  // in all threads

  // The groups that were made from a generation.
  struct Children {
    uint64_t parent = 0;                     // context of the generation's communicator
    std::map<std::vector<int>, int> splits;  // how often each list of members was split off
    int shrinks = 0;                         // how often shrink() was called
    // The last groups made, kept because torch asks for them again for the next device. Weak
    // pointers would not do: c10's prevent the object from being destroyed.
    c10::intrusive_ptr<MycollBackend> lastSplit;
    c10::intrusive_ptr<MycollBackend> lastMerged;
    c10::intrusive_ptr<c10d::Store> lastMergedBy;
  };
  Mutex childMutex_;
  Children children_ GUARDED_BY(childMutex_);
  // All ranks of a new generation begin to count anew.
  Children& childrenOf(const UserCall& caller) REQUIRES(childMutex_);
};

}  // namespace mycoll
