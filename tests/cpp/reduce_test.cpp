// Compares the kernels, for every type, operation and instruction set of this machine, with a
// reference that computes one element at a time.
#include "kernels/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/types.h"
#include "kernels/copy.h"
#include "kernels/isa.h"
#include "reduce_reference.h"
#include "test.h"

using namespace mycoll;
using namespace mycoll::reference;

namespace {

constexpr size_t kMostElements = 4097;
constexpr int kMostInputs = 9;

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (int isa = 0; isa <= static_cast<int>(detectIsa()); ++isa) {
    all.push_back(static_cast<Isa>(isa));
  }
  return all;
}

class ScopedIsa {
 public:
  explicit ScopedIsa(Isa isa) { setActiveIsa(isa); }
  ~ScopedIsa() { setActiveIsa(detectIsa()); }
};

// Half of the elements have random bits, so many are NaNs, infinities and subnormals. The other
// half are moderate numbers, so that rounding matters and halfway cases occur.
std::vector<char> randomArray(DType dtype, std::mt19937_64& random) {
  const size_t size = elementSize(dtype);
  std::vector<char> data(kMostElements * size);
  for (char& byte : data) byte = static_cast<char>(random());
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t lanes = kMostElements * (isComplex ? 2 : 1);
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (random() % 2 == 0) continue;
    const auto digits = static_cast<float>(static_cast<int>(random() % 513) - 256);
    const float value = std::ldexp(digits, static_cast<int>(random() % 12) - 9);
    if (dtype == DType::kFloat32 || dtype == DType::kComplex64) {
      put(data.data(), lane, value);
    } else if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
      put(data.data(), lane, static_cast<double>(value));
    } else if (dtype == DType::kBool) {
      data[lane] = static_cast<char>(random() % 2);
    } else if (isFormat(dtype) && size == 2) {
      put(data.data(), lane, static_cast<uint16_t>(formatOf(dtype).encode(value)));
    } else if (isFormat(dtype)) {
      put(data.data(), lane, static_cast<uint8_t>(formatOf(dtype).encode(value)));
    }
  }
  return data;
}

// An array at a chosen distance from a 64-byte boundary, between guards that must not change.
class Placed {
 public:
  Placed(size_t bytes, size_t misalignment) : storage_(bytes + 64 + 2 * kGuard + misalignment) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(storage_.data()) + kGuard;
    begin_ = reinterpret_cast<char*>((start + 63) / 64 * 64 + misalignment);
    bytes_ = bytes;
    std::memset(storage_.data(), 0x5a, storage_.size());
  }
  char* data() { return begin_; }
  bool guardsHold() const {
    const auto isGuard = [](char byte) { return byte == 0x5a; };
    return std::all_of(storage_.data(), static_cast<const char*>(begin_), isGuard) &&
           std::all_of(static_cast<const char*>(begin_) + bytes_, storage_.data() + storage_.size(),
                       isGuard);
  }

 private:
  static constexpr size_t kGuard = 64;
  std::vector<char> storage_;
  char* begin_;
  size_t bytes_;
};

std::string describe(DType dtype, ReduceOp op, int n, size_t count, Isa isa) {
  return std::string(name(dtype)) + " " + name(op) + " of " + std::to_string(n) + " x " +
         std::to_string(count) + " with " + name(isa);
}

