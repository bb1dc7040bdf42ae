#include "transport/sleeper.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace mycoll {

Status Sleeper::open(HandleEvents handleEvents) {
  handleEvents_ = std::move(handleEvents);
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  event_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_.isOpen() || !event_.isOpen()) {
    return Status(Code::kInternal,
                  std::string("cannot open an epoll descriptor: ") + strerror(errno));
  }
  // The only level-triggered one: it stays readable until the leader has read it, even if another
  // thread polls epoll in between (Mesh::pollEvents()).
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = event_.get();
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &event);
  return Status();
}

namespace {

epoll_event anyEventOf(int fd) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.fd = fd;
  return event;
}

}  // namespace

Status Sleeper::watch(int fd) {
  epoll_event event = anyEventOf(fd);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Status(Code::kInternal, std::string("epoll_ctl: ") + strerror(errno));
  }
  return Status();
}

void Sleeper::watchAgain(int fd) {
  epoll_event event = anyEventOf(fd);
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Sleeper::sleep(uint64_t generation, Deadline deadline) {
  MutexLock lock(mutex_);
  if (generation_.load(std::memory_order_relaxed) != generation) return;
  if (!hasLeader_) return lead(lock, deadline);
  if (leaderIsIdle_) kick();
  ++followers_;
  auto over = [&]() REQUIRES(mutex_) {
    return generation_.load(std::memory_order_relaxed) != generation || !hasLeader_;
  };
  if (deadline.isNever()) {
    changed_.wait(lock.native(), over);
  } else {
    changed_.wait_until(lock.native(), deadline.when(), over);
  }
  --followers_;
}

void Sleeper::idle(uint64_t generation, Deadline deadline) {
  MutexLock lock(mutex_);
  if (generation_.load(std::memory_order_relaxed) != generation || hasLeader_) return;
  leaderIsIdle_ = true;
  lead(lock, deadline);
}

void Sleeper::lead(MutexLock& lock, Deadline deadline) NO_THREAD_SAFETY_ANALYSIS {
  hasLeader_ = true;
  // Runs also if handleEvents_ throws std::bad_alloc.
  struct End {
    ~End() NO_THREAD_SAFETY_ANALYSIS {
      lock.lock();
      sleeper.hasLeader_ = false;
      sleeper.leaderIsIdle_ = false;
      sleeper.generation_.fetch_add(1, std::memory_order_seq_cst);
      if (sleeper.followers_ > 0) sleeper.changed_.notify_all();
    }
    Sleeper& sleeper;
    MutexLock& lock;
  } const end{*this, lock};
  lock.unlock();
  epoll_event events[kMaxEvents];
  int count = epoll_wait(epoll_.get(), events, kMaxEvents, deadline.pollMilliseconds());
  uint64_t ignored;
  (void)!read(event_.get(), &ignored, sizeof(ignored));
  if (count > 0) handleEvents_(events, count);
}

void Sleeper::wakeAll() {
  MutexLock lock(mutex_);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (hasLeader_) kick();
  if (followers_ > 0) changed_.notify_all();
}

void Sleeper::kick() {
  uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof(one));
}

}  // namespace mycoll
