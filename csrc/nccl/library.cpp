#include "nccl/library.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <atomic>
#include <memory>

#include "base/env.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/os.h"

namespace mycoll::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

// Never freed: a Library lives as long as the process, including static destruction.
std::atomic<const Library*> theLibrary{nullptr};

// One thread searches, the others wait for its result.
struct Search : Mutex {};

// The file that holds the function; empty when the linker does not know.
std::string fileOf(void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  return info.dli_fname;
}

bool isSameFile(const std::string& a, const std::string& b) {
  struct stat left{}, right{};
  if (stat(a.c_str(), &left) != 0 || stat(b.c_str(), &right) != 0) return a == b;
  return left.st_dev == right.st_dev && left.st_ino == right.st_ino;
}

// A copy that the process has already loaded.
struct Resident {
  void* handle = nullptr;  // null: none
  std::string path;
};

Resident findResident() {
  Resident found;
  // Linked globally or preloaded: torch's own calls are bound to it.
  if (void* function = dlsym(RTLD_DEFAULT, "ncclGetVersion")) {
    found.handle = RTLD_DEFAULT;
    found.path = fileOf(function);
    // RTLD_DEFAULT is a null pointer with glibc, and other libraries may define single names; the
    // handle of the library itself, if available, finds all of them in one place.
    if (void* handle = dlopen(found.path.c_str(), RTLD_NOLOAD | RTLD_NOW)) found.handle = handle;
    return found;
  }
  if (void* handle = dlopen(kSoname, RTLD_NOLOAD | RTLD_NOW)) {
    if (void* function = dlsym(handle, "ncclGetVersion")) {
      found.handle = handle;
      found.path = fileOf(function);
    }
  }
  return found;
}

bool isResident(const Resident& resident) { return !resident.path.empty(); }

std::string lastLinkerError() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

}  // namespace

std::string versionText(int version) {
  // Up to 2.8 the code was major*1000 + minor*100 + patch.
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int minor = version >= 10000 ? version / 100 % 100 : version / 100 % 10;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

Status Library::load(void* handle, const std::string& where, const Library** library) {
  std::unique_ptr<Library> made(new Library);
  Functions& functions = made->functions_;
  const char* missing = nullptr;
#define MYCOLL_NCCL_FIND(member, symbol, result, parameters) \
  functions.member = reinterpret_cast<decltype(functions.member)>(dlsym(handle, #symbol));
  MYCOLL_NCCL_REQUIRED(MYCOLL_NCCL_FIND)
  MYCOLL_NCCL_OPTIONAL(MYCOLL_NCCL_FIND)
#undef MYCOLL_NCCL_FIND
#define MYCOLL_NCCL_NEED(member, symbol, result, parameters) \
  if (functions.member == nullptr && missing == nullptr) missing = #symbol;
  MYCOLL_NCCL_REQUIRED(MYCOLL_NCCL_NEED)
#undef MYCOLL_NCCL_NEED

  // The version first: it explains missing functions better than their names.
  if (functions.getVersion == nullptr) {
    return Status(Code::kUnsupported, where + " is not NCCL: it has no ncclGetVersion");
  }
  made->path_ = fileOf(reinterpret_cast<void*>(functions.getVersion));
  if (made->path_.empty()) made->path_ = where;
  if (functions.getVersion(&made->version_) != Result::kSuccess) {
    return Status(Code::kUnsupported, made->path_ + ": NCCL does not tell its version");
  }
  if (made->version_ < kOldestVersion) {
    return Status(Code::kUnsupported,
                  made->describe() + " is too old: mycoll needs " + versionText(kOldestVersion) +
                      ", the first whose communicators can be initialised without blocking, "
                      "configured and split");
  }
  if (missing != nullptr) {
    return Status(Code::kUnsupported, made->describe() + " is incomplete: it has no " + missing);
  }

  MYCOLL_LOG_INFO("%s", made->describe().c_str());
  *library = made.release();  // never freed
  return {};
}

Status Library::open(const std::string& file, const Library** library) {
  // Local, so that nothing else binds to it by accident; eager, so that missing symbols fail here.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Status(Code::kUnsupported, "NCCL cannot be loaded: " + lastLinkerError());
  }
  return load(handle, file, library);
}

void Library::adopt(const Library* library) {
  theLibrary.store(library, std::memory_order_release);
}

const Library* Library::loaded() { return theLibrary.load(std::memory_order_acquire); }

Status Library::get(const std::string& wheelFile, const Library** library) {
  *library = loaded();
  if (*library != nullptr) return {};
  const MutexLock lock(perProcess<Search>());
  *library = loaded();
  if (*library != nullptr) return {};

  MYCOLL_RETURN_IF_ERROR(Env::check());
  const std::string& asked = Env::process().ncclLibrary;
  const Resident resident = findResident();
  Status found;
  if (!asked.empty() && isResident(resident) && !isSameFile(asked, resident.path)) {
    return Status(Code::kInvalidArgument,
                  "MYCOLL_NCCL_LIBRARY=" + asked +
                      " would be a second copy of NCCL: this process has loaded " + resident.path +
                      " already, most likely with torch. Unset the variable, or start the program "
                      "with LD_PRELOAD=" +
                      asked + ", which replaces torch's copy as well");
  }
  if (isResident(resident)) {
    found = load(resident.handle, resident.path, library);
  } else if (!asked.empty()) {
    found = open(asked, library);
  } else if (struct stat file{}; !wheelFile.empty() && stat(wheelFile.c_str(), &file) == 0) {
    found = open(wheelFile, library);
  } else {
    found = open(kSoname, library);
  }
  MYCOLL_RETURN_IF_ERROR(found);
  theLibrary.store(*library, std::memory_order_release);
  return {};
}

}  // namespace mycoll::nccl
