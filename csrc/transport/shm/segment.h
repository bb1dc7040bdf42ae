// A piece of memory shared between processes: a memfd, without a name, sealed against shrinking, so
// that nothing is left behind by a crash, /dev/shm's limit does not apply, and no peer can cause
// SIGBUS by truncating it. Pages are made when they are touched, or, where the system may refuse
// that (vm.overcommit_memory=2), all of them at once.
//
// Thread contract: create and adopt from any thread; the object is immutable, but for its creator's
// descriptor.
// Inside one process a segment is mapped once, however often it is adopted: ranks that are threads
// then share addresses, which is what lets ThreadSanitizer see their accesses as one.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>

#include "base/fd.h"
#include "base/status.h"

namespace mycoll {

class Segment {
 public:
  enum class Access { kReadOnly, kReadWrite };

  // Zeroed memory. Fails where the system has none left. useHugePages: for what is large and soon
  // full; they are aligned for it.
  static Status create(size_t bytes, std::shared_ptr<Segment>* result, bool useHugePages = false);
  // Maps what a peer has sent, and keeps no descriptor. Refuses a descriptor that is not a sealed
  // memfd of this size. kReadOnly: unless this process may write to it already.
  static Status adopt(Fd fd, size_t bytes, std::shared_ptr<Segment>* result,
                      Access access = Access::kReadWrite, bool useHugePages = false);
  ~Segment();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // To hand to peers. Only of a segment that was created here, and until closeFd(): the mapping
  // needs none. Both by its creator.
  int fd() const { return fd_.get(); }
  void closeFd() { fd_.reset(); }
  // Gives these pages back to the system, by its creator. Whoever touches them later finds others,
  // so those that were reserved stay until the last mapping ends.
  void discard(size_t offset, size_t bytes) const;
  // As if the system refused overcommitment, or did not.
  static void reserveForTest(bool isReserved);

 private:
  friend class Pages;
  Segment() = default;
  // Of this process, and writable, where it has that memory already.
  static std::shared_ptr<Segment> known(int fd);
  static Status checkSealed(int fd, size_t bytes);
  static Status map(int fd, size_t bytes, Access access, bool useHugePages,
                    std::shared_ptr<Segment>* result);

  Fd fd_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  unsigned long inode_ = 0;
  const pid_t process_ = getpid();
  Access access_ = Access::kReadWrite;
  bool isReserved_ = false;
};

// A part of another process's segment, mapped to be written to: its pages, and no others. Children
// of fork() inherit it.
class Pages {
 public:
  // fd: of a sealed segment of segmentBytes; it is not kept.
  static Status map(Fd fd, size_t segmentBytes, size_t offset, size_t bytes,
                    std::shared_ptr<Pages>* result);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Pages() = default;

  char* data_ = nullptr;
  size_t bytes_ = 0;
  // Whole pages; or where this process has the memory already, what keeps it.
  void* mapped_ = nullptr;
  size_t mappedBytes_ = 0;
  std::shared_ptr<Segment> segment_;
};

}  // namespace mycoll
