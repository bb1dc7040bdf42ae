#include "transport/tcp/openssl.h"

#include <dlfcn.h>

#include <iterator>
#include <string>

namespace mycoll::openssl {
namespace {

constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};

Status open(Library* library) {
  void* handle = nullptr;
  std::string reason;
  for (size_t i = 0; i < std::size(kNames) && !handle; ++i) {
    handle = dlopen(kNames[i], RTLD_NOW | RTLD_LOCAL);
    if (const char* error = dlerror()) reason += (reason.empty() ? "" : "; ") + std::string(error);
  }
  if (handle) reason.clear();
  const auto find = [&](auto& function, const char* name) {
    if (!reason.empty()) return;
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) reason = std::string("the library found lacks ") + name;
  };
#define FIND(Result, name, parameters) find(library->name, #name);
  MYCOLL_OPENSSL_FUNCTIONS(FIND)
#undef FIND
  if (!reason.empty()) {
    return Status(Code::kUnsupported,
                  "encryption needs OpenSSL 3 or 1.1.1 (Debian, Ubuntu: apt install libssl3; "
                  "Fedora, RHEL: dnf install openssl-libs): " +
                      reason);
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
