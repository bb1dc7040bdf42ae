// OwningProcess: the process in which a group, and what belongs to it, was made. A forked child has
// copies of these objects, but none of the threads that serve them, and locks in the state in which
// the fork found them: whatever the child's program may call has to check first.
// [any thread]
#pragma once

#include <string>

namespace mycoll {

class OwningProcess {
 public:
  OwningProcess();

  // False in a forked child.
  bool isHere() const;
  // Throws in a forked child. `function`: what the program has called.
  void check(const std::string& group, const char* function) const {
    if (!isHere()) [[unlikely]] {
      refuse(group, function);
    }
  }

 private:
  [[noreturn]] static void refuse(const std::string& group, const char* function);

  const int forks_;  // how often this process and its ancestors had been forked
};

}  // namespace mycoll
