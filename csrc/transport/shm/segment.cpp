#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "base/mutex.h"
#include "base/os.h"
#include "base/types.h"

namespace mycoll {
namespace {

constexpr size_t kHugePage = 2 * 1024 * 1024;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Whether the first access to a page of shared memory may find no memory although the machine has
// some: the system then refuses memory beyond a limit, for such pages with SIGBUS. Read when the
// program starts, like bootId (base/topology.cpp).
bool isOvercommitRefused() {
  char mode = '0';
  std::ifstream("/proc/sys/vm/overcommit_memory") >> mode;
  return mode == '2';
}
std::atomic<bool> reserves{isOvercommitRefused()};

// The segments of this process by inode; see the header for why.
struct Registry {
  Mutex mutex;
  std::map<unsigned long, std::weak_ptr<Segment>> segments GUARDED_BY(mutex);
};

// A child of fork() has none of its parent's mappings.
Registry& registry() { return perProcess<Registry>(); }

Status failed(const char* what) {
  return Status(Code::kNetwork, std::string("shared memory: ") + what + ": " + strerror(errno));
}

// Maps at an address where huge pages can be used. Children do not inherit the mapping: a child of
// fork() must not write into a group that belongs to its parent. offset and bytes: whole pages.
void* mapAligned(int fd, size_t offset, size_t bytes, int protection, bool useHugePages) {
  const auto from = static_cast<off_t>(offset);
  if (!useHugePages) {
    void* data = mmap(nullptr, bytes, protection, MAP_SHARED, fd, from);
    if (data != MAP_FAILED) (void)madvise(data, bytes, MADV_DONTFORK);
    return data;
  }
  const size_t reserved = bytes + kHugePage;
  void* room =
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return MAP_FAILED;
  char* const begin = static_cast<char*>(room);
  const size_t before = (offset - reinterpret_cast<uintptr_t>(begin)) % kHugePage;
  void* data = mmap(begin + before, bytes, protection, MAP_SHARED | MAP_FIXED, fd, from);
  if (data == MAP_FAILED) {
    munmap(room, reserved);
    return MAP_FAILED;
  }
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + bytes, kHugePage - before);
  (void)madvise(data, bytes, MADV_DONTFORK);
  (void)madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

Status Segment::create(size_t bytes, std::shared_ptr<Segment>* result, bool useHugePages) {
  Fd fd(memfd_create("mycoll", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.isOpen()) return failed("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return failed("ftruncate");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return failed("sealing");
  const bool isReserved = reserves.load(std::memory_order_relaxed);
  if (isReserved && !reservePages(fd.get(), 0, bytes)) return failed("reserving it");
  MYCOLL_RETURN_IF_ERROR(map(fd.get(), bytes, Access::kReadWrite, useHugePages, result));
  (*result)->fd_ = std::move(fd);
  (*result)->isReserved_ = isReserved;
  return Status();
}

void Segment::reserveForTest(bool isReserved) { reserves = isReserved; }

void Segment::discard(size_t offset, size_t bytes) const {
  if (isReserved_) return;
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

Status Segment::adopt(Fd fd, size_t bytes, std::shared_ptr<Segment>* result, Access access,
                      bool useHugePages) {
  MYCOLL_RETURN_IF_ERROR(checkSealed(fd.get(), bytes));
  return map(fd.get(), bytes, access, useHugePages, result);
}

Status Segment::checkSealed(int fd, size_t bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) return failed("fstat");
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || static_cast<size_t>(info.st_size) != bytes) {
    return Status(Code::kNetwork, "shared memory: what the peer sent is not a sealed segment of " +
                                      std::to_string(bytes) + " bytes");
  }
  return Status();
}

std::shared_ptr<Segment> Segment::known(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) return nullptr;
  Registry& known = registry();
  MutexLock lock(known.mutex);
  const auto found = known.segments.find(info.st_ino);
  auto segment = found == known.segments.end() ? nullptr : found->second.lock();
  const bool isUsable = segment && segment->access_ == Access::kReadWrite;
  // Its destructor takes the lock, so the lock is released first.
  if (segment && !isUsable) lock.unlock();
  return isUsable ? segment : nullptr;
}

Status Segment::map(int fd, size_t bytes, Access access, bool useHugePages,
                    std::shared_ptr<Segment>* result) {
  struct stat info;
  if (fstat(fd, &info) != 0) return failed("fstat");
  // Destroyed after the lock is released, as their destructors take it.
  std::shared_ptr<Segment> other, segment(new Segment);
  Registry& known = registry();
  MutexLock lock(known.mutex);
  auto found = known.segments.find(info.st_ino);
  if (found != known.segments.end()) {
    other = found->second.lock();
    if (other && (other->access_ == access || other->access_ == Access::kReadWrite)) {
      *result = other;
      return Status();
    }
  }
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mapAligned(fd, 0, bytes, protection, useHugePages);
  if (data == MAP_FAILED) return failed("mmap");
  segment->data_ = static_cast<char*>(data);
  segment->bytes_ = bytes;
  segment->inode_ = info.st_ino;
  segment->access_ = access;
  known.segments[info.st_ino] = segment;
  *result = segment;
  return Status();
}

Segment::~Segment() {
  Registry& known = registry();
  MutexLock lock(known.mutex);
  auto found = known.segments.find(inode_);
  if (found != known.segments.end() && found->second.expired()) known.segments.erase(found);
  // In a forked child, something else may be mapped there.
  if (data_ && process_ == getpid()) munmap(data_, bytes_);
}

Status Pages::map(Fd fd, size_t segmentBytes, size_t offset, size_t bytes,
                  std::shared_ptr<Pages>* result) {
  MYCOLL_RETURN_IF_ERROR(Segment::checkSealed(fd.get(), segmentBytes));
  if (offset > segmentBytes || bytes > segmentBytes - offset) {
    return Status(Code::kNetwork, "shared memory: the peer offers what its segment does not hold");
  }
  auto pages = std::shared_ptr<Pages>(new Pages);
  pages->bytes_ = bytes;
  if (auto segment = Segment::known(fd.get())) {
    pages->data_ = segment->data() + offset;
    pages->segment_ = std::move(segment);
  } else {
    const size_t before = offset % pageBytes();
    const size_t whole = roundUp(before + bytes, pageBytes());
    void* const mapped = mapAligned(fd.get(), offset - before, whole, PROT_READ | PROT_WRITE,
                                    /*useHugePages=*/true);
    if (mapped == MAP_FAILED) return failed("mmap");
    (void)madvise(mapped, whole, MADV_DOFORK);
    pages->mapped_ = mapped;
    pages->mappedBytes_ = whole;
    pages->data_ = static_cast<char*>(mapped) + before;
  }
  *result = std::move(pages);
  return Status();
}

Pages::~Pages() {
  if (mapped_ != nullptr) munmap(mapped_, mappedBytes_);
}

}  // namespace mycoll
