// Runs a launch on the stream: each operation becomes messages to and from peers. All of them move
// at the same time; then the results are computed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "comm.h"
#include "device.h"
#include "kernels/reduce.h"

namespace standin::nccl {
namespace {

using mycoll::DType;
using mycoll::ReduceOp;

// The header of each message. Sender and receiver must expect the same one.
struct Tag {
  uint64_t ordinal;  // of a collective in its communicator; 0 for kSend
  uint64_t count;
  Kind kind;
  int32_t type, op, root;

  bool operator==(const Tag&) const = default;
};

DType dtypeOf(DataType type) {
  switch (type) {
    case DataType::kInt8: return DType::kInt8;
    case DataType::kUInt8: return DType::kUInt8;
    case DataType::kInt32: return DType::kInt32;
    case DataType::kUInt32: return DType::kUInt32;
    case DataType::kInt64: return DType::kInt64;
    case DataType::kUInt64: return DType::kUInt64;
    case DataType::kFloat16: return DType::kFloat16;
    case DataType::kFloat32: return DType::kFloat32;
    case DataType::kFloat64: return DType::kFloat64;
    case DataType::kBFloat16: return DType::kBFloat16;
    case DataType::kFloat8E4M3: return DType::kFloat8E4M3;
    case DataType::kFloat8E5M2: return DType::kFloat8E5M2;
  }
  return DType::kInt8;
}

ReduceOp opOf(RedOp op) {
  switch (op) {
    case RedOp::kProd: return ReduceOp::kProduct;
    case RedOp::kMax: return ReduceOp::kMax;
    case RedOp::kMin: return ReduceOp::kMin;
    case RedOp::kAvg: return ReduceOp::kAvg;
    default: return ReduceOp::kSum;
  }
}

class Mover {
 public:
  explicit Mover(Comm& comm)
      : comm_(comm), rank_(comm.rank), ranks_(comm.ranks), out_(comm.ranks), in_(comm.ranks) {}

  bool run(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) plan(operation);
    if (!moveAll() || !matchOwn()) return false;
    for (const auto& finish : finishers_) finish();
    // Abort the process if the memory was freed meanwhile.
    for (const Used& used : used_) (void)Device::get().touch(used.address, used.bytes, used.name);
    return true;
  }

 private:
  struct Message {
    Tag tag;
    char* data;
    size_t bytes;
    size_t moved = 0;  // tag and data
    Tag arrived{};
  };
  struct Used {
    const void* address;
    size_t bytes;
    const char* name;
  };

  char* touch(const void* address, size_t bytes, const char* name) {
    if (bytes == 0) return nullptr;
    used_.push_back({address, bytes, name});
    return static_cast<char*>(Device::get().touch(address, bytes, name));
  }

  char* scratch(size_t bytes) {
    scratch_.emplace_back(bytes);
    return scratch_.back().data();
  }

  void put(int peer, char* data, size_t bytes, Tag tag) {
    out_[peer].push_back({tag, data, bytes});
  }
  void take(int peer, char* data, size_t bytes, Tag tag) {
    in_[peer].push_back({tag, data, bytes});
  }

  void copyOwn(char* to, const char* from, size_t bytes) {
    if (bytes == 0 || to == from) return;
    finishers_.push_back([=] { std::memmove(to, from, bytes); });
  }

  // Receives all ranks' values of one part and reduces them.
  void reduceHere(const Operation& op, char* own, char* to, Tag tag) {
    const size_t bytes = op.count * sizeOf(op.type);
    std::vector<const void*> inputs;
    for (int peer = 0; peer < ranks_; ++peer) {
      char* const values = peer == rank_ ? own : scratch(bytes);
      if (peer != rank_) take(peer, values, bytes, tag);
      inputs.push_back(values);
    }
    if (bytes == 0) return;
    finishers_.push_back(
        [=, type = dtypeOf(op.type), reduceOp = opOf(op.op), count = op.count, ranks = ranks_] {
          mycoll::reduce(type, reduceOp, to, inputs.data(), ranks, count, ranks, false);
        });
  }

