// For wheels (MYCOLL_PORTABLE): replaces the functions that the compiler takes from a newer glibc
// or libstdc++ than manylinux_2_28 has, by older ones. The linker redirects each call of NAME to
// __wrap_NAME (--wrap in CMakeLists.txt). `./dev wheel` fails where one is missing here, and names
// it.
//
// libstdc++ is not linked statically instead: torch's exceptions, strings and threads require the
// process's one libstdc++.
#ifdef MYCOLL_PORTABLE
#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#include <condition_variable>
#include <ctime>
#include <ios>
#include <mutex>
#include <new>
#include <sstream>
#include <string>

// `local` is the function `name` in its version `version`.
#define OLD_VERSION(local, name, version) asm(".symver " #local "," #name "@" version)

// glibc's first version for a processor is that of all functions that were there before.
#ifdef __aarch64__
#define GLIBC(version) "GLIBC_2.17"
#else
#define GLIBC(version) "GLIBC_" version
#endif

namespace {

timespec asTimeOfDay(clockid_t clock, const timespec& deadline) {
  constexpr long kNanosecondsPerSecond = 1'000'000'000;
  timespec now{}, end{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += deadline.tv_sec - now.tv_sec;
  end.tv_nsec += deadline.tv_nsec - now.tv_nsec;
  if (end.tv_nsec < 0) {
    end.tv_nsec += kNanosecondsPerSecond;
    --end.tv_sec;
  } else if (end.tv_nsec >= kNanosecondsPerSecond) {
    end.tv_nsec -= kNanosecondsPerSecond;
    ++end.tv_sec;
  }
  return end;
}

}  // namespace

extern "C" {

// libstdc++ reads it to learn whether it may count without atomics; 0 (no) is always correct. A
// variable of glibc 2.32.
char __libc_single_threaded = 0;

// Inline functions until glibc 2.33. kStat: the version of struct stat.
#ifdef __aarch64__
constexpr int kStat = 0;
#else
constexpr int kStat = 1;
#endif
int oldStat(int version, const char* path, struct stat* result);
int oldFstat(int version, int file, struct stat* result);
int oldLstat(int version, const char* path, struct stat* result);
OLD_VERSION(oldStat, __xstat, GLIBC("2.2.5"));
OLD_VERSION(oldFstat, __fxstat, GLIBC("2.2.5"));
OLD_VERSION(oldLstat, __lxstat, GLIBC("2.2.5"));
int __wrap_stat(const char* path, struct stat* result) { return oldStat(kStat, path, result); }
int __wrap_fstat(int file, struct stat* result) { return oldFstat(kStat, file, result); }
int __wrap_lstat(const char* path, struct stat* result) { return oldLstat(kStat, path, result); }

// These moved from libpthread and libdl into libc in 2.32 and 2.34, and were given that version.
int oldTrylock(pthread_mutex_t* mutex);
int oldSignalMask(int how, const sigset_t* set, sigset_t* before);
int oldSetName(pthread_t thread, const char* name);
int oldTimedlock(pthread_mutex_t* mutex, const timespec* deadline);
OLD_VERSION(oldTrylock, pthread_mutex_trylock, GLIBC("2.2.5"));
OLD_VERSION(oldSignalMask, pthread_sigmask, GLIBC("2.2.5"));
OLD_VERSION(oldSetName, pthread_setname_np, GLIBC("2.12"));
OLD_VERSION(oldTimedlock, pthread_mutex_timedlock, GLIBC("2.2.5"));
int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) { return oldTrylock(mutex); }
int __wrap_pthread_sigmask(int how, const sigset_t* set, sigset_t* before) {
  return oldSignalMask(how, set, before);
}
int __wrap_pthread_setname_np(pthread_t thread, const char* name) {
  return oldSetName(thread, name);
}

void* oldOpen(const char* path, int flags);
void* oldSymbol(void* library, const char* name);
char* oldError();
int oldAddress(const void* address, Dl_info* result);
OLD_VERSION(oldOpen, dlopen, GLIBC("2.2.5"));
OLD_VERSION(oldSymbol, dlsym, GLIBC("2.2.5"));
OLD_VERSION(oldError, dlerror, GLIBC("2.2.5"));
OLD_VERSION(oldAddress, dladdr, GLIBC("2.2.5"));
void* __wrap_dlopen(const char* path, int flags) { return oldOpen(path, flags); }
void* __wrap_dlsym(void* library, const char* name) { return oldSymbol(library, name); }
char* __wrap_dlerror() { return oldError(); }
int __wrap_dladdr(const void* address, Dl_info* result) { return oldAddress(address, result); }

// Since 2.30. Without them a deadline moves with the time of day, as everywhere in libstdc++ then,
// and a wait may end early: the callers here are loops that check again.
int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  clockid_t clock, const timespec* deadline) {
  static const auto there = reinterpret_cast<decltype(&pthread_cond_clockwait)>(
      oldSymbol(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (there) return there(condition, mutex, clock, deadline);
  const timespec end = asTimeOfDay(clock, *deadline);
  return pthread_cond_timedwait(condition, mutex, &end);
}
int __wrap_pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                   const timespec* deadline) {
  static const auto there = reinterpret_cast<decltype(&pthread_mutex_clocklock)>(
      oldSymbol(RTLD_DEFAULT, "pthread_mutex_clocklock"));
  if (there) return there(mutex, clock, deadline);
  const timespec end = asTimeOfDay(clock, *deadline);
  return oldTimedlock(mutex, &end);
}

// std::condition_variable::wait(): has another version in libstdc++ 12.
void oldWait(std::condition_variable* condition, std::unique_lock<std::mutex>* lock);
OLD_VERSION(oldWait, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(
    std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  oldWait(condition, lock);
}

// std::__throw_bad_array_new_length(), of libstdc++ 11.
[[noreturn]] void __wrap__ZSt28__throw_bad_array_new_lengthv() {
  abi::__cxa_throw_bad_array_new_length();
}

// Parts of std::exception_ptr's copy constructor and destructor, which are inline since
// libstdc++ 12. portable.map hides those.
void oldCopy(void* exception, const void* other);
void oldDestroy(void* exception);
OLD_VERSION(oldCopy, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_, "CXXABI_1.3.3");
OLD_VERSION(oldDestroy, _ZNSt15__exception_ptr13exception_ptrD1Ev, "CXXABI_1.3.3");
void __wrap__ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(const void* self) {
  void* counted;  // never destroyed
  oldCopy(&counted, self);
}
void __wrap__ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void* self) { oldDestroy(self); }

// std::ostringstream(), of libstdc++ 9; before, the mode was a default argument.
void __wrap__ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::ostringstream(std::ios_base::out);
}

}  // extern "C"

// std::stringbuf::str() const& and &&, of libstdc++ 11; before, it was one function.
std::string oldText(const std::stringbuf* self);
OLD_VERSION(_Z7oldTextPKNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEEE,
            _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv, "GLIBCXX_3.4.21");
std::string textOf(const std::stringbuf* self) asm(
    "__wrap__ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string textOf(const std::stringbuf* self) { return oldText(self); }
std::string takeTextOf(std::stringbuf* self) asm(
    "__wrap__ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string takeTextOf(std::stringbuf* self) {
  std::string text = oldText(self);
  const std::string none;
  self->str(none);
  return text;
}
#endif
