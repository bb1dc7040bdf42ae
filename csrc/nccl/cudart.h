// A few functions of the CUDA runtime that NCCL and torch's device-generic classes do not offer, or
// that are slow there. Found in the process by name, since mycoll is built without CUDA; without a
// CUDA runtime every function reports failure.
//
// Thread contract: [any thread]. Found once, at first use; nothing is locked afterwards.
// Lifetimes: nothing is owned here.
#pragma once

#include <string>

namespace mycoll::nccl {

class Cudart {
 public:
  // The runtime of this process. Searched for until it is found: torch may load it late.
  static const Cudart& get();

  // False: no CUDA runtime in this process, and all below return false.
  bool isThere() const { return streamIsCapturing_ != nullptr; }

  // "0000:3b:00.0": the GPU of a device number, by which NCCL detects that two ranks share a GPU.
  // False where that is not known.
  static bool busId(int device, std::string* id);

  // Whether the stream is under graph capture; false where that is not known.
  bool isCapturing(void* stream) const;

  // Records the event on the stream; makes the stream wait for the event. False: it failed. The
  // stream's device must be the current one.
  bool record(void* event, void* stream) const;
  bool block(void* event, void* stream) const;

  // 90 for sm_90; 0 where it is not known.
  int capability(int device) const;

 private:
  friend class RelaxedCapture;
  Cudart() = default;
  static Cudart find();
  bool succeeded(int error) const;

  int (*streamIsCapturing_)(void* stream, int* status) = nullptr;
  int (*eventRecord_)(void* event, void* stream) = nullptr;
  int (*streamWaitEvent_)(void* stream, void* event, unsigned int flags) = nullptr;
  int (*exchangeCaptureMode_)(int* mode) = nullptr;
  int (*deviceGetAttribute_)(int* value, int attribute, int device) = nullptr;
  int (*getLastError_)() = nullptr;
};

// While it lives, this thread may make calls that CUDA forbids while any thread captures (event
// queries, allocations) without invalidating that capture. Events recorded in a capture must not be
// queried even so: that invalidates it.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; then the previous mode
  bool isExchanged_ = false;
};

}  // namespace mycoll::nccl
