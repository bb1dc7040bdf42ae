// all_to_all, gather and scatter. Phase 0: the ranks of a host give the blocks that are sent
// together; 1: all messages between hosts, and those from rank to rank; 2: the ranks of a host get
// the blocks that were sent together.
#include "collectives/plan/planner.h"

namespace mycoll {
namespace {

class ExchangePlanner final : public Planner {
 public:
  using Planner::Planner;

  void exchange() {
    if (isMeant(rank_, rank_)) copy(0, incoming(rank_), outgoing(rank_));
    layOut();
    const int hosts = shape_.hosts();
    if (isShared_) give();
    // No two hosts begin with the same host, and no two ranks of a host with the same rank.
    for (int distance = 0; distance < hosts; ++distance) {
      receiveFrom((host_ - distance + hosts) % hosts);
    }
    for (int distance = 0; distance < hosts; ++distance) sendTo((host_ + distance) % hosts);
    if (isShared_) take();
  }

 private:
  // Whether there is a block for this pair.
  bool isMeant(int from, int to) const {
    return job_.kind == OpKind::kAllToAll ||
           (job_.kind == OpKind::kGather ? to : from) == job_.root;
  }
  bool isBetween(int from, int to) const {  // the same of hosts
    return job_.kind == OpKind::kAllToAll ||
           (job_.kind == OpKind::kGather ? to : from) == shape_.hostOf(job_.root);
  }
  Place outgoing(int to) const {
    const int block = job_.kind == OpKind::kGather ? 0 : to;
    return {Space::kInput, block, 0, job_.in[block]};
  }
  Place incoming(int from) const {
    const int block = job_.kind == OpKind::kScatter ? 0 : from;
    return {Space::kOutput, block, 0, job_.out[block]};
  }
  // The rank that sends and receives for a host what it exchanges with another one.
  int speaker(int host, int other) const {
    const std::vector<int>& members = shape_.membersOf(host);
    return members[static_cast<size_t>(other) % members.size()];
  }
  // For two ranks, one of which is on this host.
  uint64_t blockBytes(int from, int to) const {
    return shape_.hostOf(from) == host_ ? job_.rows[shape_.indexOf(from)].sends[to]
                                        : job_.rows[shape_.indexOf(to)].receives[from];
  }
  // The bytes of the one message from a host to another, sender by sender. It is never empty: a
  // host that sends its blocks separately announces that with an empty message, so that two hosts
  // that disagree about the sizes detect it.
  uint64_t togetherBytes(int from, int to) const {
    uint64_t bytes = job_.elementBytes;
    for (const int sender : shape_.membersOf(from)) {
      for (const int receiver : shape_.membersOf(to)) bytes += blockBytes(sender, receiver);
    }
    return bytes;
  }
  bool mayGoTogether(int from, int to) const {
    return isBetween(from, to) && goesByHost(shape_, job_.kind) && (from != to || isShared_) &&
           shape_.membersOf(from).size() + shape_.membersOf(to).size() > 2;
  }
  bool goesTogether(int from, int to) const {
    return !job_.rows.empty() && mayGoTogether(from, to) &&
           togetherBytes(from, to) <= mostTogether(shape_);
  }
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  // Sets where in its area each rank of this host gives its blocks for a host, one after the other,
  // and where the speaker for a host has what it received from there.
  void layOut() {
    const std::vector<int>& members = shape_.membersOf(host_);
    const auto hosts = static_cast<size_t>(shape_.hosts());
    givenAt_.assign(members.size(), std::vector<uint64_t>(hosts, kNowhere));
    cameAt_.assign(hosts, kNowhere);
    std::vector<uint64_t> used(members.size());
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (!goesTogether(host_, host)) continue;
      for (size_t i = 0; i < members.size(); ++i) {
        givenAt_[i][host] = used[i];
        if (host != host_ && members[i] == speaker(host_, host)) continue;  // needs no area for it
        for (const int to : shape_.membersOf(host)) used[i] += job_.rows[i].sends[to];
      }
    }
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (host == host_ || !goesTogether(host, host_)) continue;
      uint64_t& end = used[shape_.indexOf(speaker(host_, host))];
      cameAt_[host] = end;
      end += togetherBytes(host, host_);
    }
  }
  bool sendsTogether(int host) const { return givenAt_[0][host] != kNowhere; }
  bool receivesTogether(int host) const { return cameAt_[host] != kNowhere; }
  Place area(int rank, uint64_t begin, uint64_t bytes) const {
    return {Space::kShared, shape_.indexOf(rank), begin, bytes};
  }