void testType(DType dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype) + 1);
  std::vector<std::vector<char>> arrays;
  for (int k = 0; k < kMostInputs; ++k) arrays.push_back(randomArray(dtype, random));
  const size_t size = elementSize(dtype);

  for (int o = 0; o < static_cast<int>(ReduceOp::kCount); ++o) {
    const ReduceOp op = static_cast<ReduceOp>(o);
    if (!isSupported(dtype, op)) continue;
    for (int n = 1; n <= kMostInputs; ++n) {
      const int divisor = n;
      Inputs inputs;
      for (int k = 0; k < n; ++k) inputs.push_back(arrays[k].data());
      std::vector<char> wanted(kMostElements * size);
      for (size_t i = 0; i < kMostElements; ++i) {
        reduceElement(dtype, op, inputs, i, divisor, wanted.data());
      }
      for (const Isa isa : isas()) {
        const ScopedIsa scoped(isa);
        for (const size_t count :
             {size_t{0}, size_t{1}, size_t{7}, size_t{64}, size_t{1000}, kMostElements}) {
          // The variant chooses the alignment, the input that the output aliases, and the stores.
          for (int variant = 0; variant < 6; ++variant) {
            const bool streaming = variant % 2 == 1;
            const size_t skew = variant / 2 == 0 ? 0 : variant / 2 == 1 ? size : 1;
            std::vector<Placed> placed;
            std::vector<const void*> in;
            placed.reserve(static_cast<size_t>(n));
            for (int k = 0; k < n; ++k) {
              placed.emplace_back(count * size, (skew * static_cast<size_t>(k + 1)) % 64);
              if (count > 0) std::memcpy(placed.back().data(), inputs[k], count * size);
              in.push_back(placed.back().data());
            }
            Placed out(count * size, skew);
            // The output aliases a different input in every variant, or none.
            const int alias = variant < n ? variant : -1;
            char* const to = alias >= 0 ? placed[alias].data() : out.data();
            reduce(dtype, op, to, in.data(), n, count, divisor, streaming);
            const bool isRight = same(dtype, to, wanted.data(), count);
            bool guardsHold = out.guardsHold();
            for (const Placed& one : placed) guardsHold = guardsHold && one.guardsHold();
            if (!isRight || !guardsHold) {
              test::fail(__FILE__, __LINE__,
                         describe(dtype, op, n, count, isa) + ", variant " +
                             std::to_string(variant) + (guardsHold ? "" : ": out of bounds"));
              return;
            }
            if (alias >= 0) std::memcpy(to, inputs[alias], count * size);
            Placed out2(count * size, skew);
            reduce2(dtype, op, to, out2.data(), in.data(), n, count, divisor, streaming,
                    !streaming);
            if (!same(dtype, to, wanted.data(), count) ||
                !same(dtype, out2.data(), wanted.data(), count) || !out2.guardsHold()) {
              test::fail(__FILE__, __LINE__,
                         "reduce2: " + describe(dtype, op, n, count, isa) + ", variant " +
                             std::to_string(variant));
              return;
            }
            // A copy of another array at the same time: empty, shorter, as long, longer.
            const size_t copied = count * size * static_cast<size_t>(variant) / 2;
            if (alias >= 0) std::memcpy(to, inputs[alias], count * size);
            Placed source(copied, skew), beside(copied, size);
            for (size_t i = 0; i < copied; ++i) source.data()[i] = static_cast<char>(i * 7);
            reduceAndCopy(dtype, op, to, in.data(), n, count, divisor, streaming,
                          {beside.data(), source.data(), copied});
            guardsHold = out.guardsHold() && beside.guardsHold();
            for (const Placed& one : placed) guardsHold = guardsHold && one.guardsHold();
            if (!same(dtype, to, wanted.data(), count) || !guardsHold ||
                std::memcmp(beside.data(), source.data(), copied) != 0) {
              test::fail(__FILE__, __LINE__,
                         "reduceAndCopy: " + describe(dtype, op, n, count, isa) + ", variant " +
                             std::to_string(variant));
              return;
            }
          }
        }
      }
    }
  }
}

// Random bits without infinities and NaNs. The result of two NaNs depends on the order in which the
// compiler passes them to the processor.
std::vector<char> finiteArray(DType dtype, std::mt19937_64& random) {
  const size_t bytes = elementSize(dtype);
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t number = isComplex ? bytes / 2 : bytes;
  std::vector<char> data(kMostElements * bytes);
  for (char& byte : data) byte = static_cast<char>(random());
  if (!isComplex && dtype > DType::kFloat8E5M2) return data;
  for (size_t at = number - 1; at < data.size(); at += number) {
    data[at] = static_cast<char>(data[at] & ~0x40);  // the highest bit of the exponent
  }
  return data;
}

// Cuts the tree over lo to hi at random into single inputs and nodes that are combined separately.
class RandomCut {
 public:
  RandomCut(DType dtype, ReduceOp op, const std::vector<std::vector<char>>& arrays, size_t count,
            std::mt19937_64& random)
      : dtype_(dtype), op_(op), arrays_(arrays), count_(count), random_(random) {}

