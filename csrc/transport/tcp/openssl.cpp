#include "transport/tcp/openssl.h"

#include <dlfcn.h>

#include <string>

namespace mycoll::openssl {
namespace {

constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};
constexpr unsigned long kOldest = 0x10101000;

Status open(Library* library) {
  void* handle = nullptr;
  std::string reason;
  for (const char* name : kNames) {
    if ((handle = dlopen(name, RTLD_NOW | RTLD_LOCAL))) break;
    if (const char* error = dlerror()) reason += (reason.empty() ? "" : "; ") + std::string(error);
  }
  if (!handle) {
    return Status(Code::kUnsupported,
                  "encryption needs OpenSSL 3 or 1.1.1, which is not installed (Debian, Ubuntu: "
                  "apt install libssl3; Fedora, RHEL: dnf install openssl-libs): " +
                      reason);
  }
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) missing = name;
  };
#define FIND(Result, name, parameters) find(library->name, #name);
  MYCOLL_OPENSSL_FUNCTIONS(FIND)
#undef FIND
  const bool isOld = missing || library->OpenSSL_version_num() < kOldest;
  if (isOld) {
    return Status(Code::kUnsupported,
                  std::string("encryption needs OpenSSL 3 or 1.1.1; the library found ") +
                      (missing ? std::string("lacks ") + missing
                               : std::string("is ") + library->OpenSSL_version(0)));
  }
  // Threads of the engine may use it until the process ends.
  if (library->OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) {
    return Status(Code::kUnsupported, "OpenSSL could not be initialized");
  }
  return Status();
}

}  // namespace

Status Library::load(const Library** result) {
  struct Loaded {
    Library library;
    Status status = open(&library);
  };
  static const Loaded* const kLoaded = new Loaded;
  *result = &kLoaded->library;
  return kLoaded->status;
}

}  // namespace mycoll::openssl
