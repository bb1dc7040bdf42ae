// NCCL connects two ranks at the first send and the first receive between them. The calling thread
// waits until the other rank has called as well.
#include <chrono>
#include <string>
#include <thread>

#include "comm.h"
#include "device.h"

namespace standin::nccl {
namespace {

// Two ranks that are opposite each other in NCCL's rounds, as the two ranks of a pair are, exchange
// the data of both directions in one message.
bool areOpposite(int rank, int peer, int ranks) {
  return (peer - rank + ranks) % ranks * 2 == ranks;
}

// The same number, from 0 to 29, for collectives that may use the same algorithm.
int connectionOf(const Operation& op) {
  const size_t bytes = op.count * sizeOf(op.type);
  const int sizeClass = bytes <= (64 << 10) ? 0 : bytes <= (1 << 20) ? 1 : 2;
  return 3 * static_cast<int>(op.kind) + sizeClass;
}

// Allocates as NCCL does: in relaxed mode, so that it does not invalidate a running capture.
void allocateFor(const Comm& comm) {
  constexpr int kRelaxed = 2;
  const int before = Device::get().exchangeCaptureMode(kRelaxed);
  comm.mayWaitForDevice();
  (void)Device::get().exchangeCaptureMode(before);
}

}  // namespace

// NCCL makes the connections of an algorithm at the first collective that uses it. The caller waits
// for all ranks.
Result Comm::dialAll(const Operation& operation) {
  if (!script().connectsLazily) return Result::kSuccess;
  const uint64_t bit = uint64_t{1} << connectionOf(operation);
  if ((segment().bulletin(rank).connected.fetch_or(bit) & bit) != 0) return Result::kSuccess;
  allocateFor(*this);
  return await([&] {
    for (int peer = 0; peer < ranks; ++peer) {
      if ((segment().bulletin(peer).connected & bit) == 0) return false;
    }
    return true;
  });
}

Result Comm::dial(const std::vector<Operation>& operations) {
  struct Line {
    bool sends = false, receives = false;  // for the first time
  };
  std::map<int, Line> lines;
  for (const Operation& op : operations) {
    if (op.kind != Kind::kSend && op.kind != Kind::kReceive) {
      const Result connected = dialAll(op);
      if (connected != Result::kSuccess) return connected;
    }
    if (op.root == rank) continue;
    if (op.kind == Kind::kSend && segment().ring(rank, op.root).isSenderHere.exchange(1) == 0) {
      lines[op.root].sends = true;
    }
    if (op.kind == Kind::kReceive &&
        segment().ring(op.root, rank).isReceiverHere.exchange(1) == 0) {
      lines[op.root].receives = true;
    }
  }
  if (!lines.empty()) allocateFor(*this);
  for (const auto& [peer, line] : lines) {
    const Segment::Ring& out = segment().ring(rank, peer);
    const Segment::Ring& in = segment().ring(peer, rank);
    // If nothing was sent in the other direction yet, the peer's first call must be the counterpart
    // of this one.
    const auto isCrossed = [&] {
      return line.sends ? in.isSenderHere && !in.isReceiverHere && !out.isReceiverHere
                        : out.isReceiverHere && !out.isSenderHere && !in.isSenderHere;
    };
    const bool isHalf = line.sends != line.receives && areOpposite(rank, peer, ranks);
    if (isHalf && isCrossed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it may be about to set both
      if (isCrossed()) {
        die("ranks " + std::to_string(rank) + " and " + std::to_string(peer) +
            " both began with a send, or both with a receive: NCCL would connect them wrongly");
      }
    }
    const Result result = await([&] {
      return isStopped() ||
             ((!line.sends || out.isReceiverHere) && (!line.receives || in.isSenderHere));
    });
    if (result != Result::kSuccess) return result;
  }
  return isStopped() ? complain(Result::kInternalError, "aborted") : Result::kSuccess;
}

}  // namespace standin::nccl
