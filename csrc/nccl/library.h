// The process's copy of NCCL, found at run time.
//
// Thread contract: [any thread]. A Library never changes once made; using it takes no lock.
// Lifetimes: a Library lives as long as the process, and so does the shared object behind it.
#pragma once

#include <string>

#include "base/status.h"
#include "nccl/abi.h"

namespace mycoll::nccl {

std::string versionText(int version);  // "2.28.9" of 22809

class Library {
 public:
  // The oldest accepted version: the first in which ncclConfig_t has all that subgroups and
  // non-blocking initialisation need (2.14 added the latter, 2.17 CTAs, 2.18 split).
  static constexpr int kOldestVersion = versionCode(2, 18, 1);

  // The library of this process. Searches, in this order, for
  //   MYCOLL_NCCL_LIBRARY    (a file)
  //   a copy that torch or LD_PRELOAD has loaded: its symbols, then libnccl.so.2
  //   wheelFile              (libnccl.so.2 of the nvidia-nccl wheel beside torch; empty: none)
  //   libnccl.so.2           (wherever the dynamic linker finds it)
  // and rejects a file that would be a second copy beside a loaded one: two copies do not share
  // memory or settings, and one cannot use a communicator of the other.
  // The first success is kept; after a failure the next call searches again.
  static Status get(const std::string& wheelFile, const Library** library);
  // The library that get() found; null before its first success.
  static const Library* loaded();

  // Exactly this file, even if another copy is loaded; every call makes another Library. For tests.
  static Status open(const std::string& file, const Library** library);
  // From now on get() returns this one. For tests: a stand-in beside the copy that torch has
  // loaded.
  static void adopt(const Library* library);

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions& functions() const { return functions_; }
  int version() const { return version_; }  // 22809
  const std::string& path() const { return path_; }
  // "NCCL 2.28.9 (/path/libnccl.so.2)"
  std::string describe() const { return "NCCL " + versionText(version_) + " (" + path_ + ")"; }

 private:
  Library() = default;
  static Status load(void* handle, const std::string& where, const Library** library);

  Functions functions_;
  int version_ = 0;
  std::string path_;
};

}  // namespace mycoll::nccl
