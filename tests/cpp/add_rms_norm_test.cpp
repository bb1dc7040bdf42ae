// kernels/add_rms_norm.h: against numbers by the book, and one instruction set against the other.
#include "kernels/add_rms_norm.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/isa.h"
#include "reduce_reference.h"
#include "test.h"

using namespace mycoll;
using namespace mycoll::reference;

namespace {

float valueAt(DType dtype, const std::vector<char>& array, size_t i) {
  if (dtype == DType::kFloat32) return at<float>(array.data(), i);
  return formatOf(dtype).decode(at<uint16_t>(array.data(), i));
}

float rounded(DType dtype, float value) {
  if (dtype == DType::kFloat32) return value;
  return formatOf(dtype).decode(formatOf(dtype).encode(value));
}

std::vector<char> randomArray(DType dtype, size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<char> array(count * elementSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    if (dtype == DType::kFloat32) {
      put(array.data(), i, value);
    } else {
      put(array.data(), i, static_cast<uint16_t>(formatOf(dtype).encode(value)));
    }
  }
  return array;
}

struct Result {
  std::vector<char> residual;
  std::vector<char> out;
};

void checkShape(DType dtype, size_t rows, size_t width, std::mt19937_64& random) {
  constexpr size_t kGuard = 64;
  constexpr float kEpsilon = 1e-5f;
  const size_t bytes = rows * width * elementSize(dtype);
  const std::vector<char> sum = randomArray(dtype, rows * width, random);
  const std::vector<char> residual = randomArray(dtype, rows * width, random);
  const std::vector<char> weight = randomArray(dtype, width, random);
  const std::vector<char> guard(kGuard, 0x5a);
  std::vector<Result> results;
  for (int isa = 0; isa <= static_cast<int>(detectIsa()); ++isa) {
    setActiveIsa(static_cast<Isa>(isa));
    Result& result = results.emplace_back();
    // The sum gives way to the new residual, as the operator has it.
    result.residual = sum;
    result.residual.insert(result.residual.end(), guard.begin(), guard.end());
    result.out.assign(bytes + kGuard, 0x5a);
    addRmsNorm(dtype, {result.residual.data(), residual.data(), weight.data(),
                       result.residual.data(), result.out.data(), rows, width, kEpsilon});
    EXPECT(std::memcmp(result.residual.data() + bytes, guard.data(), kGuard) == 0);
    EXPECT(std::memcmp(result.out.data() + bytes, guard.data(), kGuard) == 0);
    EXPECT(result.residual == results.front().residual);
    EXPECT(result.out == results.front().out);
  }
  setActiveIsa(detectIsa());
  const Result& result = results.front();
  for (size_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      const float total = rounded(dtype, valueAt(dtype, sum, i) + valueAt(dtype, residual, i));
      EXPECT(valueAt(dtype, result.residual, i) == total);
      squares += static_cast<double>(total) * total;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + kEpsilon);
    const double step = dtype == DType::kFloat32 ? 1e-6 : dtype == DType::kFloat16 ? 1e-3 : 1e-2;
    for (size_t i = 0; i < width; ++i) {
      const double want =
          valueAt(dtype, result.residual, row * width + i) * scale * valueAt(dtype, weight, i);
      const double got = valueAt(dtype, result.out, row * width + i);
      EXPECT(std::fabs(got - want) <= step * std::fabs(want) + 1e-6);
    }
  }
}

}  // namespace

TEST(AddRmsNorm, everyWidthUnderEveryInstructionSet) {
  std::mt19937_64 random(11);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (size_t width = 1; width <= 200; ++width) checkShape(dtype, 2, width, random);
    for (const size_t width : {size_t{1024}, size_t{4096}, size_t{4099}}) {
      checkShape(dtype, 3, width, random);
    }
    checkShape(dtype, 0, 8, random);
  }
}
