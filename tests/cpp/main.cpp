// Runs the tests linked into this executable.
//   x_test                 all of them
//   x_test ring Mesh.dies  those whose "Suite.name" contains one of the words
//   x_test --list          their names, one a line
//   x_test --only A.b      the one with this name: for ctest
// Exit code: 0 if none failed, 1 if one did, 77 if all were skipped, 2 if a word chooses none.
#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test.h"

#ifdef MYCOLL_COVERAGE
extern "C" void __gcov_dump();
#endif

namespace test {
namespace {

std::mutex mutex;  // guards the next two; ranks are threads
int failures = 0;
std::string skipped;

// Runs `body`, and records an exception that leaves it as a failure.
void guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const Stop&) {
    // fail() or skip() has recorded it.
  } catch (const std::exception& error) {
    fail("(exception)", 0, error.what());
  } catch (...) {
    fail("(exception)", 0, "not a std::exception");
  }
}

constexpr int kFailed = 1, kBadUse = 2, kAllSkipped = 77;  // 77 as in automake

bool wanted(const std::string& name, const std::vector<std::string>& words) {
  return words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) {
           return name.find(word) != std::string::npos;
         });
}

// Returns true if each word chooses a test. Otherwise a test that was renamed would silently not
// run where a script names it.
bool checkWords(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    const bool isFound = std::any_of(registry().begin(), registry().end(),
                                     [&](const Case& each) { return wanted(each.name, {word}); });
    if (isFound) continue;
    std::fprintf(stderr, "no test has '%s' in its name; --list shows their names\n", word.c_str());
    return false;
  }
  return !registry().empty();
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

bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

pid_t startProcess(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  const int before = failureCount();
  // The child has one thread: under ThreadSanitizer, a child of a process with several threads may
  // start none.
  guarded(body);
#ifdef MYCOLL_COVERAGE
  __gcov_dump();
#endif
  _exit(failureCount() == before ? 0 : 1);
}

void endProcess(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
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
  setenv("MYCOLL_TRACE_FILE", "off", 0);  // dozens of groups fail in tests
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const test::Case& each : test::registry()) std::puts(each.name.c_str());
    return 0;
  }
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "--only") {
    std::erase_if(test::registry(), [&](const test::Case& each) { return each.name != words[1]; });
    words.erase(words.begin());
  }
  if (!test::checkWords(words)) return test::kBadUse;
  int passed = 0, failed = 0, skippedCount = 0;
  for (const test::Case& each : test::registry()) {
    if (!test::wanted(each.name, words)) continue;
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
  if (failed != 0) return test::kFailed;
  return passed == 0 ? test::kAllSkipped : 0;
}
