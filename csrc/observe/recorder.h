// GroupRecord: the last operations of one group, and its state; always on. The code that runs an
// operation records three moments of it:
//
//   OpRecord record = group->enqueue(operation, now);   // the call
//   record.start(now);                                   // it is first in its queue
//   record.finish(ok, now);                              // the end
//
// The engine records the operations that it runs; backend/ records those that a device runs.
//
// Thread contract: all [any thread], without locks; enqueue() by one thread at a time for the
// collectives of a group, so that they are recorded in the order of their numbers.
// Lifetime: records point into the black box, which is never unmapped: they may outlive the group,
// and do nothing then. One whose entry has been overwritten still counts in the tallies.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/call.h"
#include "base/mutex.h"
#include "base/status.h"
#include "observe/black_box.h"

namespace mycoll {

// The description of a call to record.
struct Operation {
  Signature signature;  // without a root for a message between two ranks
  uint8_t flags = 0;    // kIs...
  int peer = -1;        // of a message: the other rank, -1: any
  uint32_t site = 0;    // see BlackBox::intern
  uint64_t sequence = 0;
  uint64_t tag = 0;
  uint64_t inBytes = 0;  // of this rank
  uint64_t outBytes = 0;

  static Operation ofMessage(const Signature& signature, int peer, uint64_t tag, uint64_t bytes);
};

class OpRecord {
 public:
  OpRecord() = default;  // records nothing

  // Only the first call has an effect.
  void start(int64_t now) const;
  bool isStarted() const { return !isCurrent() || get(entry_->started) != 0; }
  void finish(bool isOk, int64_t now) const;
  // For recv from any rank: the rank that sent the message.
  void setPeer(int rank) const;
  // Where the program called it; may be called again when more is known.
  void setSite(uint32_t site) const;
  bool hasSite() const { return !isCurrent() || get(entry_->site) != 0; }
  // "train.py:57 in step"; empty where it is not known.
  std::string place() const;

 private:
  friend class GroupRecord;
  bool isCurrent() const { return entry_ && get(entry_->id) == id_; }

  GroupState* group_ = nullptr;
  uint64_t context_ = 0;    // of the group: its area may belong to another one by now
  Entry* entry_ = nullptr;  // null: single operations are not recorded
  uint64_t id_ = 0;
  // For the tallies.
  OpKind kind_ = OpKind::kBarrier;
  uint64_t sequence_ = 0;
  uint64_t bytes_ = 0;
  int64_t enqueued_ = 0;
};

class GroupRecord {
 public:
  // globalRanks: the job's ranks of the group's; empty: they are the same.
  GroupRecord(const std::string& name, uint64_t context, int rank, int ranks,
              const std::vector<int64_t>& globalRanks);
  ~GroupRecord();  // as close()

  // isStarted: no other operation is ahead of it.
  OpRecord enqueue(const Operation& operation, int64_t now, bool isStarted = false);
  // The number of collectives that were called on this rank.
  void setSubmitted(uint64_t count) {
    if (!isClosed_.load(std::memory_order_relaxed)) put(state_->submitted, count);
  }
  // The collective with this number waits for these ranks.
  void waitsFor(uint64_t sequence, const std::vector<int>& ranks);
  void setTransport(const std::string& name, const std::string& encryption);
  // A description of the group by its creator. Only the first call has an effect.
  void describe(const std::string& text);
  // See GroupState::isPart.
  void setPart() { put(state_->isPart, uint32_t{1}); }
  // Records the first cause; requests a trace file unless the group was only ended.
  void fail(const Status& cause);
  // The area may belong to another group from now on: nothing more is written.
  void close();

 private:
  Entry& nextEntry();

  BlackBox& box_;
  GroupState* const state_;
  Mutex mutex_;  // guards what is written once: texts
  std::atomic<bool> isClosed_{false};
};

}  // namespace mycoll
