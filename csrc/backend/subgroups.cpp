// Groups made of a group: split and shrunk.
#include <algorithm>
#include <utility>

#include "backend/errors.h"
#include "backend/mycoll_backend.h"

namespace mycoll {

c10::intrusive_ptr<MycollOptions> MycollBackend::optionsFrom(
    const CallSite& site, const c10::intrusive_ptr<c10d::Backend::Options>& opts) const {
  auto given = c10::dynamic_intrusive_pointer_cast<MycollOptions>(opts);
  if (opts && !given) {
    refuse(site, "pg_options must be a mycoll.Options, but they are of backend " + opts->backend);
  }
  return given;
}

std::vector<int64_t> MycollBackend::globalRanksOf(const std::vector<int>& ranks) const {
  std::vector<int64_t> global;
  for (const int rank : ranks) {
    global.push_back(globalRanks_.empty() ? rank : globalRanks_[static_cast<size_t>(rank)]);
  }
  return global;
}

c10::intrusive_ptr<c10d::Backend> MycollBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const CallSite site = enter("split_group");
  for (const int rank : ranks) checkRank(site, "split_ranks", rank);
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  const auto given = optionsFrom(site, opts);
  const std::string name = opts ? opts->group_name : groupName_ + ":split";

  std::lock_guard<std::mutex> lock(splitMutex_);
  const bool isKnown =
      lastSplit_ && lastSplit_->groupName_ == name && lastSplit_->communicator_->error().ok();
  if (!isKnown) {
    lastSplit_ = create(store, static_cast<int>(self - ranks.begin()),
                        static_cast<int>(ranks.size()), name, globalRanksOf(ranks),
                        c10::make_intrusive<MycollOptions>(given ? *given : *options_));
  }
  return lastSplit_;
}

c10::intrusive_ptr<c10d::Backend> MycollBackend::shrink(
    const std::vector<int64_t>& excluded, int flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  constexpr int kAbortFirst = 1;  // torch.distributed.SHRINK_ABORT
  const CallSite site = enter("shrink_group");
  std::vector<bool> isExcluded(static_cast<size_t>(size_));
  for (const int64_t rank : excluded) {
    checkRank(site, "ranks_to_exclude", rank);
    isExcluded[static_cast<size_t>(rank)] = true;
  }
  std::vector<int> members;
  std::string suffix = ":shrunk" + std::to_string(shrinks_.fetch_add(1)) + " to";
  for (int rank = 0; rank < size_; ++rank) {
    if (isExcluded[static_cast<size_t>(rank)]) continue;
    members.push_back(rank);
    suffix.append(" ").append(std::to_string(rank));
  }
  const auto given = optionsFrom(site, opts);
  if (isExcluded[static_cast<size_t>(rank_)]) refuse(site, "this rank is to be excluded itself");
  if (flags & kAbortFirst) abort();
  std::shared_ptr<Communicator> communicator;
  throwIfFailed(Communicator::shrink(*communicator_, suffix, members, &communicator));
  auto options = c10::make_intrusive<MycollOptions>(given ? *given : *options_);
  communicator->setTimeout(options->timeout);
  std::string name = groupName_ + suffix;
  std::shared_ptr<DeviceGroup> device = deviceGroupFor(name, communicator, options);
  const int rank = communicator->rank(), ranks = communicator->ranks();
  return c10::make_intrusive<MycollBackend>(rank, ranks, std::move(communicator), std::move(name),
                                            globalRanksOf(members), std::move(options),
                                            std::move(device));
}

}  // namespace mycoll
