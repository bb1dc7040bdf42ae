// SingleCopy: ranks of one host read each other's ordinary tensors through the kernel
// (process_vm_readv), so that a byte crosses memory once. Staging it takes two copies, but each of
// those is faster, and two ranks make them at the same time. Which way is faster depends on the
// processor, the kernel, the size and the pages: so the first collective of each kind and size is
// made both ways (shmMeasure), messages are timed (CopyTrials), and the process keeps the results.
//
// Thread contract: all [any thread].
#pragma once

#include <sys/types.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "base/types.h"

namespace mycoll {

class SingleCopy {
 public:
  // The calls that are measured together: of one kind, by so many ranks, with at least
  // 2^logBytes bytes of each rank and less than twice that.
  struct Case {
    OpKind kind;
    int ranks;
    int logBytes;
    auto operator<=>(const Case&) const = default;
  };
  enum class Choice : char { kUnknown, kStaged, kDirect };
  struct Measured {
    double stagedMicros = 0;  // of the median round
    double directMicros = 0;
    Choice choice = Choice::kUnknown;
  };
  static constexpr int kRounds = 6;  // of a measurement, in which both ways take turns

  // The way of the calls of one kind and size. Other programs may have disturbed the measurement:
  // single copy is measured again after so many calls, and then after kAgain times as many.
  struct Chosen {
    static constexpr uint64_t kFirstAgain = 32, kAgain = 32;
    Choice way = Choice::kUnknown;
    uint64_t calls = 0, nextAgain = kFirstAgain;

    // Counts a call. Returns true if the ways are to be measured again.
    bool isDueAgain() { return way == Choice::kDirect && ++calls >= nextAgain; }
    void choose(Choice chosen) {
      if (calls >= nextAgain) nextAgain = calls * kAgain;
      way = chosen;
    }
  };

  // Smaller tensors are always staged.
  static constexpr size_t kLeastBytes = 64 * 1024;
  // Larger calls count as calls of this size.
  static constexpr size_t kMostBytes = 16 * 1024 * 1024;

  static SingleCopy& process();
  static Case caseOf(OpKind kind, int ranks, size_t bytes);
  // From the microseconds of so many rounds.
  static Measured judge(const float* staged, const float* direct, int rounds = kRounds);

  Choice choice(const Case& of) const;
  void keep(const Case& of, const Measured& result);
  std::map<Case, Measured> measured() const;

 private:
  mutable Mutex mutex_;
  std::map<Case, Measured> measured_ GUARDED_BY(mutex_);
};

// Reads another process's memory. Returns 0 or errno.
int readProcess(pid_t pid, void* to, uint64_t address, size_t bytes);
// Whether other processes can read this memory, which belongs to one mapping: not that of a device.
bool isReadableByOthers(const Span& memory);
// Yama may restrict readProcess() to a process's parents. Permits it to all processes of this user,
// once per process.
void permitReading();

}  // namespace mycoll
