// OwningProcess: the process in which a group and its parts were made. A forked child has copies of
// these objects, but none of the threads that serve them, and its locks are in the state that they
// had at the fork: every function that the child's program may call must check first.
// [any thread]
#pragma once

#include <string>

namespace mycoll {

class OwningProcess {
 public:
  OwningProcess();

  // False in a forked child.
  bool isHere() const;
  // Throws in a forked child. `function`: the name of the function that the program called.
  void check(const std::string& group, const char* function) const {
    if (!isHere()) refuse(group, function);
  }

 private:
  [[noreturn]] static void refuse(const std::string& group, const char* function);

  const int forks_;  // how often this process and its ancestors had been forked
};

}  // namespace mycoll
