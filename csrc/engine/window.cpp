#include "engine/window.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/log.h"
#include "collectives/batch.h"
#include "transport/mesh.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {
namespace {

// The steps of the group's own messages (Batch), far from those that set up its arena.
constexpr uint64_t kFirstStep = uint64_t{1} << 40;
// Distinguishes this all_gather from any that the program calls.
constexpr uint8_t kPartType = 255;

Call gather(int self, Span first, size_t bytes, int ranks) {
  Call call;
  call.kind = OpKind::kAllGather;
  call.opaqueType = kPartType;
  for (int rank = 0; rank < ranks; ++rank)
    call.out.push_back({first.begin() + rank * bytes, bytes});
  call.in = {call.out[self]};
  return call;
}

}  // namespace

struct Window::Part {
  uint64_t window = 0;
  uint64_t bytes = 0;
  uint64_t segmentBytes = 0;  // 0: others cannot map it
  uint64_t offset = 0;        // in the segment
  Description description{};
};

Window::Window(std::shared_ptr<Communicator> group) : group_(std::move(group)) {}

Window::~Window() { end(); }

void Window::moveTo(State next) {
  assert((state_ == State::kClosed && next == State::kOpening) ||
         (state_ == State::kOpening && (next == State::kOpen || next == State::kClosed)) ||
         (state_ == State::kOpen && (next == State::kClosing || next == State::kClosed)) ||
         (state_ == State::kClosing && next == State::kClosed));
  state_ = next;
}

// ---- called by all ranks -----------------------------------------------------------------------

Status Window::open(Span memory, const Description& description, std::shared_ptr<void> keepAlive,
                    Composite* opening) {
  {
    MutexLock lock(mutex_);
    if (state_ != State::kClosed) {
      return Status(Code::kInvalidArgument,
                    "the window has a tensor already: deregister that on all ranks first");
    }
    moveTo(State::kOpening);
    keepAlive_ = std::move(keepAlive);
  }
  memory_ = memory;
  description_ = description;
  *opening = [self = shared_from_this()](CollectiveRunner& runner) {
    return self->introduce(runner);
  };
  return Status();
}

Window::Part Window::ownPart() const {
  Part part;
  part.window = id_;
  part.bytes = memory_.bytes;
  part.description = description_;
  if (!isExposed_) return part;
  const SharedPlace place = SharedHeap::process().find(memory_);
  const auto segment = SharedHeap::process().segmentOf(place.region);
  if (!segment) return part;
  part.segmentBytes = segment->bytes();
  part.offset = place.offset;
  return part;
}

Task Window::introduce(CollectiveRunner& runner) {
  const int ranks = group_->ranks();
  id_ = group_->addWindow(shared_from_this());
  isExposed_ = group_->hostRanks().size() > 1 && SharedHeap::process().expose(memory_);
  // This precedes the exchange, after which other ranks may put into it.
  group_->mailbox().windows().open(id_, memory_);
  std::vector<Part> parts(ranks);
  parts[group_->rank()] = ownPart();
  MYCOLL_CO_RETURN_IF_ERROR(
      co_await runner.run(gather(group_->rank(), {parts.data(), 0}, sizeof(Part), ranks)));
  for (int rank = 0; rank < ranks; ++rank) {
    if (parts[rank].window == id_) continue;
    co_return Status(Code::kMismatch, "mycoll group '" + group_->options().name + "': window #" +
                                          std::to_string(id_) + " of this rank is #" +
                                          std::to_string(parts[rank].window) + " of " +
                                          group_->describeRank(rank) +
                                          ": all ranks must make and register windows in the "
                                          "same order");
  }
  std::vector<std::shared_ptr<Pages>> mapped(ranks);
  MYCOLL_CO_RETURN_IF_ERROR(co_await mapNeighbours(runner, parts, mapped));
  MutexLock lock(mutex_);
  parts_ = std::move(parts);
  mapped_ = std::move(mapped);
  moveTo(State::kOpen);
  co_return Status();
}

