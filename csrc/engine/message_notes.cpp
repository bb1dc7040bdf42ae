#include "engine/message_notes.h"

#include <algorithm>
#include <cstring>

#include "transport/frame.h"

namespace mycoll {
namespace {

using Run = MessageNotes::Run;

constexpr size_t kRunsInFrame = kMaxControlBytes / sizeof(Run);

void append(std::deque<Run>* runs, const Run& run) {
  if (!runs->empty() && runs->back().end() == run.first && runs->back().isLike(run)) {
    runs->back().count += run.count;
    return;
  }
  runs->push_back(run);
  if (runs->size() > MessageNotes::kMaxRuns) runs->pop_front();
}

}  // namespace

// With the mutex. Null: not compared.
MessageNotes::Stream* MessageNotes::streamOf(const Key& key) {
  const auto known = streams_.find(key);
  if (known != streams_.end()) return &known->second;
  const bool isNewPeer = peers_.count(key.peer) == 0;
  if (streams_.size() >= kMaxStreams || (isNewPeer && peers_.size() >= kMaxPeers)) return nullptr;
  peers_.insert(key.peer);
  return &streams_[key];
}

void MessageNotes::add(const ExternalMessage& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stream* const stream = streamOf({message.peer, message.lane, message.isSend});
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
  append(&stream->news, run);
  append(&stream->mine, run);
  hasNews_ = isComparable_ = true;
}

// With the mutex.
void MessageNotes::stop(Stream& stream) {
  stream.isStopped = true;
  stream.news.clear();
  stream.mine.clear();
  stream.theirs.clear();
}

void MessageNotes::stopComparing(int peer, uint32_t lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const bool isSend : {false, true}) {
    Stream* const stream = streamOf({peer, lane, isSend});
    if (stream == nullptr || stream->isStopped) continue;
    stop(*stream);
    hasNews_ = true;
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
  return hasNews_;
}

std::vector<std::pair<int, std::string>> MessageNotes::takeNews() {
  std::vector<std::pair<int, std::string>> news;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(hasNews_, false)) return news;
  auto tell = [&](int peer, const Run& run) {
    const bool isFull = news.empty() || news.back().first != peer ||
                        news.back().second.size() >= kRunsInFrame * sizeof(Run);
    if (isFull) news.emplace_back(peer, std::string());
    news.back().second.append(reinterpret_cast<const char*>(&run), sizeof(run));
  };
  for (auto& [key, stream] : streams_) {
    if (stream.isStopped) {
      if (std::exchange(stream.hasToldStop, true)) continue;
      Run last;
      last.lane = key.lane;
      last.isSend = key.isSend ? 1 : 0;
      tell(key.peer, last);
      continue;
    }
    for (const Run& run : stream.news) tell(key.peer, run);
    stream.news.clear();
  }
  return news;
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
      stream->hasToldStop = true;  // the other one knows
      continue;
    }
    std::deque<Run>& theirs = stream->theirs;
    const bool isInOrder = theirs.empty() || theirs.back().end() <= run.first;
    if (!isInOrder || run.end() < run.first) continue;
    stream->theirNext = std::max(stream->theirNext, run.end());
    if (theirs.size() >= kMaxRuns) continue;
    theirs.push_back(run);
    isComparable_ = true;
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
