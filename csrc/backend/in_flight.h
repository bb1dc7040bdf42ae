// InFlight: the tensors of an operation that is not over, and whether the program has written to
// one of them since. Only while debugging (TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL): it costs time.
//
// What is seen are changes that torch counts (Tensor._version): in place, through whatever view,
// but not through .data or NumPy. The engine itself writes past that count.
//
// Thread contract: a plain value; check() may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace mycoll {

class InFlight {
 public:
  static bool isWanted();
  void add(const std::vector<at::Tensor>& tensors);
  bool isEmpty() const { return tensors_.empty(); }
  // Warns if one has changed; then forgets them all. what: "all_reduce (call #3)".
  void check(const std::string& what);

 private:
  std::vector<std::pair<at::Tensor, uint32_t>> tensors_;
};

}  // namespace mycoll
