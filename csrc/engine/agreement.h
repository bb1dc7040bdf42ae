// Agreement: checks that all ranks of a group make the same calls, where they communicate by
// messages. Each message carries the signature of its call, which is compared before its payload is
// used. A rank that never exchanges a message with the one that differs (two roots of a gather, a
// device's collectives) detects it by notes: the numbers and signatures of the collectives that a
// rank has begun. (Inside a host the arena compares: collectives/shm.)
//
// A rank that has waited long sends a notice along the control tree, up to the root and from there
// down to all ranks, with its call and the ranks that it knows to have begun it. Each rank on the
// way compares the call with its own and adds the ranks that it knows. So all ranks learn which
// ones are missing, with a few messages per rank, however many wait.
//
// Thread contract: guarded by the I/O lock; functions that do not REQUIRE it take it.
// Lifetime: owned by its group.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/call.h"
#include "transport/mailbox.h"

namespace mycoll {

class Membership;
struct Group;

class Agreement {
 public:
  // The group's agreement is this one.
  explicit Agreement(Group& group);

  // Begins a collective. Messages of the same number but another signature are a mismatch, whatever
  // their tag.
  void begin(uint64_t sequence, const Signature& signature);
  // Notifies the others that this rank has waited long in the current collective. A rank whose call
  // of the same number differs, be it past, current or still to come, fails the group. awaited: the
  // ranks that this one waits for, as far as it knows; they are notified directly.
  void sendArrived(const std::vector<int>& awaited);
  // Sends the next rank the collectives that have begun here since the last time, as far as CallLog
  // remembers them: if every rank does so, a rank that differs is detected by a neighbour. Sends at
  // most every 100 ms unless atOnce. True while there is more to send, or while a neighbour may
  // still report a difference.
  bool compareWithNext(bool atOnce);
  // For a rank that leaves: sends the collective that it has begun last to the ranks that it is
  // connected to. They may finish it later, and must not count this rank as missing in it.
  void sendLast();
  // The ranks that are not known to have begun this collective.
  std::vector<int> behind(uint64_t sequence);

  // ---- events
  void onDifference(const CallsDiffer& difference) REQUIRES(ioRole);
  void onProbe(int source, const std::string& payload) REQUIRES(ioRole);
  void onArrived(int source, const std::string& payload) REQUIRES(ioRole);

 private:
  using Clock = std::chrono::steady_clock;
  // A collective that some rank has begun.
  struct Note {
    uint64_t sequence = 0;
    Signature signature;
    int32_t rank = 0;
    uint32_t reserved = 0;
  };
  // A direction in which notices travel along the tree.
  struct Direction {
    Clock::time_point last;  // when a notice was sent there
    bool isPending = false;  // a notice was held back, as the last one was too recent
  };

  void compare(int source, uint64_t sequence, const Signature& theirs) REQUIRES(ioRole);
  void fail(const Signature& mine, int source, const Signature& theirs, const std::string& where,
            uint64_t from, uint64_t sequence) REQUIRES(ioRole);
  int parent() const;  // as ControlTree::parentOf()
  bool updateLatest(const Note& note) REQUIRES(ioRole);
  void take(const Note& note) REQUIRES(ioRole);
  void sendArrived(int rank, const Note& note) REQUIRES(ioRole);
  void forward(int source, const Note& note, bool isNew) REQUIRES(ioRole);
  bool isTimeFor(Direction& direction, bool isNew) const REQUIRES(ioRole);
  bool noteArrived(int rank, uint64_t sequence) REQUIRES(ioRole);
  std::string notesSince(uint64_t first) const REQUIRES(ioRole);

  Group& group_;
  Mailbox& mailbox_;
  Membership& membership_;

  std::vector<Note> early_ GUARDED_BY(ioRole);    // for collectives not begun here yet
  uint64_t comparedUpTo_ GUARDED_BY(ioRole) = 0;  // the next rank was sent all before this one
  Clock::time_point comparedAt_ GUARDED_BY(ioRole);
  std::vector<uint64_t> reached_
      GUARDED_BY(ioRole);                          // by rank: collectives it is known to have begun
  std::optional<Note> latest_ GUARDED_BY(ioRole);  // the latest one that a rank waits long in
  Direction up_ GUARDED_BY(ioRole), down_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
