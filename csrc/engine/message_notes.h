// MessageNotes: what this rank sends and receives elsewhere, on a device, held against what the
// ranks at the other ends say. Nothing else would: NCCL matches messages by their order alone, so a
// receive of another type makes numbers of what was not meant to be any, and one of another size
// waits for ever.
//
// Messages from one rank to another on one lane (a way between two ranks with an order of its own)
// are a stream, numbered from 0 in the order in which they are carried out. Both ends tell each
// other, and each compares: who leaves first may not hear of it. What is alike and in a row is one
// run, so that a program that repeats itself has little to tell.
//
// What is not compared, and nobody is accused of: what another rank has not told; what does not fit
// into kMaxRuns runs; streams of which a graph holds a message, since nobody says how often that is
// replayed; and messages between ranks that are more than kMaxDistance apart on the ring of all,
// so that a rank need not be connected with thousands for it.
//
// Thread contract: [any thread]; its lock is a leaf, and may be taken under the I/O lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/communicator.h"

namespace mycoll {

class MessageNotes {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kMaxDistance = 32;
  static constexpr size_t kMaxRuns = 256;      // of a stream, of either end
  static constexpr size_t kMaxStreams = 1024;  // others say which there are

  // As it travels, one after the other. count 0: this stream is not compared any more.
  struct Run {
    uint64_t first = 0;
    uint64_t count = 0;
    uint64_t bytes = 0;
    uint64_t tag = 0;
    uint32_t lane = 0;
    uint8_t isSend = 0;
    DType dtype = DType::kOpaque;
    uint8_t opaqueType = 0;
    uint8_t reserved = 0;

    uint64_t end() const { return first + count; }
    bool isLike(const Run& other) const {
      return bytes == other.bytes && tag == other.tag && dtype == other.dtype &&
             opaqueType == other.opaqueType;
    }
  };
  static_assert(sizeof(Run) == 40);

  MessageNotes(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  // In the order in which the messages of a stream are carried out.
  void add(const ExternalMessage& message);
  // A graph holds a message of this lane.
  void stopComparing(int peer, uint32_t lane);

  std::vector<MessageCounts> counts(int peer, bool isSend) const;

  bool hasNews() const;
  // Who is to be told something, and since when.
  std::map<int, Clock::time_point> whoHasNews() const;
  // What that rank is to be told, in pieces that fit into a frame; told from here on.
  std::vector<std::string> takeNews(int peer);
  void hear(int peer, const std::string& news);

  struct Difference {
    int peer = 0;
    uint64_t number = 0;
    bool isSend = false;  // this rank's side
    Run mine, theirs;
  };
  // The first one that has come to light since the last time.
  std::optional<Difference> compare();

 private:
  struct Key {
    int peer;
    uint32_t lane;
    bool isSend;
    bool operator<(const Key& other) const {
      return std::tie(peer, lane, isSend) < std::tie(other.peer, other.lane, other.isSend);
    }
  };
  struct Stream {
    std::deque<Run> news;          // of mine, to be told; no more than one that says stop
    std::deque<Run> mine, theirs;  // to be compared
    uint64_t next = 0;             // number of the next message of mine
    uint64_t theirNext = 0;        // the same of theirs, as far as they have told
    uint64_t compared = 0;         // all before it
    bool isStopped = false;
  };

  Stream* streamOf(const Key& key);
  void addNews(const Key& key, Stream& stream, const Run& run);
  static void stop(Stream& stream);

  const int rank_, ranks_;

  mutable std::mutex mutex_;
  // All guarded by mutex_.
  std::map<Key, Stream> streams_;
  std::map<int, Clock::time_point> news_;  // who has any, and since when
  bool isComparable_ = false;  // something was added on either side since the last compare()
};

}  // namespace mycoll