  void cut(int lo, int hi, std::vector<Partial>* partials) {
    if (hi - lo == 1) {
      partials->push_back({lo, hi, arrays_[lo].data(), false});
      return;
    }
    const int middle = sumTree().middle(lo, hi);
    if (random_() % 2) {
      cut(lo, middle, partials);
      return cut(middle, hi, partials);
    }
    std::vector<Partial> parts;
    cut(lo, middle, &parts);
    cut(middle, hi, &parts);
    std::vector<char>& node = nodes_.emplace_back(count_ * elementSize(wideType(dtype_)));
    foldTree(dtype_, op_, node.data(), false, parts.data(), static_cast<int>(parts.size()), count_,
             1);
    partials->push_back({lo, hi, node.data(), true});
  }

 private:
  const DType dtype_;
  const ReduceOp op_;
  const std::vector<std::vector<char>>& arrays_;
  const size_t count_;
  std::mt19937_64& random_;
  std::deque<std::vector<char>> nodes_;
};

void checkSteps() {
  std::mt19937_64 random(3);
  for (int type = 0; type < static_cast<int>(DType::kCount); ++type) {
    const auto dtype = static_cast<DType>(type);
    std::vector<std::vector<char>> arrays;
    std::vector<const void*> pointers;
    for (int k = 0; k < kMostInputs; ++k) arrays.push_back(finiteArray(dtype, random));
    for (const auto& array : arrays) pointers.push_back(array.data());
    for (int each = 0; each < static_cast<int>(ReduceOp::kCount); ++each) {
      const auto op = static_cast<ReduceOp>(each);
      if (!isSupported(dtype, op)) continue;
      for (const Isa isa : isas()) {
        const ScopedIsa scoped(isa);
        for (int n = 1; n <= kMostInputs; ++n) {
          const size_t count = n % 2 ? kMostElements : static_cast<size_t>(1 + n);
          const size_t bytes = count * elementSize(dtype);
          std::vector<char> whole(bytes), inSteps(bytes);
          reduce(dtype, op, whole.data(), pointers.data(), n, count, n, false);
          RandomCut tree(dtype, op, arrays, count, random);
          std::vector<Partial> partials;
          tree.cut(0, n, &partials);
          foldTree(dtype, op, inSteps.data(), true, partials.data(),
                   static_cast<int>(partials.size()), count, n);
          if (whole == inSteps) continue;
          test::fail(__FILE__, __LINE__,
                     std::string(name(dtype)) + " " + name(op) + " of " + std::to_string(n) +
                         " inputs, " + name(isa));
        }
      }
    }
  }
}

// Sets MYCOLL_SUM_BLOCK for a scope.
struct ScopedBlock {
  explicit ScopedBlock(const char* value) : choice("MYCOLL_SUM_BLOCK", value) {
    reference::block = static_cast<size_t>(sumTree().block());
  }
  ~ScopedBlock() { reference::block = 1; }
  const test::ScopedEnv choice;
};

}  // namespace

TEST(Reduce, inStepsYieldsTheSameBits) { checkSteps(); }

