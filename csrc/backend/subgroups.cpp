// Makes groups from other groups: split, shrink and merge.
#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {

MycollBackend::Children& MycollBackend::childrenOf(const UserCall& caller) {
  const auto& parent = caller.generation.communicator;
  const uint64_t context = parent ? parent->context() : 0;
  if (children_.parent != context) children_ = {};
  children_.parent = context;
  return children_;
}

// torch passes one backend's options to all backends of a group: from another backend's options,
// this one takes only the fields that all have.
c10::intrusive_ptr<MycollOptions> MycollBackend::childOptions(const OptionsPtr& opts) const {
  auto options = generations_.options();
  if (const auto* const given = dynamic_cast<const MycollOptions*>(opts.get())) {
    options = c10::make_intrusive<MycollOptions>(*given);
  } else if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
#if MYCOLL_TORCH_HAS_RECONFIGURE
  options->enable_reconfigure = false;
#endif
  return options;
}

std::vector<int64_t> MycollBackend::globalRanksOf(const std::vector<int>& ranks) const {
  std::vector<int64_t> global;
  for (const int rank : ranks) {
    global.push_back(globalRanks_.empty() ? rank : globalRanks_[static_cast<size_t>(rank)]);
  }
  return global;
}

c10::intrusive_ptr<MycollBackend> MycollBackend::childOf(const UserCall& caller,
                                                         const std::vector<int>& members,
                                                         const std::string& suffix,
                                                         std::string name, const OptionsPtr& opts) {
  auto options = childOptions(opts);
  const std::shared_ptr<Communicator>& parent = caller.communicator();
  Identity identity{std::move(name), globalRanksOf(members), parent->options().isOfJob, {}};
  if (shown_ && opts && opts->backend == shown_->backend) identity.shown = opts;
  checkTimeout(caller, options->timeout);
  std::shared_ptr<Communicator> communicator;
  throwIfNotFormed(Communicator::shrink(*parent, suffix, members, &communicator));
  return c10::make_intrusive<MycollBackend>(communicator, std::move(identity), std::move(options),
                                            generations_.makeDevice());
}

// The members know each other, and need no store: torch names it differently for the members of one
// split if they have been in different splits before.
c10::intrusive_ptr<c10d::Backend> MycollBackend::split(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
    const OptionsPtr& opts) {
  const UserCall caller = enter("split_group");
  std::string suffix;
  for (const int rank : ranks) {
    checkRank(caller, "split_ranks", rank);
    suffix.append(" ").append(std::to_string(rank));
  }
  if (std::find(ranks.begin(), ranks.end(), caller.rank) == ranks.end()) return nullptr;
  std::string name = opts ? opts->group_name : groupName_ + ":split";

  MutexLock lock(childMutex_);
  Children& children = childrenOf(caller);
  const bool isKnown = children.lastSplit && children.lastSplit->groupName_ == name &&
                       children.lastSplit->generations_.current().error().ok();
  if (!isKnown) {
    const int before = children.splits[ranks]++;
    suffix = ":split" + std::to_string(before) + " to" + suffix;
    children.lastSplit = childOf(caller, ranks, suffix, std::move(name), opts);
  }
  return children.lastSplit;
}

c10::intrusive_ptr<c10d::Backend> MycollBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const OptionsPtr& opts, const int& rank,
                                                       const int& size) {
  const UserCall caller = enter("merge_remote_group");
  std::string name = opts && !opts->group_name.empty() ? opts->group_name : groupName_ + ":merged";

  MutexLock lock(childMutex_);
  Children& children = childrenOf(caller);
  // A store serves one merge; torch calls once for each device.
  if (!children.lastMerged || children.lastMergedBy != store) {
    children.lastMerged =
        create(store, rank, size, Identity{std::move(name), {}, /*isOfJob=*/false, {}},
               childOptions(opts), generations_.makeDevice());
    children.lastMergedBy = store;
  }
  return children.lastMerged;
}

void MycollBackend::splitDevices(MycollBackend* child, bool isWilling) {
  const auto device = enter("split_group").generation.device;
  if (!device) return;
  const auto ofChild = child ? child->generations_.current().device : nullptr;
  if (!ofChild) return device->split(nullptr, 0, isWilling);
  const std::vector<int64_t>& members = child->globalRanks_;
  // No other child has this rank.
  const auto color = static_cast<int>(*std::min_element(members.begin(), members.end()));
  device->split(ofChild.get(), color, isWilling);
}

c10::intrusive_ptr<c10d::Backend> MycollBackend::shrink(const std::vector<int64_t>& excluded,
                                                        int flags, const OptionsPtr& opts) {
  constexpr int kAbortFirst = 1;  // torch.distributed.SHRINK_ABORT
  const UserCall caller = enter("shrink_group");
  std::vector<bool> isExcluded(static_cast<size_t>(caller.ranks));
  for (const int64_t rank : excluded) {
    checkRank(caller, "ranks_to_exclude", rank);
    isExcluded[static_cast<size_t>(rank)] = true;
  }
  MutexLock lock(childMutex_);
  const int before = childrenOf(caller).shrinks++;
  lock.unlock();
  std::vector<int> members;
  std::string suffix = ":shrunk" + std::to_string(before) + " to";
  for (int rank = 0; rank < caller.ranks; ++rank) {
    if (isExcluded[static_cast<size_t>(rank)]) continue;
    members.push_back(rank);
    suffix.append(" ").append(std::to_string(rank));
  }
  if (isExcluded[static_cast<size_t>(caller.rank)])
    refuse(caller, "this rank is to be excluded itself");
  if (flags & kAbortFirst) abort();
  return childOf(caller, members, suffix, groupName_ + suffix, opts);
}

}  // namespace mycoll
