// csrc/nccl/cudart.h with a fake CUDA runtime. The program exports its functions, so they are found
// as those of a real runtime are.
#include <thread>

#include "nccl/cudart.h"
#include "test.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace {

thread_local int captureMode = 0;
int lastError = 0;
bool isCapturing = false, isRefusing = false;
constexpr int kError = 700;

int answer(int error) {
  if (error != 0) lastError = error;
  return error;
}

}  // namespace

FAKE_CUDA int cudaGetLastError() { return std::exchange(lastError, 0); }
FAKE_CUDA int cudaStreamIsCapturing(void*, int* status) {
  *status = isCapturing ? 1 : 0;
  return answer(isRefusing ? kError : 0);
}
FAKE_CUDA int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, captureMode);
  return 0;
}
FAKE_CUDA int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 6 : -1;
  return answer(device == 0 ? 0 : kError);
}

namespace mycoll::nccl {
namespace {

TEST(Cudart, reportsACapture) {
  const Cudart& cudart = Cudart::get();
  EXPECT(cudart.isThere());
  int stream = 0;
  EXPECT(!cudart.isCapturing(&stream));
  isCapturing = true;
  EXPECT(cudart.isCapturing(&stream));
  // An error is cleared, so that other code does not find it.
  isRefusing = true;
  EXPECT(!cudart.isCapturing(&stream));
  EXPECT_EQ(lastError, 0);
  isCapturing = isRefusing = false;
}

TEST(Cudart, returnsTheCapabilityOfAGpu) {
  const Cudart& cudart = Cudart::get();
  EXPECT_EQ(cudart.capability(0), 86);
  EXPECT_EQ(cudart.capability(1), 0);
  EXPECT_EQ(lastError, 0);
}

TEST(Cudart, relaxesOneThreadForAScope) {
  {
    RelaxedCapture relaxed;
    EXPECT_EQ(captureMode, 2);
    std::thread([] { EXPECT_EQ(captureMode, 0); }).join();
  }
  EXPECT_EQ(captureMode, 0);
}

}  // namespace
}  // namespace mycoll::nccl
