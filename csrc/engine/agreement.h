// Agreement: holds the ranks of a group to the same calls, where they talk by messages. Each
// message carries the signature of its call, compared before its payload is used. A rank that never
// exchanges a message with the one that differs (two roots of a gather, a device's collectives)
// finds out by notes: the numbers and signatures of the collectives that a rank has begun.
// (Inside a host the arena compares: collectives/shm.)
//
// A rank that waits long says so along the control tree, up to the root and from there down to all,
// with what it was called for and the ranks that it knows to have come. Each rank on the way
// compares and adds what it knows. So all hear who is missing by a few messages for each rank,
// however many wait.
//
// Thread contract: guarded by the I/O lock; functions that do not REQUIRE it take it.
// Lifetime: owned by its communicator.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/call.h"
#include "transport/mailbox.h"

namespace mycoll {

class ControlTree;
class Membership;

class Agreement {
 public:
  Agreement(Mailbox& mailbox, const ControlTree& tree, Membership& membership);

  // The collective that runs now: messages of the same number but another signature are a mismatch,
  // whatever their tag.
  void begin(uint64_t sequence, const Signature& signature);
  // This rank has waited long in the current collective: says so to the others. Those that are in
  // the same one, or were, or come to it, and were called differently, fail the group. awaited: the
  // ranks that it waits for, as far as it knows; they are told at once.
  void tellArrived(const std::vector<int>& awaited);
  // Tells the next rank what has begun here since the last time, as far as it is remembered: if
  // every rank does so, one that differs is found by a neighbour. At most every 100 ms unless
  // atOnce. True while there is more to tell, or to hear: what a neighbour has found.
  bool compareWithNext(bool atOnce);
  // This rank leaves: tells those that it has a connection to what it has begun last. The end of it
  // may come later there, and this rank must not be missed in it.
  void tellLast();
  // The ranks that have not begun this collective, as far as they have been heard of.
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
  // A direction of the tree in which news goes.
  struct Direction {
    Clock::time_point last;  // news went there
    bool isOwed = false;     // there is some that was held back, as the last was just before
  };

  void compare(int source, uint64_t sequence, const Signature& theirs) REQUIRES(ioRole);
  void fail(const Signature& mine, int source, const Signature& theirs, const std::string& where,
            uint64_t from, uint64_t sequence) REQUIRES(ioRole);
  bool mayTell(int rank) REQUIRES(ioRole);
  int parent() const;  // as ControlTree::parentOf()
  std::vector<int> children() const;
  bool isNews(const Note& note) REQUIRES(ioRole);
  void hear(const Note& note) REQUIRES(ioRole);
  void tellArrived(int rank, const Note& note) REQUIRES(ioRole);
  bool mayRepeat(int rank, uint64_t sequence) REQUIRES(ioRole);
  void passOn(int source, const Note& note, bool isNew) REQUIRES(ioRole);
  bool isTimeFor(Direction& direction, bool isNew) const REQUIRES(ioRole);
  bool noteArrived(int rank, uint64_t sequence) REQUIRES(ioRole);
  std::string notesSince(uint64_t first) const REQUIRES(ioRole);

  Mailbox& mailbox_;
  const ControlTree& tree_;
  Membership& membership_;

  std::vector<Note> early_ GUARDED_BY(ioRole);    // for collectives not begun here yet
  uint64_t comparedUpTo_ GUARDED_BY(ioRole) = 0;  // the next rank was told of all before this one
  Clock::time_point comparedAt_ GUARDED_BY(ioRole);
  std::vector<uint64_t> reached_
      GUARDED_BY(ioRole);  // by rank: collectives it is known to have begun
  // Ranks that nothing has come from: when and about what this rank last sent them kArrived.
  struct Repeated {
    uint64_t sequence = 0;
    Clock::time_point next;
    std::chrono::milliseconds pause{0};
  };
  std::map<int, Repeated> repeated_ GUARDED_BY(ioRole);
  Note latest_ GUARDED_BY(ioRole);  // that somebody waits long in
  bool hasHeard_ GUARDED_BY(ioRole) = false;
  Direction up_ GUARDED_BY(ioRole), down_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
