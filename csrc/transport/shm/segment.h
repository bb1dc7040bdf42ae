// Memory shared between processes: a memfd, without a name, sealed against resizing. So a crash
// leaves nothing behind, the limit of /dev/shm does not apply, and no peer can cause SIGBUS by
// truncating it. Pages are allocated when they are touched or, if the system may refuse that
// (vm.overcommit_memory=2), all of them when the segment is created.
//
// Thread contract: create and adopt from any thread; the object is immutable, except for its
// creator's descriptor.
// A process maps a segment once, however often it adopts it. Ranks that are threads then share
// addresses, so ThreadSanitizer recognises their accesses as those to one memory.
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

  // Zeroed memory. Fails if the system has none left. useHugePages: for large memory that is soon
  // full; aligns it for them.
  static Status create(size_t bytes, std::shared_ptr<Segment>* result, bool useHugePages = false);
  // Maps a segment that a peer has sent, and keeps no descriptor. Refuses a descriptor that is not
  // a sealed memfd of this size. kReadOnly has no effect if this process has it mapped for writing.
  static Status adopt(Fd fd, size_t bytes, std::shared_ptr<Segment>* result,
                      Access access = Access::kReadWrite, bool useHugePages = false);
  ~Segment();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // The descriptor to send to peers. Only of a segment that was created here, and until closeFd():
  // the mapping needs none. Both are called by its creator.
  int fd() const { return fd_.get(); }
  void closeFd() { fd_.reset(); }
  // Returns these pages to the system; called by its creator. A process that touches them later
  // gets new ones, so reserved pages are kept until the last mapping ends.
  void discard(size_t offset, size_t bytes) const;
  // Behaves as if the system refused overcommitment, or did not.
  static void reserveForTest(bool isReserved);

 private:
  friend class Pages;
  Segment() = default;
  // The segment of this descriptor if this process has it mapped for writing, else null.
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

// A part of another process's segment, mapped for writing: its pages, and no others. Children of
// fork() inherit it.
class Pages {
 public:
  // fd: a sealed segment of segmentBytes; it is not kept.
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
  // The mapped pages; or, if this process has the memory mapped already, its segment.
  void* mapped_ = nullptr;
  size_t mappedBytes_ = 0;
  std::shared_ptr<Segment> segment_;
};

}  // namespace mycoll
