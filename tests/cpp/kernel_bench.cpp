// A benchmark of the kernels. It prints GB/s, counting each input and output once, and the time as
// a multiple of that of a float32 SUM of as many bytes.
//
//   kernel_bench [filter] [isa]     e.g. kernel_bench bfloat16, kernel_bench "" avx2
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "kernels/copy.h"
#include "kernels/isa.h"
#include "kernels/reduce.h"

using namespace mycoll;

namespace {

using Clock = std::chrono::steady_clock;

// Returns the best of several rounds, because other work on the machine can only add time.
template <typename Function>
double secondsOf(size_t bytes, Function function) {
  const int repeats = static_cast<int>(std::max<size_t>(1, (size_t{64} << 20) / bytes));
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < repeats; ++i) function();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / repeats);
  }
  return best;
}

struct Buffer {
  explicit Buffer(size_t bytes) : data(static_cast<char*>(std::aligned_alloc(4096, bytes))) {
    std::memset(data, 0, bytes);  // zeros, as subnormals are slow
  }
  Buffer(Buffer&& other) : data(std::exchange(other.data, nullptr)) {}
  ~Buffer() { std::free(data); }
  char* data;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  for (int isa = 0; argc > 2 && isa <= static_cast<int>(detectIsa()); ++isa) {
    if (std::string(argv[2]) == name(static_cast<Isa>(isa))) setActiveIsa(static_cast<Isa>(isa));
  }
  std::printf("kernels for %s\n", name(activeIsa()));

  constexpr size_t kLargest = size_t{64} << 20;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 10; ++i) buffers.emplace_back(kLargest);

  for (const size_t bytes : {size_t{16} << 10, size_t{256} << 10, kLargest}) {
    char* const to = buffers[8].data;
    const char* const from = buffers[0].data;
    const double plain = secondsOf(bytes, [&] { std::memcpy(to, from, bytes); });
    const double streamed = secondsOf(bytes, [&] { copyStreaming(to, from, bytes); });
    std::printf("copy %8zu KiB: memcpy %6.1f GB/s, streaming %6.1f GB/s (%.2f x the time)\n",
                bytes >> 10, 2e-9 * bytes / plain, 2e-9 * bytes / streamed, streamed / plain);
  }

  for (const int n : {2, 4, 8}) {
    for (const size_t bytes : {size_t{16} << 10, size_t{128} << 10, kLargest}) {
      const bool streaming = bytes == kLargest;
      std::printf("\n%d inputs of %zu KiB%s\n", n, bytes >> 10, streaming ? ", streaming" : "");
      std::vector<const void*> in;
      for (int k = 0; k < n; ++k) in.push_back(buffers[k].data);
      const auto time = [&](DType dtype, ReduceOp op) {
        return secondsOf(bytes * n, [&] {
          reduce(dtype, op, buffers[8].data, in.data(), n, bytes / elementSize(dtype), n,
                 streaming);
        });
      };
      const double base = time(DType::kFloat32, ReduceOp::kSum);
      const double moved = 1e-9 * static_cast<double>(bytes) * (n + 1);
      const double both = secondsOf(bytes * n, [&] {
        reduce2(DType::kFloat32, ReduceOp::kSum, buffers[8].data, buffers[9].data, in.data(), n,
                bytes / 4, 1, streaming, false);
      });
      std::printf("  %-14s %-8s %7.1f GB/s  %5.2f\n", "float32", "SUM", moved / base, 1.0);
      std::printf("  %-14s %-8s %7.1f GB/s  %5.2f\n", "float32", "SUM to 2",
                  1e-9 * static_cast<double>(bytes) * (n + 2) / both, both / base);
      for (int d = 0; d < static_cast<int>(DType::kCount); ++d) {
        for (int o = 0; o < static_cast<int>(ReduceOp::kCount); ++o) {
          const DType dtype = static_cast<DType>(d);
          const ReduceOp op = static_cast<ReduceOp>(o);
          if (!isSupported(dtype, op) || std::string(name(dtype)).find(filter) == std::string::npos)
            continue;
          // With large arrays, all operations are as fast as the memory, so two are enough.
          if (streaming && op != ReduceOp::kSum && op != ReduceOp::kMax) continue;
          const double seconds = time(dtype, op);
          std::printf("  %-14s %-8s %7.1f GB/s  %5.2f\n", name(dtype), name(op), moved / seconds,
                      seconds / base);
        }
      }
    }
  }
}