  void plan(const Operation& op) {
    const size_t bytes = op.count * sizeOf(op.type);
    Tag tag{0, op.count, op.kind, static_cast<int32_t>(op.type), static_cast<int32_t>(op.op), -1};
    if (op.kind == Kind::kSend || op.kind == Kind::kReceive) {
      tag.kind = Kind::kSend;  // both ends need the same tag
    } else {
      tag.root = op.root;
      tag.ordinal = comm_.nextCollective();
    }
    const bool isRoot = op.root == rank_;
    switch (op.kind) {
      case Kind::kAllReduce: {
        char* const own = touch(op.send, bytes, op.name);
        for (int peer = 0; peer < ranks_; ++peer) {
          if (peer != rank_) put(peer, own, bytes, tag);
        }
        reduceHere(op, own, touch(op.receive, bytes, op.name), tag);
        break;
      }
      case Kind::kReduce: {
        char* const own = touch(op.send, bytes, op.name);
        if (isRoot) {
          reduceHere(op, own, touch(op.receive, bytes, op.name), tag);
        } else {
          put(op.root, own, bytes, tag);
        }
        break;
      }
      case Kind::kReduceScatter: {
        char* const all = touch(op.send, ranks_ * bytes, op.name);
        for (int peer = 0; peer < ranks_; ++peer) {
          if (peer != rank_) put(peer, all + peer * bytes, bytes, tag);
        }
        reduceHere(op, all + rank_ * bytes, touch(op.receive, bytes, op.name), tag);
        break;
      }
      case Kind::kBroadcast: {
        char* const to = touch(op.receive, bytes, op.name);
        if (isRoot) {
          char* const from = touch(op.send, bytes, op.name);
          toEverybody(from, bytes, 0, tag);
          copyOwn(to, from, bytes);
        } else {
          take(op.root, to, bytes, tag);
        }
        break;
      }
      case Kind::kAllGather: {
        char* const from = touch(op.send, bytes, op.name);
        char* const to = touch(op.receive, ranks_ * bytes, op.name);
        toEverybody(from, bytes, 0, tag);
        fromEverybody(to, bytes, tag);
        copyOwn(to + rank_ * bytes, from, bytes);
        break;
      }
      case Kind::kAllToAll: {
        char* const from = touch(op.send, ranks_ * bytes, op.name);
        char* const to = touch(op.receive, ranks_ * bytes, op.name);
        toEverybody(from, bytes, bytes, tag);
        fromEverybody(to, bytes, tag);
        copyOwn(to + rank_ * bytes, from + rank_ * bytes, bytes);
        break;
      }
      case Kind::kGather: {
        char* const from = touch(op.send, bytes, op.name);
        if (!isRoot) {
          put(op.root, from, bytes, tag);
          break;
        }
        char* const to = touch(op.receive, ranks_ * bytes, op.name);
        fromEverybody(to, bytes, tag);
        copyOwn(to + rank_ * bytes, from, bytes);
        break;
      }
      case Kind::kScatter: {
        char* const to = touch(op.receive, bytes, op.name);
        if (!isRoot) {
          take(op.root, to, bytes, tag);
          break;
        }
        char* const from = touch(op.send, ranks_ * bytes, op.name);
        toEverybody(from, bytes, bytes, tag);
        copyOwn(to, from + rank_ * bytes, bytes);
        break;
      }
      case Kind::kSend: put(op.root, touch(op.send, bytes, op.name), bytes, tag); break;
      case Kind::kReceive: take(op.root, touch(op.receive, bytes, op.name), bytes, tag); break;
    }
  }

