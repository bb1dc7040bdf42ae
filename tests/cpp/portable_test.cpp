// Compares the functions that a wheel calls, as older systems lack some, with the system's. Not
// under a sanitizer, which provides only one version of some of them.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MYCOLL_PORTABLE
#include "base/portable.cpp"

#include <fcntl.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <thread>

#include "test.h"

namespace {

bool isSameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_mode == b.st_mode &&
         a.st_size == b.st_size && a.st_nlink == b.st_nlink && a.st_uid == b.st_uid &&
         a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

long long nanoseconds(const timespec& time) { return time.tv_sec * 1'000'000'000LL + time.tv_nsec; }

timespec now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return time;
}

TEST(Portable, filesAreDescribedAlike) {
  const test::ScopedFolder folder;
  const std::string path = folder.path() + "/link";
  const char* const link = path.c_str();
  ASSERT(symlink("/etc/passwd", link) == 0);
  struct stat expected{}, found{};
  ASSERT(stat(link, &expected) == 0 && __wrap_stat(link, &found) == 0);
  EXPECT(isSameFile(expected, found));
  const int file = open(link, O_RDONLY | O_CLOEXEC);
  found = {};
  ASSERT(file >= 0 && __wrap_fstat(file, &found) == 0);
  EXPECT(isSameFile(expected, found));
  close(file);
  found = {};
  ASSERT(__wrap_lstat(link, &found) == 0);
  EXPECT(S_ISLNK(found.st_mode) && S_ISREG(expected.st_mode));
  EXPECT_EQ(__wrap_stat("/no/such/file", &found), -1);
}

TEST(Portable, deadlinesBecomeTimesOfDay) {
  // With and without a carry of the nanoseconds.
  for (const long long ahead : {0LL, 1LL, 999'999'999LL, 1'500'000'000LL, -300'000'000LL}) {
    const long long start = nanoseconds(now(CLOCK_MONOTONIC)), end = start + ahead;
    const long long offset = nanoseconds(now(CLOCK_REALTIME)) - start;
    const timespec deadline{.tv_sec = end / 1'000'000'000, .tv_nsec = end % 1'000'000'000};
    const timespec found = asTimeOfDay(CLOCK_MONOTONIC, deadline);
    const long long passed = nanoseconds(now(CLOCK_MONOTONIC)) - start;
    EXPECT(found.tv_nsec >= 0 && found.tv_nsec < 1'000'000'000);
    // The thread may have been stopped between reading one clock and the other.
    EXPECT(nanoseconds(found) - end >= offset - passed);
    EXPECT(nanoseconds(found) - end <= offset + passed);
  }
}

TEST(Portable, waitsEnd) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  const timespec past = now(CLOCK_MONOTONIC);
  ASSERT(__wrap_pthread_mutex_trylock(&mutex) == 0);
  EXPECT_EQ(__wrap_pthread_mutex_trylock(&mutex), EBUSY);
  EXPECT_EQ(__wrap_pthread_mutex_clocklock(&mutex, CLOCK_MONOTONIC, &past), ETIMEDOUT);
  EXPECT_EQ(__wrap_pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &past), ETIMEDOUT);
  pthread_mutex_unlock(&mutex);

  std::mutex lock;
  std::condition_variable changed;
  bool isSet = false;
  std::thread setter([&] {
    std::unique_lock held(lock);
    isSet = true;
    changed.notify_one();
  });
  {
    std::unique_lock held(lock);
    while (!isSet)
      __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(&changed, &held);
    EXPECT(held.owns_lock());
  }
  setter.join();
}

TEST(Portable, arraysThatAreTooLong) {
  bool isThrown = false;
  try {
    __wrap__ZSt28__throw_bad_array_new_lengthv();
  } catch (const std::bad_array_new_length&) {
    isThrown = true;
  }
  EXPECT(isThrown);
}

TEST(Portable, textOfStreams) {
  alignas(std::ostringstream) unsigned char memory[sizeof(std::ostringstream)];
  __wrap__ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(memory);
  auto& stream = *std::launder(reinterpret_cast<std::ostringstream*>(memory));
  const std::string text = "longer than what a string keeps in itself";
  stream << text << 1;
  EXPECT_EQ(textOf(stream.rdbuf()), text + "1");
  EXPECT_EQ(takeTextOf(stream.rdbuf()), text + "1");
  EXPECT_EQ(stream.str(), "");
  stream << text;
  EXPECT_EQ(stream.str(), text);
  std::destroy_at(&stream);
}

TEST(Portable, exceptionsAreCounted) {
  static int alive = 0;
  struct Counted {
    Counted() { ++alive; }
    Counted(const Counted&) { ++alive; }
    ~Counted() { --alive; }
  };
  std::exception_ptr exception = std::make_exception_ptr(Counted());
  __wrap__ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(&exception);
  __wrap__ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(&exception);
  EXPECT_EQ(alive, 1);
  __wrap__ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(&exception);
  EXPECT_EQ(alive, 0);
  EXPECT(exception == nullptr);
}

TEST(Portable, librariesAndThreads) {
  void* self = __wrap_dlopen(nullptr, RTLD_NOW);
  ASSERT(self != nullptr);
  void* found = __wrap_dlsym(self, "malloc");
  Dl_info info{};
  EXPECT(found != nullptr && __wrap_dladdr(found, &info) != 0);
  EXPECT(__wrap_dlsym(self, "no_such_function") == nullptr && __wrap_dlerror() != nullptr);
  sigset_t set{}, before{}, after{};
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  ASSERT(__wrap_pthread_sigmask(SIG_BLOCK, &set, &before) == 0);
  ASSERT(__wrap_pthread_sigmask(SIG_SETMASK, &before, &after) == 0);
  EXPECT_EQ(sigismember(&after, SIGUSR1), 1);
  EXPECT_EQ(__wrap_pthread_setname_np(pthread_self(), "portable"), 0);
}

}  // namespace
#else
#include "test.h"

TEST(Portable, needsNoSanitizer) {
  SKIP("a sanitizer provides only one version of some of the functions");
}
#endif
