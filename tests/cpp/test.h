// A small test harness: the engine's tests must build anywhere that mycoll builds.
//
//   TEST(Status, keepsItsMessage) {
//     Status status(Code::kTimeout, "late");
//     EXPECT_EQ(status.message(), "late");     // records a failure; the test continues
//     ASSERT(!status.ok());                    // records a failure and ends the test
//   }
//
// EXPECT, EXPECT_EQ and ASSERT may be used from any thread that the test joins before it ends.
// ASSERT throws; on another thread than the test's own, run the body through test::Threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <ostream>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/env.h"

namespace test {

struct Case {
  std::string name;  // "Suite.name"
  void (*body)();
};

// Thrown by ASSERT and SKIP; never leaves the harness.
struct Stop {};

std::vector<Case>& registry();
bool add(const char* suite, const char* name, void (*body)());
// [any thread]
void fail(const char* file, int line, const std::string& message);
// [any thread] The number of failures in all tests so far.
int failureCount();
void skip(const std::string& reason);
// The number of this process's open descriptors plus a small constant, so only differences count.
int openDescriptors();
// Waits until the condition holds, for 20 s at most. Returns whether it holds.
bool eventually(const std::function<bool()>& condition);

template <typename T>
std::string show(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else if constexpr (requires { value.code(), value.message(); }) {  // a Status
    return "code " + show(value.code()) + ": " + value.message();
  } else {
    return "(a value)";
  }
}

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);  // size_t against int, without a warning
  } else {
    return a == b;
  }
}

// Runs the body in a child process. A failure in the child fails the test that calls endProcess().
// The caller should have no other threads.
pid_t startProcess(const std::function<void()>& body);
// Waits for the child, and expects that nothing failed there.
void endProcess(pid_t child);

// The number in an environment variable, or `otherwise`.
inline int numberFrom(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

// The text that EXPECT_CONTAINS searches: of a string, or of a Status.
inline const std::string& textOf(const std::string& text) { return text; }
template <typename T>
const std::string& textOf(const T& status) {
  return status.message();
}

// Runs the body for each rank on a thread of its own. An ASSERT or an exception in one of them is
// recorded as a failure and does not abort the process.
class Threads {
 public:
  Threads(int count, const std::function<void(int rank)>& body);
};

// Whether tests should use smaller sizes: set by `./dev sanitize --short`, under which everything
// takes ten times as long.
inline bool isShort() { return std::getenv("SHORT_TESTS") != nullptr; }

// Sets an environment variable for a scope, and makes mycoll read it. No other thread may read the
// environment when the scope begins and ends.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) {
    const char* old = std::getenv(name);
    hadValue_ = old != nullptr;
    if (hadValue_) old_ = old;
    ::setenv(name, value, 1);
    mycoll::Env::readAgainForTest();
  }
  ~ScopedEnv() {
    if (hadValue_) {
      ::setenv(name_.c_str(), old_.c_str(), 1);
    } else {
      ::unsetenv(name_.c_str());
    }
    mycoll::Env::readAgainForTest();
  }

 private:
  std::string name_;
  std::string old_;
  bool hadValue_;
};

// An empty folder for a scope.
class ScopedFolder {
 public:
  ScopedFolder() {
    char pattern[] = "/tmp/mycoll-test-XXXXXX";
    path_ = ::mkdtemp(pattern);
  }
  ~ScopedFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_ + "/" + file).parent_path());
    std::ofstream(path_ + "/" + file) << text;
  }

 private:
  std::string path_;
};

}  // namespace test

#define TEST(suite, name)                                         \
  static void test_##suite##_##name();                            \
  [[maybe_unused]] static const bool testAdded_##suite##_##name = \
      ::test::add(#suite, #name, &test_##suite##_##name);         \
  static void test_##suite##_##name()

#define EXPECT(condition)                                           \
  do {                                                              \
    if (!(condition)) ::test::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define EXPECT_EQ(left, right)                                                                    \
  do {                                                                                            \
    const auto& testLeft = (left);                                                                \
    const auto& testRight = (right);                                                              \
    if (!::test::equal(testLeft, testRight)) {                                                    \
      ::test::fail(__FILE__, __LINE__,                                                            \
                   std::string(#left " == " #right ": ") + ::test::show(testLeft) + " against " + \
                       ::test::show(testRight));                                                  \
    }                                                                                             \
  } while (false)

#define EXPECT_OK(expression)                                                                     \
  do {                                                                                            \
    const auto& testStatus = (expression);                                                        \
    if (!testStatus.ok()) {                                                                       \
      ::test::fail(__FILE__, __LINE__, std::string(#expression ": ") + ::test::show(testStatus)); \
    }                                                                                             \
  } while (false)

// For a string, or a Status, whose message is searched.
#define EXPECT_CONTAINS(text, words)                                                        \
  do {                                                                                      \
    const auto& testText = (text);                                                          \
    if (::test::textOf(testText).find(words) == std::string::npos) {                        \
      ::test::fail(__FILE__, __LINE__,                                                      \
                   ::test::show(testText) + "\n  does not contain: " + std::string(words)); \
    }                                                                                       \
  } while (false)

#define ASSERT(condition)                           \
  do {                                              \
    if (!(condition)) {                             \
      ::test::fail(__FILE__, __LINE__, #condition); \
      throw ::test::Stop{};                         \
    }                                               \
  } while (false)

#define ASSERT_OK(expression)                                                                     \
  do {                                                                                            \
    const auto& testStatus = (expression);                                                        \
    if (!testStatus.ok()) {                                                                       \
      ::test::fail(__FILE__, __LINE__, std::string(#expression ": ") + ::test::show(testStatus)); \
      throw ::test::Stop{};                                                                       \
    }                                                                                             \
  } while (false)

// Ends a test that this machine cannot run. On the test's own thread only.
#define SKIP(reason)      \
  do {                    \
    ::test::skip(reason); \
    throw ::test::Stop{}; \
  } while (false)