// A hash of the results of all operations on a type, which is the same on all machines. The bits of
// NaNs depend on the processor and are not part of it.
TEST(Reduce, isTheSameOnAllMachines) {
  const std::map<DType, uint64_t> known = {
      {DType::kFloat32, 0xe193f9d8ef6ba585},    {DType::kFloat64, 0xd3c69f94af79ec5f},
      {DType::kFloat16, 0xb29040b9fd438a0f},    {DType::kBFloat16, 0xd5e78d19d5cc50f7},
      {DType::kFloat8E4M3, 0xb84cb1960721bd11}, {DType::kFloat8E5M2, 0x6cf5f8e0bb2627a},
      {DType::kInt8, 0x3e1aacf212ae3e24},       {DType::kUInt8, 0x46b35327daaa012b},
      {DType::kInt16, 0xa984084467f2c90a},      {DType::kUInt16, 0xa110029ab21b890f},
      {DType::kInt32, 0x5c01402578b5f906},      {DType::kUInt32, 0xd81ffb0f6220b694},
      {DType::kInt64, 0x60a2e6dc3ad61c31},      {DType::kUInt64, 0xe2d7c5765eb5686b},
      {DType::kBool, 0x5c99d1e756446538},       {DType::kComplex64, 0x6b8084aac52f270e},
      {DType::kComplex128, 0x6c7b8054db344bc1},
  };
  for (int type = 0; type < static_cast<int>(DType::kCount); ++type) {
    const auto dtype = static_cast<DType>(type);
    std::mt19937_64 random(static_cast<uint64_t>(type) + 1);
    std::vector<std::vector<char>> arrays;
    std::vector<const void*> pointers;
    for (int k = 0; k < kMostInputs; ++k) arrays.push_back(randomArray(dtype, random));
    for (const auto& array : arrays) pointers.push_back(array.data());
    const size_t laneBytes = dtype == DType::kComplex64    ? sizeof(float)
                             : dtype == DType::kComplex128 ? sizeof(double)
                                                           : elementSize(dtype);
    for (const Isa isa : isas()) {
      const ScopedIsa scoped(isa);
      uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
      for (int each = 0; each < static_cast<int>(ReduceOp::kCount); ++each) {
        const auto op = static_cast<ReduceOp>(each);
        if (!isSupported(dtype, op)) continue;
        for (int n = 1; n <= kMostInputs; ++n) {
          std::vector<char> out(kMostElements * elementSize(dtype));
          reduce(dtype, op, out.data(), pointers.data(), n, kMostElements, n, false);
          for (size_t at = 0; at < out.size(); ++at) {
            const bool isNan = isNanAt(dtype, out.data(), at / laneBytes);
            hash = (hash ^ (isNan ? 0 : static_cast<unsigned char>(out[at]))) * 0x100000001b3;
          }
        }
      }
      const auto found = known.find(dtype);
      if (found != known.end() && found->second == hash) continue;
      std::ostringstream text;
      text << name(dtype) << " with " << name(isa) << ": 0x" << std::hex << hash;
      test::fail(__FILE__, __LINE__, text.str());
    }
  }
}

TEST(Reduce, inBlocks) {
  for (const char* block : {"2", "3", "5"}) {
    const ScopedBlock scoped(block);
    EXPECT_EQ(sumTree().block(), block[0] - '0');
    testType(DType::kFloat32);
    testType(DType::kBFloat16);
    testType(DType::kBool);
    testType(DType::kInt16);
  }
  const ScopedBlock scoped("3");
  checkSteps();
}

TEST(SumTree, nodes) {
  for (const int block : {1, 2, 3, 4, 7}) {
    const SumTree tree(block);
    for (int ranks = 1; ranks <= 40; ++ranks) {
      std::set<std::pair<int, int>> nodes;
      const auto visit = [&](const auto& self, int lo, int hi) -> void {
        nodes.emplace(lo, hi);
        if (hi - lo < 2) return;
        const int middle = tree.middle(lo, hi);
        EXPECT(lo < middle && middle < hi);
        self(self, lo, middle);
        self(self, middle, hi);
      };
      visit(visit, 0, ranks);
      // Each block is a node.
      for (int lo = 0; lo < ranks; lo += block) {
        EXPECT(nodes.contains({lo, std::min(lo + block, ranks)}));
      }
    }
  }
}

TEST(Reduce, float32) { testType(DType::kFloat32); }
TEST(Reduce, float64) { testType(DType::kFloat64); }
TEST(Reduce, float16) { testType(DType::kFloat16); }
TEST(Reduce, bfloat16) { testType(DType::kBFloat16); }
TEST(Reduce, float8e4m3) { testType(DType::kFloat8E4M3); }
TEST(Reduce, float8e5m2) { testType(DType::kFloat8E5M2); }
TEST(Reduce, int8) { testType(DType::kInt8); }
TEST(Reduce, uint8) { testType(DType::kUInt8); }
TEST(Reduce, int16) { testType(DType::kInt16); }
TEST(Reduce, uint16) { testType(DType::kUInt16); }
TEST(Reduce, int32) { testType(DType::kInt32); }
TEST(Reduce, uint32) { testType(DType::kUInt32); }
TEST(Reduce, int64) { testType(DType::kInt64); }
TEST(Reduce, uint64) { testType(DType::kUInt64); }
TEST(Reduce, boolean) { testType(DType::kBool); }
TEST(Reduce, complex64) { testType(DType::kComplex64); }
TEST(Reduce, complex128) { testType(DType::kComplex128); }

