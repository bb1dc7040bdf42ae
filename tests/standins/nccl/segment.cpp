#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "base/fd.h"
#include "base/topology.h"

namespace standin::nccl {
namespace {

using mycoll::Fd;
using mycoll::nccl::UniqueId;

constexpr uint64_t kMagic = 0x6d79636f6c6c6e63;

// The contents of a UniqueId.
struct Id {
  uint64_t magic;
  uint64_t cookie;  // also in the memory, because the pid may belong to another process by now
  int32_t pid;
  int32_t fd;
};
static_assert(sizeof(Id) <= sizeof(UniqueId));

struct Header {
  std::atomic<uint64_t> cookie;
  std::atomic<int32_t> ranks;  // 0: no rank has attached yet
};

constexpr size_t kPage = 4096;

size_t bulletinOffset(int rank) { return kPage + rank * sizeof(Segment::Bulletin); }
size_t ringOffset(int ranks, int index) {
  const size_t start = (bulletinOffset(ranks) + kPage - 1) / kPage * kPage;
  return start + index * sizeof(Segment::Ring);
}
size_t totalBytes(int ranks) { return ringOffset(ranks, ranks * ranks); }

struct Kept {
  std::mutex mutex;
  std::map<uint64_t, Fd> memories;  // by cookie
};

Kept& kept() {
  static Kept& all = *new Kept;
  return all;
}

Id idOf(const UniqueId& unique) {
  Id id;
  std::memcpy(&id, unique.bytes, sizeof(id));
  return id;
}

void* map(int fd, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

bool Segment::create(UniqueId* unique) {
  Fd fd(memfd_create("standin-nccl", MFD_CLOEXEC));
  if (!fd || ftruncate(fd.get(), kPage) != 0) return false;
  std::random_device random;
  const Id id{kMagic, (uint64_t{random()} << 32) | random(), getpid(), fd.get()};
  auto* header = static_cast<Header*>(map(fd.get(), kPage));
  if (header == nullptr) return false;
  header->cookie.store(id.cookie);
  munmap(header, kPage);
  std::memset(unique->bytes, 0, sizeof(unique->bytes));
  std::memcpy(unique->bytes, &id, sizeof(id));
  std::lock_guard<std::mutex> lock(kept().mutex);
  kept().memories.emplace(id.cookie, std::move(fd));
  return true;
}

void Segment::drop(const UniqueId& unique) {
  std::lock_guard<std::mutex> lock(kept().mutex);
  kept().memories.erase(idOf(unique).cookie);
}

std::unique_ptr<Segment> Segment::attach(const UniqueId& unique, int rank, int ranks) {
  const Id id = idOf(unique);
  if (id.magic != kMagic) return nullptr;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", id.pid, id.fd);
  const Fd fd(open(path, O_RDWR | O_CLOEXEC));
  if (!fd) return nullptr;

  // All ranks must have the same number of ranks; the first one sets it.
  auto* header = static_cast<Header*>(map(fd.get(), kPage));
  if (header == nullptr) return nullptr;
  int32_t known = 0;
  const bool isRight = header->cookie.load() == id.cookie &&
                       (header->ranks.compare_exchange_strong(known, ranks) || known == ranks);
  munmap(header, kPage);
  if (!isRight || ftruncate(fd.get(), static_cast<off_t>(totalBytes(ranks))) != 0) return nullptr;

  std::unique_ptr<Segment> segment(new Segment);
  segment->ranks_ = ranks;
  segment->bytes_ = totalBytes(ranks);
  segment->memory_ = map(fd.get(), segment->bytes_);
  if (segment->memory_ == nullptr) return nullptr;
  int32_t noPid = 0;
  Bulletin& own = segment->bulletin(rank);
  segment->isTaken_ = !own.pid.compare_exchange_strong(noPid, getpid());
  if (!segment->isTaken_) own.startTicks = mycoll::processStartTicks(getpid());
  return segment;
}

Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

Segment::Bulletin& Segment::bulletin(int rank) const {
  return *reinterpret_cast<Bulletin*>(static_cast<char*>(memory_) + bulletinOffset(rank));
}

Segment::Ring& Segment::ring(int from, int to) const {
  const size_t offset = ringOffset(ranks_, from * ranks_ + to);
  return *reinterpret_cast<Ring*>(static_cast<char*>(memory_) + offset);
}

bool Segment::isComplete() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (bulletin(rank).pid.load() == 0) return false;
  }
  return true;
}

bool Segment::isPeerDead(int peer) const {
  const Bulletin& there = bulletin(peer);
  const pid_t pid = there.pid.load();
  if (pid == 0 || pid == getpid() || there.isGone.load() != 0) return false;
  const uint64_t startTicks = there.startTicks.load();  // 0: not set yet
  return startTicks != 0 && !mycoll::isLiving(mycoll::lookAtProcess(pid, startTicks));
}

}  // namespace standin::nccl
