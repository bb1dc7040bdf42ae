#include "engine/message_notes.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "transport/frame.h"

namespace mycoll {
namespace {

using Run = MessageNotes::Run;

constexpr size_t kRunsInFrame = kMaxControlBytes / sizeof(Run);

// False: there is no room for another run.
bool append(std::deque<Run>* runs, const Run& run) {
  if (!runs->empty() && runs->back().end() == run.first && runs->back().isLike(run)) {
    runs->back().count += run.count;
    return true;
  }
  if (runs->size() >= MessageNotes::kMaxRuns) return false;
  runs->push_back(run);
  return true;
}

}  // namespace

// With the mutex. Null: not compared, and never will be.
MessageNotes::Stream* MessageNotes::streamOf(const Key& key) {
  const auto known = streams_.find(key);
  if (known != streams_.end()) return &known->second;
  const int apart = std::abs(key.peer - rank_);
  if (std::min(apart, ranks_ - apart) > kMaxDistance || streams_.size() >= kMaxStreams) {
    return nullptr;
  }
  return &streams_[key];
}

// With the mutex.
void MessageNotes::addNews(const Key& key, Stream& stream, const Run& run) {
  if (append(&stream.news, run)) news_.try_emplace(key.peer, Clock::now());
}

void MessageNotes::add(const ExternalMessage& message) {
  const Key key{message.peer, message.lane, message.isSend};
  std::lock_guard<std::mutex> lock(mutex_);
  Stream* const stream = streamOf(key);
  if (stream == nullptr || stream->isStopped) return;
  Run run;
  run.first = stream->next++;
  run.count = 1;
  run.bytes = message.bytes;
  run.tag = message.tag;
  run.lane = message.lane;
  run.isSend = message.isSend ? 1 : 0;
  run.dtype = message.dtype;
  run.opaqueType = message.opaqueType;
  addNews(key, *stream, run);
  (void)append(&stream->mine, run);
  isComparable_ = true;
}

void MessageNotes::stop(Stream& stream) {
  stream.isStopped = true;
  stream.news.clear();
  stream.mine.clear();
  stream.theirs.clear();
}

void MessageNotes::stopComparing(int peer, uint32_t lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const bool isSend : {false, true}) {
    const Key key{peer, lane, isSend};
    Stream* const stream = streamOf(key);
    if (stream == nullptr || stream->isStopped) continue;
    stop(*stream);
    Run last;
    last.lane = lane;
    last.isSend = isSend ? 1 : 0;
    addNews(key, *stream, last);
  }
}

std::vector<MessageCounts> MessageNotes::counts(int peer, bool isSend) const {
  std::vector<MessageCounts> found;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, stream] : streams_) {
    if (key.peer != peer || key.isSend != isSend || stream.isStopped) continue;
    found.push_back({key.lane, stream.next, stream.theirNext});
  }
  return found;
}

bool MessageNotes::hasNews() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !news_.empty();
}

std::map<int, MessageNotes::Clock::time_point> MessageNotes::whoHasNews() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return news_;
}

std::vector<std::string> MessageNotes::takeNews(int peer) {
  std::vector<std::string> frames;
  std::lock_guard<std::mutex> lock(mutex_);
  if (news_.erase(peer) == 0) return frames;
  for (auto at = streams_.lower_bound({peer, 0, false});
       at != streams_.end() && at->first.peer == peer; ++at) {
    for (const Run& run : at->second.news) {
      if (frames.empty() || frames.back().size() >= kRunsInFrame * sizeof(Run)) {
        frames.emplace_back();
      }
      frames.back().append(reinterpret_cast<const char*>(&run), sizeof(run));
    }
    at->second.news.clear();
  }
  return frames;
}

void MessageNotes::hear(int peer, const std::string& news) {
  if (news.size() % sizeof(Run) != 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t at = 0; at < news.size(); at += sizeof(Run)) {
    Run run;
    std::memcpy(&run, news.data() + at, sizeof(run));
    Stream* const stream = streamOf({peer, run.lane, run.isSend == 0});
    if (stream == nullptr || stream->isStopped) continue;
    if (run.count == 0) {
      stop(*stream);
      continue;
    }
    if (run.end() < run.first || run.first < stream->theirNext) continue;
    stream->theirNext = run.end();
    isComparable_ |= append(&stream->theirs, run);
  }
}

std::optional<MessageNotes::Difference> MessageNotes::compare() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(isComparable_, false)) return std::nullopt;
  for (auto& [key, stream] : streams_) {
    while (!stream.mine.empty() && !stream.theirs.empty()) {
      const Run& mine = stream.mine.front();
      const Run& theirs = stream.theirs.front();
      const uint64_t from = std::max({mine.first, theirs.first, stream.compared});
      const uint64_t until = std::min(mine.end(), theirs.end());
      if (from < until && !mine.isLike(theirs)) {
        return Difference{key.peer, from, key.isSend, mine, theirs};
      }
      stream.compared = std::max(stream.compared, until);
      // Of two that end alike mine stays: it may grow, and what is compared of it is not looked at
      // again.
      (theirs.end() <= mine.end() ? stream.theirs : stream.mine).pop_front();
    }
  }
  return std::nullopt;
}

}  // namespace mycoll
