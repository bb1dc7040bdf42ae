// The few functions of the CUDA runtime that neither NCCL nor torch's device-generic classes offer:
// what a captured stream needs. Found in the process by name, since mycoll is built without CUDA;
// where there is no CUDA runtime everything here says so and does nothing.
//
// Thread contract: [any thread]. Found once, at first use; nothing is locked afterwards.
// Lifetimes: nothing is owned here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mycoll::nccl {

// A stream under graph capture.
struct CaptureInfo {
  bool isCapturing = false;
  uint64_t id = 0;        // unique in the process; 0 when not capturing
  void* graph = nullptr;  // cudaGraph_t that is being built; null when not capturing or not known
};

class Cudart {
 public:
  // That of this process. It is looked for until it has been found: torch may load it late.
  static const Cudart& get();

  // False: no CUDA runtime in this process, and all below return false.
  bool isThere() const { return streamIsCapturing_ != nullptr; }
  int version() const { return version_; }  // 13000; 0 when not there

  // "0000:3b:00.0": the GPU behind a device's number, by which NCCL tells whether two ranks share
  // one. False where that is not known.
  static bool busId(int device, std::string* id);

  // False when the question could not be answered; *info then says "not capturing".
  bool capture(void* stream, CaptureInfo* info) const;

  // destroy(object) is called once: when the graph and all that was instantiated from it are gone,
  // on a thread of CUDA's, where it must not call CUDA; or before a return of false.
  bool retain(void* graph, void* object, void (*destroy)(void*)) const;

 private:
  friend class RelaxedCapture;
  Cudart() = default;
  static Cudart find();
  bool succeeded(int error) const;

  int version_ = 0;
  int (*streamIsCapturing_)(void* stream, int* status) = nullptr;
  int (*captureInfo2_)(void*, int*, unsigned long long*, void**, const void**, size_t*) = nullptr;
  int (*captureInfo3_)(void*, int*, unsigned long long*, void**, const void**, const void**,
                       size_t*) = nullptr;
  int (*exchangeCaptureMode_)(int* mode) = nullptr;
  int (*userObjectCreate_)(void** object, void* pointer, void (*destroy)(void*), unsigned count,
                           unsigned flags) = nullptr;
  int (*userObjectRelease_)(void* object, unsigned count) = nullptr;
  int (*graphRetainUserObject_)(void* graph, void* object, unsigned count,
                                unsigned flags) = nullptr;
  int (*getLastError_)() = nullptr;
};

// While it lives, this thread may call what CUDA forbids while any thread captures (event queries,
// allocations) without spoiling that capture.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; then what was in force before
  bool isExchanged_ = false;
};

}  // namespace mycoll::nccl
