// csrc/nccl/cudart.h over a CUDA runtime of three variables. The program exports the functions, so
// that they are found as a real runtime's are.
#include <thread>

#include "nccl/cudart.h"
#include "test.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace {

thread_local int captureMode = 0;
int lastError = 0;
bool isCapturing = false, isRefusing = false;
void* held = nullptr;
void (*destroyHeld)(void*) = nullptr;
constexpr int kError = 700;

int answer(int error) {
  if (error != 0) lastError = error;
  return error;
}

}  // namespace

FAKE_CUDA int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
FAKE_CUDA int cudaGetLastError() { return std::exchange(lastError, 0); }
FAKE_CUDA int cudaStreamIsCapturing(void*, int* status) {
  *status = isCapturing ? 1 : 0;
  return answer(isRefusing ? kError : 0);
}
// As CUDA 13 has it.
FAKE_CUDA int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id,
                                       void** graph, const void**, const void**, size_t*) {
  *id = 42;
  *graph = stream;
  return cudaStreamIsCapturing(stream, status);
}
FAKE_CUDA int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, captureMode);
  return 0;
}
FAKE_CUDA int cudaUserObjectCreate(void** object, void* pointer, void (*destroy)(void*),
                                   unsigned count, unsigned flags) {
  if (count != 1 || flags != 1) return answer(kError);
  held = pointer;
  destroyHeld = destroy;
  *object = &held;
  return 0;
}
FAKE_CUDA int cudaUserObjectRelease(void* object, unsigned) {
  destroyHeld(*static_cast<void**>(object));
  return 0;
}
FAKE_CUDA int cudaGraphRetainUserObject(void*, void*, unsigned count, unsigned flags) {
  return answer(isRefusing || count != 1 || flags != 1 ? kError : 0);
}

namespace mycoll::nccl {
namespace {

TEST(Cudart, tellsOfACapture) {
  const Cudart& cudart = Cudart::get();
  EXPECT(cudart.isThere());
  EXPECT_EQ(cudart.version(), 13000);
  int stream = 0;
  CaptureInfo info;
  EXPECT(cudart.capture(&stream, &info));
  EXPECT(!info.isCapturing && info.id == 0 && info.graph == nullptr);
  isCapturing = true;
  EXPECT(cudart.capture(&stream, &info));
  EXPECT(info.isCapturing && info.id == 42 && info.graph == &stream);
  // An error is not left for others to find.
  isRefusing = true;
  EXPECT(!cudart.capture(&stream, &info));
  EXPECT(!info.isCapturing);
  EXPECT_EQ(lastError, 0);
  isCapturing = isRefusing = false;
}

TEST(Cudart, givesAGraphWhatItHolds) {
  const Cudart& cudart = Cudart::get();
  int destroyed = 0, graph = 0;
  auto destroy = [](void* count) { ++*static_cast<int*>(count); };
  EXPECT(cudart.retain(&graph, &destroyed, destroy));
  EXPECT_EQ(destroyed, 0);
  isRefusing = true;
  EXPECT(!cudart.retain(&graph, &destroyed, destroy));
  EXPECT_EQ(destroyed, 1);
  isRefusing = false;
}

TEST(Cudart, relaxesOneThreadForAWhile) {
  {
    RelaxedCapture relaxed;
    EXPECT_EQ(captureMode, 2);
    std::thread([] { EXPECT_EQ(captureMode, 0); }).join();
  }
  EXPECT_EQ(captureMode, 0);
}

}  // namespace
}  // namespace mycoll::nccl
