// PeerMemory: how a rank reads the tensors of the other ranks of its host, without staging memory.
// There are two ways:
//   - it maps the regions of their shared tensors (SharedHeap);
//   - it reads any memory of their processes through the kernel (SingleCopy).
//
// A rank that offers its tensors publishes their locations with its arrival: a list of SharedSpan.
// Each algorithm defines the meaning of the list. All ranks see the same offers, so all know what
// is new to them, and prepare for it before the collective begins again:
//
//   a region          owner   its size, descriptor, to each ->
//                     others                                    (map it)
//                     all                                                 arrive: which are mapped
//   the processes     all     arrive: an address   (read there)           arrive: is all readable?
//   a kind and size   all     make the call both ways: shmMeasure()
//
// A region is read if all ranks have mapped it. If one of them could not, the region is not offered
// for a while, and its tensors go through the arena, like any others. Processes are read if each
// rank could read all others.
//
// No rank writes to another rank's memory. So a rank whose call has failed may use its tensors
// immediately, whatever the others are doing: those that have read them check afterwards that the
// group had not failed (ReadInTime).
//
// Thread contract: as Arena: the thread that holds the run lock.
// Lifetime: that of the group.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/deadline.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/task.h"
#include "base/types.h"
#include "collectives/shm/arena.h"
#include "transport/shm/segment.h"
#include "transport/shm/single_copy.h"

namespace mycoll {

struct PeerAddress;
struct ShmGroup;

// A piece of a rank's memory, for the other ranks. region 0: not offered.
struct SharedSpan {
  // Memory of the owner's process; the offset is an address. The other one asks for shmMeasure().
  static constexpr uint64_t kProcess = UINT64_MAX, kProcessUnmeasured = UINT64_MAX - 1;

  uint64_t region = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;

  bool isOfProcess() const { return region >= kProcessUnmeasured; }
};

class PeerMemory {
 public:
  // Smaller shared tensors are staged: that is faster than the wait at the end. Inputs of a
  // reduction, if read in place, also move from one core's cache to another's, which takes longer
  // than a copy.
  static constexpr size_t kLeastShared = 128 * 1024;
  static constexpr size_t kLeastSharedReduce = 1024 * 1024;

  PeerMemory(int rank, SingleCopyUse use) : self_(rank), use_(use) {}

  // The locations of these pieces, for the other ranks; empty if they are to be staged. bytes: what
  // the other ranks would read.
  std::vector<SharedSpan> offer(const Arena& arena, const Call& call, const Spans& pieces,
                                size_t bytes);

  // ---- after all arrivals, the same on all ranks
  // The number of SharedSpan that the rank has offered.
  static size_t offersOf(const Arena& arena, int rank);
  static SharedSpan offerOf(const Arena& arena, int rank, size_t index);
  static bool isAnyOffered(const Arena& arena);
  static bool areAllOffered(const Arena& arena);

  // Preparations that the ranks must make before they can read the offers.
  struct News {
    bool isRegion = false, isProcess = false, isUnmeasured = false;
    bool isAny() const { return isRegion || isProcess || isUnmeasured; }
  };
  News newsIn(const Arena& arena) const;
  // Called by all ranks if there are such: they make the regions, or their processes, known to each
  // other.
  Task introduceRegions(ShmGroup group);
  Task introduceProcesses(ShmGroup group);

  // ---- reading, in the round after that
  // Returns where a part of the rank's offer can be read: in place, or in a buffer of this object,
  // which the next call for this rank overwrites. Null: it cannot be read; see unreadable().
  const char* view(const Arena& arena, int rank, size_t index, size_t offset, size_t bytes);
  // Copies the beginning of the rank's offer. Returns false if it cannot be read.
  bool read(const Arena& arena, int rank, size_t index, size_t offset, const Span& to,
            bool isStreaming);
  // Parts that view() copies should be no larger: the copy stays in the core's cache.
  static size_t viewBytes(const Arena& arena);
  // The end of a collective in which this part could not be read. Waits for the group's failure if
  // the rank's process has ended.
  Task unreadable(ShmGroup group, int rank) const;
  // Whether what was read from the processes was theirs: no rank has ended that offers its tensors
  // in this collective. A rank that offers nothing may have left, and have ended, already.
  bool areOwnersAlive(const Arena& arena) const;

  // ---- for shmMeasure()
  bool hasAccess() const { return access_ == Access::kGranted; }
  // The way that all calls take until the next time. kUnknown: the one that was chosen for them.
  void force(SingleCopy::Choice way) { forced_ = way; }
  struct Question {
    SingleCopy::Case of;
    bool isAgain = false;
  };
  // The kind and size that this rank's latest offer asked to measure, if it did.
  std::optional<Question> takeQuestion() { return std::exchange(question_, {}); }
  void choose(const SingleCopy::Case& of, SingleCopy::Choice way) { chosen_[of].choose(way); }

 private:
  struct Known {
    std::shared_ptr<Segment> segment;  // null: a rank could not map it, or it is our own
    std::weak_ptr<Segment> own;
    bool isUsable = false;
    Deadline retry;  // our own that is not usable: when it may be offered again
    int tries = 0;   // introductions, the same number on all ranks
  };
  using Name = std::pair<int, uint64_t>;  // a rank and its region
  struct Process {
    pid_t pid = 0;
    std::shared_ptr<const Fd> fd;  // see ProcessWatch::descriptorOf()
  };
  // Whether each rank can read all others' memory; the same on all ranks.
  enum class Access { kUnknown, kGranted, kRefused };

  bool offerShared(OpKind kind, const Spans& pieces, std::vector<SharedSpan>* offered) const;
  bool offerProcess(const Arena& arena, OpKind kind, const Spans& pieces, size_t bytes,
                    std::vector<SharedSpan>* offered);
  std::vector<Name> newIn(const Arena& arena) const;
  // Null: the part is not in the offer, or that is not in a region that is known.
  const char* find(int rank, const SharedSpan& offered, size_t offset, size_t bytes) const;
  bool readProcessOf(int rank, const SharedSpan& offered, size_t offset, const Span& to);
  void forgetDropped();
  // Whether no process has ended, or none of a rank for which `counts` is true.
  template <typename Counts>
  bool areAlive(Counts counts) const;

  const int self_;
  const SingleCopyUse use_;
  std::map<Name, Known> known_;
  Access access_ = Access::kUnknown;
  std::vector<Process> processes_;     // by rank
  mutable std::vector<pollfd> lives_;  // by rank: their pidfds, for poll(); -1: this rank
  SingleCopy::Choice forced_ = SingleCopy::Choice::kUnknown;
  std::map<SingleCopy::Case, SingleCopy::Chosen> chosen_;  // by all ranks of the group
  std::optional<Question> question_;
  std::vector<std::unique_ptr<char[]>> buffers_;  // by rank, of view()
  int error_ = 0;  // errno of what could not be read; 0: it is in no region of that rank
};

}  // namespace mycoll