  void give() {
    bool usesArea = false;
    for (int host = 0; host < shape_.hosts(); ++host) {
      usesArea |= sendsTogether(host) || receivesTogether(host);
    }
    if (usesArea) waitFor(0, Mark::kDone);
    for (int host = 0; host < shape_.hosts(); ++host) {
      const bool speaks = host != host_ && speaker(host_, host) == rank_;
      if (!sendsTogether(host) || speaks) continue;
      uint64_t at = givenAt_[shape_.indexOf(rank_)][host];
      for (const int to : shape_.membersOf(host)) {
        const uint64_t bytes = blockBytes(rank_, to);
        if (bytes > 0 && to != rank_) copy(0, area(rank_, at, bytes), outgoing(to));
        at += bytes;
      }
    }
    mark(0, Mark::kGiven);
    bool needsOthers = sendsTogether(host_);
    for (int host = 0; host < shape_.hosts(); ++host) {
      needsOthers |= sendsTogether(host) && speaker(host_, host) == rank_;
    }
    if (needsOthers) waitFor(1, Mark::kGiven);
  }

  void sendTo(int host) {
    if (host != host_ && sendsTogether(host)) return sendTogether(host);
    if (!isBetween(host_, host) || (host == host_ && sendsTogether(host))) return;
    const bool saysSo = host != host_ && mayGoTogether(host_, host);
    if (saysSo && speaker(host_, host) == rank_) send(1, speaker(host, host_), {});
    const std::vector<int>& members = shape_.membersOf(host);
    for (size_t i = 0; i < members.size(); ++i) {
      const int to = members[(shape_.indexOf(rank_) + i) % members.size()];
      if (to != rank_ && isMeant(rank_, to)) send(1, to, outgoing(to));
    }
  }

  void receiveFrom(int host) {
    if (host != host_ && receivesTogether(host)) return receiveTogether(host);
    if (!isBetween(host, host_) || (host == host_ && sendsTogether(host))) return;
    const bool saysSo = host != host_ && mayGoTogether(host, host_);
    if (saysSo && speaker(host_, host) == rank_) receive(1, speaker(host, host_), {});
    for (const int from : shape_.membersOf(host)) {
      if (from != rank_ && isMeant(from, rank_)) receive(1, from, incoming(from));
    }
  }

  void sendTogether(int host) {
    const int mine = speaker(host_, host);
    if (isShared_ && rank_ != mine) return;  // give() has copied its blocks
    Place message;
    if (rank_ == mine) message = scratch(togetherBytes(host_, host));
    uint64_t at = message.begin;
    for (const int from : shape_.membersOf(host_)) {
      uint64_t given = givenAt_[shape_.indexOf(from)][host];
      for (const int to : shape_.membersOf(host)) {
        const uint64_t bytes = blockBytes(from, to);
        if (bytes == 0) continue;
        const Place there{message.space, message.block, at, bytes};
        if (from == rank_ && rank_ == mine) copy(1, there, outgoing(to));
        if (from != rank_ && rank_ == mine) {
          isShared_ ? copy(1, there, area(from, given, bytes)) : receive(0, from, there);
        }
        if (from == rank_ && rank_ != mine) send(0, mine, outgoing(to));
        at += bytes, given += bytes;
      }
    }
    if (rank_ == mine) send(1, speaker(host, host_), message);
  }

  void receiveTogether(int host) {
    const int mine = speaker(host_, host);
    const uint64_t bytes = togetherBytes(host, host_);
    Place message = area(mine, cameAt_[host], bytes);
    if (!isShared_ && rank_ == mine) message = scratch(bytes);
    if (rank_ == mine) receive(1, speaker(host, host_), message);
    if (isShared_) return;  // take() copies the blocks
    uint64_t at = message.begin;
    for (const int from : shape_.membersOf(host)) {
      for (const int to : shape_.membersOf(host_)) {
        const uint64_t each = blockBytes(from, to);
        if (each == 0) continue;
        const Place there{message.space, message.block, at, each};
        if (to == rank_ && rank_ == mine) copy(2, incoming(from), there);
        if (to != rank_ && rank_ == mine) send(2, to, there);
        if (to == rank_ && rank_ != mine) receive(2, mine, incoming(from));
        at += each;
      }
    }
  }

  void take() {
    mark(2, Mark::kShared);
    bool isFromOthers = false;
    for (int host = 0; host < shape_.hosts(); ++host) {
      isFromOthers |= receivesTogether(host) && speaker(host_, host) != rank_;
    }
    if (isFromOthers) waitFor(2, Mark::kShared);
    for (int host = 0; host < shape_.hosts(); ++host) {
      if (host == host_ ? !sendsTogether(host) : !receivesTogether(host)) continue;
      uint64_t at = cameAt_[host];
      for (const int from : shape_.membersOf(host)) {
        if (host == host_) at = givenAt_[shape_.indexOf(from)][host];
        for (const int to : shape_.membersOf(host_)) {
          const uint64_t bytes = blockBytes(from, to);
          const int where = host == host_ ? from : speaker(host_, host);
          if (to == rank_ && from != rank_ && bytes > 0) {
            copy(2, incoming(from), area(where, at, bytes));
          }
          at += bytes;
        }
      }
    }
  }

  std::vector<std::vector<uint64_t>> givenAt_;  // by member of the host, by host
  std::vector<uint64_t> cameAt_;                // by host
};

}  // namespace

Plan planExchange(const PlanContext& context) {
  ExchangePlanner planner(context);
  planner.exchange();
  return planner.finish();
}

}  // namespace mycoll