TEST(Reduce, float8OverflowAsBeforeTorch213) {
  const uint8_t big[64] = {0x7e, 0xfe};  // 448, -448, then zeros
  const void* in[] = {big, big};
  for (const Isa isa : isas()) {
    const ScopedIsa scoped(isa);
    uint8_t out[64];
    reduce(DType::kFloat8E4M3, ReduceOp::kSum, out, in, 2, 64, 1, false);
    EXPECT_EQ(int{out[0]}, 0x7e);
    EXPECT_EQ(int{out[1]}, 0xfe);
    setFloat8Saturates(false);
    reduce(DType::kFloat8E4M3, ReduceOp::kSum, out, in, 2, 64, 1, false);
    setFloat8Saturates(true);
    EXPECT_EQ(int{out[0]}, 0x7f);
    EXPECT_EQ(int{out[1]}, 0xff);
    EXPECT_EQ(int{out[2]}, 0);
  }
}

TEST(Reduce, manyInputs) {
  constexpr int kInputs = 100;
  std::vector<std::vector<int32_t>> arrays(kInputs, std::vector<int32_t>(300));
  std::vector<const void*> in;
  for (int k = 0; k < kInputs; ++k) {
    for (int i = 0; i < 300; ++i) arrays[k][i] = k * i - 5000;
    in.push_back(arrays[k].data());
  }
  std::vector<int32_t> out(300);
  reduce(DType::kInt32, ReduceOp::kAvg, out.data(), in.data(), kInputs, 300, kInputs, false);
  for (int i = 0; i < 300; ++i) EXPECT_EQ(out[i], (4950 * i - 500000) / kInputs);
}

TEST(Copy, anySizeAnyAlignment) {
  std::mt19937_64 random(7);
  std::vector<char> source(20000);
  for (char& byte : source) byte = static_cast<char>(random());
  for (const Isa isa : isas()) {
    const ScopedIsa scoped(isa);
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{2047}, size_t{2048}, size_t{2049},
                               size_t{4096}, size_t{9999}, size_t{16384}}) {
      for (const size_t skew : {size_t{0}, size_t{1}, size_t{31}, size_t{63}}) {
        Placed to(bytes, skew);
        copyStreaming(to.data(), source.data() + 64 - skew, bytes);
        EXPECT(bytes == 0 || std::memcmp(to.data(), source.data() + 64 - skew, bytes) == 0);
        EXPECT(to.guardsHold());
        Placed again(bytes, skew);
        copy(again.data(), source.data() + skew, bytes);
        EXPECT(bytes == 0 || std::memcmp(again.data(), source.data() + skew, bytes) == 0);
        EXPECT(again.guardsHold());
      }
    }
  }
}

TEST(Copy, lessThanALineBehindItsSourceWithinAPage) {
  std::mt19937_64 random(9);
  std::vector<char> source(20000 + 4096);
  for (char& byte : source) byte = static_cast<char>(random());
  char* const from = source.data() + 4096 - reinterpret_cast<uintptr_t>(source.data()) % 4096;
  for (const Isa isa : isas()) {
    const ScopedIsa scoped(isa);
    for (const size_t bytes : {2047, 2048, 2049, 4095, 15000}) {
      for (const size_t behind : {0, 1, 4, 16, 63, 64}) {
        Placed to(bytes + 4096, 0);
        char* const target =
            to.data() + (4096 - reinterpret_cast<uintptr_t>(to.data()) % 4096 + behind) % 4096;
        copy(target, from, bytes);
        EXPECT(std::memcmp(target, from, bytes) == 0);
        EXPECT(std::all_of(to.data(), target, [](char byte) { return byte == 0x5a; }));
        EXPECT(std::all_of(target + bytes, to.data() + bytes + 4096,
                           [](char byte) { return byte == 0x5a; }));
      }
    }
  }
}

TEST(Copy, oneSourceToTwoPlaces) {
  std::mt19937_64 random(8);
  std::vector<char> source(200'000);
  for (char& byte : source) byte = static_cast<char>(random());
  for (const size_t bytes : {0, 1, 5000, 32768, 32769, 199'937}) {
    for (const int streaming : {0, 1, 2, 3}) {
      Placed to(bytes, 31), also(bytes, 7);
      copyToBoth(to.data(), streaming & 1, also.data(), streaming & 2, source.data() + 63, bytes);
      EXPECT(bytes == 0 || std::memcmp(to.data(), source.data() + 63, bytes) == 0);
      EXPECT(bytes == 0 || std::memcmp(also.data(), source.data() + 63, bytes) == 0);
      EXPECT(to.guardsHold() && also.guardsHold());
    }
  }
}