// Each rank that has shared memory sends its descriptor to the other ranks of its host, and learns
// whether they have mapped what they were sent.
Task Window::mapNeighbours(CollectiveRunner& runner, const std::vector<Part>& parts,
                           std::vector<std::shared_ptr<Pages>>& mapped) {
  Mailbox& mailbox = group_->mailbox();
  const int self = group_->rank(), ranks = group_->ranks();
  const SharedHeap& heap = SharedHeap::process();
  const bool isOffered = parts[self].segmentBytes > 0;
  const auto segment = isOffered ? heap.segmentOf(heap.find(memory_).region) : nullptr;
  std::vector<int> others = group_->hostRanks();
  std::erase(others, self);
  Signature signature;
  signature.kind = OpKind::kWindow;
  Batch descriptors(mailbox, signature);
  std::vector<std::pair<int, Transfer*>> coming;
  for (const int rank : others) {
    if (isOffered) descriptors.send(rank, {}, kFirstStep + id_, segment);
    if (parts[rank].segmentBytes == 0) continue;
    coming.emplace_back(rank, &descriptors.receive(rank, {}, kFirstStep + id_));
  }
  co_await descriptors;
  MYCOLL_CO_RETURN_IF_ERROR(descriptors.status());

  std::vector<char> haveMapped(ranks);  // by rank: all that it was sent
  haveMapped[self] = 1;
  for (const auto& [rank, message] : coming) {
    const Part& part = parts[rank];
    Status status(Code::kNetwork, "shared memory: the descriptor did not come");
    Fd fd = message->takeDescriptor();
    if (fd.isOpen() && part.offset >= SharedHeap::headBytes()) {
      status = Pages::map(std::move(fd), part.segmentBytes, part.offset, part.bytes, &mapped[rank]);
    }
    if (status.ok()) continue;
    haveMapped[self] = 0;
    MYCOLL_LOG_WARN("what is put into the window of %s travels by messages: %s",
                    mailbox.describeRank(rank).c_str(), status.message().c_str());
  }
  MYCOLL_CO_RETURN_IF_ERROR(
      co_await runner.run(gather(self, {haveMapped.data(), 0}, sizeof(char), ranks)));
  const bool isMapped =
      others.empty() || (isOffered && std::all_of(others.begin(), others.end(),
                                                  [&](int rank) { return haveMapped[rank] != 0; }));
  if (!isMapped && parts[self].bytes > 0) {
    // Peers with shared memory do not ring for a process that waits for nothing.
    MutexLock lock(mutex_);
    listening_.emplace(mailbox.mesh());
  }
  co_return Status();
}

Status Window::close(Composite* closing) {
  MutexLock lock(mutex_);
  MYCOLL_RETURN_IF_ERROR(checkOpen(group_->rank()));
  moveTo(State::kClosing);
  *closing = [self = shared_from_this()](CollectiveRunner& runner) { return self->retire(runner); };
  return Status();
}

// After the gather no rank starts an operation on the window. If no rank holds a mapping of another
// one's memory, that memory may be used for other things.
Task Window::retire(CollectiveRunner& runner) {
  const int ranks = group_->ranks();
  std::vector<char> areFree(ranks);
  {
    MutexLock lock(mutex_);
    const auto mapped = std::exchange(mapped_, {});
    areFree[group_->rank()] = std::all_of(mapped.begin(), mapped.end(), [](const auto& pages) {
      return pages == nullptr || pages.use_count() == 1;
    });
  }
  const Status status = co_await runner.run(gather(group_->rank(), {areFree.data(), 0}, 1, ranks));
  if (status.ok() && isExposed_ && std::count(areFree.begin(), areFree.end(), 0) == 0) {
    SharedHeap::process().conceal(memory_);
    isExposed_ = false;
  }
  end();
  co_return status;
}