  void toEverybody(char* from, size_t bytes, size_t stride, Tag tag) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) put(peer, from + peer * stride, bytes, tag);
    }
  }
  void fromEverybody(char* to, size_t bytes, Tag tag) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) take(peer, to + peer * bytes, bytes, tag);
    }
  }

  // Returns false if the tags differ, and reports that.
  bool agree(int peer, const Tag& expected, const Tag& arrived) {
    if (expected == arrived) return true;
    std::fprintf(
        stderr,
        "stand-in NCCL: rank %d expects from rank %d operation %d #%llu of %llu elements of "
        "type %d, op %d, root %d, and gets operation %d #%llu of %llu of type %d, op %d, "
        "root %d\n",
        rank_, peer, static_cast<int>(expected.kind),
        static_cast<unsigned long long>(expected.ordinal),
        static_cast<unsigned long long>(expected.count), expected.type, expected.op, expected.root,
        static_cast<int>(arrived.kind), static_cast<unsigned long long>(arrived.ordinal),
        static_cast<unsigned long long>(arrived.count), arrived.type, arrived.op, arrived.root);
    count("mismatches");
    if (script().mismatchIsError) comm_.setError(Result::kInvalidUsage);
    return false;
  }

  // Matches this rank's sends to itself with its receives from itself.
  bool matchOwn() {
    auto& sends = out_[rank_];
    auto& receives = in_[rank_];
    while (!sends.empty() && !receives.empty()) {
      if (!agree(rank_, receives.front().tag, sends.front().tag)) return false;
      const size_t bytes = sends.front().bytes;
      if (bytes != 0) std::memmove(receives.front().data, sends.front().data, bytes);
      sends.pop_front();
      receives.pop_front();
    }
    return sends.empty() && receives.empty();
  }

  // Writes as much of the messages as fits into the ring. Returns whether something moved.
  bool push(int peer) {
    Segment::Ring& ring = comm_.segment().ring(rank_, peer);
    bool hasMoved = false;
    for (auto& queue = out_[peer]; !queue.empty();) {
      Message& message = queue.front();
      const uint64_t written = ring.written.load(std::memory_order_relaxed);
      const uint64_t room = Segment::kRingBytes - (written - ring.read.load());
      if (room == 0) break;
      const Piece piece = nextPiece(message, &message.tag, room, ring, written);
      std::memcpy(piece.shared, piece.own, piece.bytes);
      message.moved += piece.bytes;
      ring.written.store(written + piece.bytes);
      hasMoved = true;
      if (message.moved == sizeof(Tag) + message.bytes) queue.pop_front();
    }
    return hasMoved;
  }

  bool pull(int peer, bool* isWrong) {
    Segment::Ring& ring = comm_.segment().ring(peer, rank_);
    bool hasMoved = false;
    for (auto& queue = in_[peer]; !queue.empty() && !*isWrong;) {
      Message& message = queue.front();
      const uint64_t read = ring.read.load(std::memory_order_relaxed);
      const uint64_t there = ring.written.load() - read;
      if (there == 0) break;
      const Piece piece = nextPiece(message, &message.arrived, there, ring, read);
      std::memcpy(piece.own, piece.shared, piece.bytes);
      message.moved += piece.bytes;
      ring.read.store(read + piece.bytes);
      hasMoved = true;
      const bool isTagComplete = message.moved == sizeof(Tag);  // a piece ends where the tag ends
      if (isTagComplete) *isWrong = !agree(peer, message.tag, message.arrived);
      if (message.moved == sizeof(Tag) + message.bytes) queue.pop_front();
    }
    return hasMoved;
  }

  struct Piece {
    char* own;
    char* shared;
    size_t bytes;
  };

  // The next piece of a message that is contiguous in the tag or the data, and in the ring.
  static Piece nextPiece(Message& message, Tag* tag, size_t limit, Segment::Ring& ring,
                         uint64_t position) {
    const bool isTag = message.moved < sizeof(Tag);
    char* const start = isTag ? reinterpret_cast<char*>(tag) : message.data - sizeof(Tag);
    const size_t left = (isTag ? sizeof(Tag) : sizeof(Tag) + message.bytes) - message.moved;
    const size_t place = position % Segment::kRingBytes;
    const size_t bytes = std::min({limit, left, Segment::kRingBytes - place});
    return {start + message.moved, ring.bytes + place, bytes};
  }

  bool moveAll() {
    for (int idle = 0;;) {
      bool isDone = true, hasMoved = false, isWrong = false;
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer == rank_) continue;
        hasMoved |= push(peer);
        hasMoved |= pull(peer, &isWrong);
        isDone = isDone && out_[peer].empty() && in_[peer].empty();
      }
      if (isWrong || comm_.isStopped()) return false;
      if (isDone) return true;
      idle = hasMoved ? 0 : idle + 1;
      if (idle < 50) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        if (idle % 100 == 0 && isSomebodyDead()) return false;
      }
    }
  }

  bool isSomebodyDead() {
    if (!script().peerDeathIsError) return false;
    for (int peer = 0; peer < ranks_; ++peer) {
      if ((out_[peer].empty() && in_[peer].empty()) || !comm_.segment().isPeerDead(peer)) continue;
      comm_.setError(Result::kRemoteError);
      return true;
    }
    return false;
  }

  Comm& comm_;
  const int rank_, ranks_;
  std::vector<std::deque<Message>> out_, in_;  // by peer
  std::vector<std::function<void()>> finishers_;
  std::deque<std::vector<char>> scratch_;
  std::vector<Used> used_;
};

}  // namespace

bool move(Comm& comm, const std::vector<Operation>& operations) {
  return Mover(comm).run(operations);
}

}  // namespace standin::nccl
