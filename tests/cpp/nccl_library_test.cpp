// The loader of NCCL. A process loads NCCL once, so each case runs in a process of its own.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "base/env.h"
#include "nccl/cudart.h"
#include "nccl/library.h"
#include "test.h"

namespace mycoll::nccl {
namespace {

const std::string kFull = STANDINS "/libnccl.so.2";
const std::string kRequired = STANDINS "/required/libnccl.so.2";

// `body` returns "" or what is wrong.
void inChild(const std::function<std::string()>& body) {
  test::endProcess(test::startProcess([&] { EXPECT_EQ(body(), ""); }));
}

std::string optionalFunctions(const Library& library) {
  std::string names;
#define ADD(member, symbol, result, parameters) \
  if (library.functions().member != nullptr) names += #member " ";
  MYCOLL_NCCL_OPTIONAL(ADD)
#undef ADD
  return names;
}

std::string refused(const std::string& wheel, Code code, const std::string& words) {
  const Library* library = nullptr;
  const Status status = Library::get(wheel, &library);
  if (status.code() != code) return "not refused so: " + test::show(status);
  if (status.message().find(words) == std::string::npos) return test::show(status);
  return Library::loaded() == nullptr ? "" : "the library was loaded nevertheless";
}

std::string found(const std::string& wheel, const std::string& path) {
  const Library* library = nullptr;
  const Status status = Library::get(wheel, &library);
  if (!status.ok()) return test::show(status);
  if (library->path() != path) return library->path() + " instead of " + path;
  const Library* again = nullptr;
  if (!Library::get("/nowhere", &again).ok() || again != library) return "not the same again";
  return Library::loaded() == library ? "" : "loaded() returns another library";
}

void ask(const std::string& file) {
  setenv("MYCOLL_NCCL_LIBRARY", file.c_str(), 1);
  Env::readAgainForTest();
}

TEST(NcclLibrary, mayBeNamedByTheUser) {
  inChild([] {
    ask(kRequired);
    return found(kFull, kRequired);
  });
}

TEST(NcclLibrary, comesFromTheWheelOrTheSystem) {
  inChild([] { return found(kRequired, kRequired); });
  // The program's RUNPATH is "where the system finds it".
  inChild([] { return found("", kFull); });
  inChild([] { return found("/nowhere/libnccl.so.2", kFull); });
}

TEST(NcclLibrary, mayBeLoadedAlready) {
  for (int visibility : {RTLD_GLOBAL, RTLD_LOCAL}) {
    inChild([visibility] {
      if (dlopen(kRequired.c_str(), RTLD_NOW | visibility) == nullptr)
        return std::string(dlerror());
      return found(kFull, kRequired);
    });
  }
}

TEST(NcclLibrary, isNeverASecondCopy) {
  for (int visibility : {RTLD_GLOBAL, RTLD_LOCAL}) {
    inChild([visibility] {
      if (dlopen(kRequired.c_str(), RTLD_NOW | visibility) == nullptr)
        return std::string(dlerror());
      ask(kFull);
      const std::string wrong = refused("", Code::kInvalidArgument, "second copy of NCCL");
      if (!wrong.empty()) return wrong;
      return refused("", Code::kInvalidArgument, kRequired);  // names both
    });
    // The same file by another name is no second copy.
    inChild([visibility] {
      if (dlopen(kRequired.c_str(), RTLD_NOW | visibility) == nullptr)
        return std::string(dlerror());
      ask(STANDINS "/../standins/required/libnccl.so.2");
      return found("", kRequired);
    });
  }
}

TEST(NcclLibrary, canBeMissingAndBeFoundLater) {
  inChild([] {
    ask("/nowhere/libnccl.so.2");
    const std::string wrong = refused("", Code::kUnsupported, "cannot be loaded");
    if (!wrong.empty()) return wrong;
    ask(kFull);
    return found("", kFull);
  });
}

// A thread forks while another one searches. The child can search.
TEST(NcclLibrary, isFoundByChildren) {
  inChild([] {
    ask("/nowhere/libnccl.so.2");
    std::atomic<bool> isOver{false};
    std::thread searcher([&] {
      const Library* library = nullptr;
      while (!isOver) (void)Library::get("", &library);
    });
    std::string wrong;
    for (int i = 0; i < 100 && wrong.empty(); ++i) {
      const pid_t child = fork();
      if (child == 0) {
        alarm(5);
        const Library* library = nullptr;
        _exit(Library::get("", &library).code() == Code::kUnsupported ? 0 : 1);
      }
      int status = -1;
      waitpid(child, &status, 0);
      if (status != 0) wrong = "a child has ended with " + std::to_string(status);
    }
    isOver = true;
    searcher.join();
    return wrong;
  });
}

TEST(NcclLibrary, refusesUnsuitableLibraries) {
  inChild([] {
    ask(STANDINS "/libmycoll_standin_device.so");
    return refused("", Code::kUnsupported, "is not NCCL");
  });
  inChild([] {
    ask(STANDINS "/incomplete/libnccl.so.2");
    return refused("", Code::kUnsupported, "is incomplete: it has no ncclGetUniqueId");
  });
  for (const auto& [code, text] :
       {std::pair("21703", "NCCL 2.17.3 ("), std::pair("2708", "NCCL 2.7.8 (")}) {
    inChild([code = code, text = text] {
      setenv("STANDIN_NCCL", (std::string("version=") + code).c_str(), 1);
      ask(kFull);
      const std::string wrong = refused("", Code::kUnsupported, text);
      return wrong.empty() ? refused("", Code::kUnsupported, "is too old: mycoll needs 2.18.1")
                           : wrong;
    });
  }
  inChild([] {
    setenv("MYCOLL_CUDA", "perhaps", 1);
    Env::readAgainForTest();
    return refused("", Code::kInvalidArgument, "MYCOLL_CUDA=perhaps is not valid");
  });
}

TEST(NcclLibrary, optionalFunctionsMayBeMissing) {
  inChild([] {
    setenv("STANDIN_NCCL", "version=21801", 1);
    const Library* library = nullptr;
    if (!Library::open(kRequired, &library).ok()) return std::string("not opened");
    return optionalFunctions(*library);
  });
  inChild([] {
    setenv("STANDIN_NCCL", "version=23004", 1);
    const Library* library = nullptr;
    if (!Library::open(kFull, &library).ok()) return std::string("not opened");
    const std::string version = versionText(library->version());
    if (version != "2.30.4") return version;
    const std::string text = optionalFunctions(*library);
    const std::string all =
        "commSplit memAlloc memFree commRegister commDeregister commWindowRegister "
        "commWindowDeregister commRevoke ";
    return text == all ? "" : text;
  });
}

// tests/test_nccl_abi.py runs this with a real library, and checks what it prints.
TEST(NcclLibrary, opensARealOne) {
  const char* const file = std::getenv("NCCL_TEST_LIBRARY");
  if (file == nullptr) SKIP("NCCL_TEST_LIBRARY names no library");
  const Library* library = nullptr;
  ASSERT_OK(Library::open(file, &library));
  std::printf("%s: %s\n", library->describe().c_str(), optionalFunctions(*library).c_str());
  UniqueId id;
  const Result made = library->functions().getUniqueId(&id);
  EXPECT(library->functions().getErrorString(made) != nullptr);
  EXPECT(library->functions().groupEnd() == Result::kInvalidUsage);  // no group was started
}

TEST(Cudart, mayBeMissing) {
  const Cudart& cudart = Cudart::get();
  EXPECT(!cudart.isThere());
  EXPECT(!cudart.isCapturing(nullptr));
  EXPECT_EQ(cudart.capability(0), 0);
  RelaxedCapture relaxed;
}

}  // namespace
}  // namespace mycoll::nccl
