// Runs the tests linked into this executable.
//   x_test                 all of them
//   x_test ring Mesh.dies  those whose "Suite.name" contains one of the words
//   x_test --list
#include <dirent.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test.h"

namespace test {
namespace {

std::mutex mutex;  // guards the two below: ranks are threads
int failures = 0;
std::string skipped;

// Runs `body`, turning whatever leaves it into a failure.
void guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const Stop&) {
    // Already told by fail() or skip().
  } catch (const std::exception& error) {
    fail("(exception)", 0, error.what());
  } catch (...) {
    fail("(exception)", 0, "not a std::exception");
  }
}

bool wanted(const std::string& name, int count, char** words) {
  for (int i = 0; i < count; ++i) {
    if (name.find(words[i]) != std::string::npos) return true;
  }
  return count == 0;
}

}  // namespace

std::vector<Case>& registry() {
  static std::vector<Case> cases;
  return cases;
}

bool add(const char* suite, const char* name, void (*body)()) {
  registry().push_back({std::string(suite) + "." + name, body});
  return true;
}

void fail(const char* file, int line, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex);
  ++failures;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, message.c_str());
}

int failureCount() {
  std::lock_guard<std::mutex> lock(mutex);
  return failures;
}

int openDescriptors() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

void skip(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex);
  skipped = reason;
}

Threads::Threads(int count, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&body, rank] { guarded([&] { body(rank); }); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace test

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  setenv("MYCOLL_TRACE_FILE", "off", 0);  // tests fail groups by the dozen
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const test::Case& each : test::registry()) std::puts(each.name.c_str());
    return 0;
  }
  int passed = 0, failed = 0, skippedCount = 0;
  for (const test::Case& each : test::registry()) {
    if (!test::wanted(each.name, argc - 1, argv + 1)) continue;
    const int before = test::failureCount();
    test::skipped.clear();
    const Clock::time_point start = Clock::now();
    test::guarded(each.body);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const char* verdict = "passed";
    if (test::failureCount() != before) {
      verdict = "FAILED";
      ++failed;
    } else if (!test::skipped.empty()) {
      verdict = "skipped";
      ++skippedCount;
    } else {
      ++passed;
    }
    std::printf("%-7s %7.3f s  %s%s%s\n", verdict, seconds, each.name.c_str(),
                test::skipped.empty() ? "" : ": ", test::skipped.c_str());
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skippedCount);
  return failed == 0 ? 0 : 1;
}