void Window::end() {
  std::shared_ptr<void> last;  // dropped without the lock
  std::vector<std::shared_ptr<Pages>> others;
  {
    MutexLock lock(mutex_);
    if (state_ == State::kClosed) return;
    moveTo(State::kClosed);
    last = std::move(keepAlive_);
    others = std::exchange(mapped_, {});
    parts_.clear();
    listening_.reset();
  }
  Mailbox& mailbox = group_->mailbox();
  mailbox.windows().close(
      id_, Status(Code::kAborted, "mycoll group '" + group_->options().name + "': window #" +
                                      std::to_string(id_) + " has been closed on this rank"));
  mailbox.mesh().sleeper().wakeAll();  // threads whose waits have ended
}

void Window::releaseOthers() {
  std::vector<std::shared_ptr<Pages>> others;
  MutexLock lock(mutex_);
  others.swap(mapped_);
  mapped_.resize(others.size());
  listening_.reset();
}

// ---- one-sided ---------------------------------------------------------------------------------

Status Window::checkOpen(int rank) const {
  if (state_ != State::kOpen) {
    if (group_->hasFailed()) return group_->diagnosis().calledLate(OpKind::kWindow);
    return Status(Code::kInvalidArgument,
                  "the window has no tensor: register one on all ranks first");
  }
  if (rank >= 0 && rank < group_->ranks()) return Status();
  return Status(Code::kInvalidArgument, "rank " + std::to_string(rank) +
                                            " is out of range in a group of " +
                                            std::to_string(group_->ranks()));
}

Status Window::describe(int rank, uint64_t* bytes, Description* description) const {
  MutexLock lock(mutex_);
  MYCOLL_RETURN_IF_ERROR(checkOpen(rank));
  *bytes = parts_[rank].bytes;
  *description = parts_[rank].description;
  return Status();
}

Status Window::put(Span data, int rank, uint64_t offset, std::shared_ptr<void> keepAlive,
                   bool willWait, Milliseconds timeout, OpPtr* op) {
  Message message;
  message.data = data;
  message.rank = rank;
  message.offset = offset;
  std::shared_ptr<Pages> pages;
  {
    MutexLock lock(mutex_);
    MYCOLL_RETURN_IF_ERROR(checkOpen(rank));
    const uint64_t bytes = parts_[rank].bytes;
    if (offset > bytes || data.bytes > bytes - offset) {
      return Status(Code::kInvalidArgument,
                    std::to_string(data.bytes) + " bytes from byte " + std::to_string(offset) +
                        " on do not fit into the window of " + group_->describeRank(rank) +
                        ", which has " + std::to_string(bytes));
    }
    message.tag = id_;
    pages = mapped_[rank];
  }
  char* const place = rank == group_->rank() ? memory_.begin() : pages ? pages->data() : nullptr;
  *op = place != nullptr ? group_->putInto(place + offset, message)
        : data.bytes == 0
            ? group_->putInto(nullptr, message)
            : group_->post(OpKind::kPut, message, std::move(keepAlive), willWait, timeout);
  return Status();
}

Status Window::post(OpKind kind, int rank, bool willWait, Milliseconds timeout, OpPtr* op) {
  MutexLock lock(mutex_);
  MYCOLL_RETURN_IF_ERROR(checkOpen(rank));
  const uint64_t id = id_;
  lock.unlock();
  *op = group_->post(kind, {{}, rank, id}, nullptr, willWait, timeout);
  return Status();
}

Status Window::map(int rank, std::shared_ptr<Pages>* pages) const {
  MutexLock lock(mutex_);
  MYCOLL_RETURN_IF_ERROR(checkOpen(rank));
  if (group_->hasFailed()) return group_->diagnosis().calledLate(OpKind::kWindow);
  *pages = mapped_[rank];
  return Status();
}

}  // namespace mycoll
