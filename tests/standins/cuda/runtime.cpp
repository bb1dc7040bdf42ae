// libmycoll_standin_cuda.so: a CUDA runtime for a torch that is built with CUDA 13, on a machine
// without a GPU. When it is preloaded, its functions replace libcudart's; functions that it does
// not have (device code, libraries) remain NVIDIA's and are never reached. Torch's own streams,
// allocator, graphs and nccl backend then run on the stand-in device. It has no kernels: torch's
// operators come from kernels.cpp in this folder, and launching a kernel is an error that names it.
//
// Written from CUDA's documentation of the runtime API. Unlike in CUDA, the default stream does not
// wait for others; torch creates its streams with the flag that has the same effect.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "properties.h"
#include "standin_device.h"

namespace {

using namespace standin::cuda;

enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidDevice = 101,
  kNotReady = 600,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
};

constexpr int kVersion = 13000;
constexpr int kGreatestPriority = -5;
constexpr size_t kMemoryBytes = size_t{8} << 30;

thread_local Error lastError = kSuccess;
thread_local std::string lastSentence;

Error fail(Error error, std::string sentence) {
  lastSentence = std::move(sentence);
  return lastError = error;
}

// The device refuses calls only because of captures.
Error outcome(const char* refusal) {
  return refusal == nullptr ? kSuccess : fail(kCaptureUnsupported, refusal);
}

Error isReady(const char* refusal, int isDone) {
  if (refusal != nullptr) return outcome(refusal);
  return isDone ? kSuccess : (lastError = kNotReady);
}

Error missing(const char* function) {
  return fail(kNotSupported, std::string(function) + " is not in the stand-in for CUDA's runtime");
}

// Called by every function of the runtime that needs a device.
void enter() {
  mycoll_standin_enter();
  mycoll_standin_spend(0);
}

// --- kernels, by name

struct Names {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> all;
};

Names& names() {
  static Names& known = *new Names;
  return known;
}

// The only kernel is that of torch.cuda._sleep: it blocks its stream for a number of cycles.
Error launch(const void* function, void** arguments, void* stream) {
  constexpr int64_t kCyclesPerMicrosecond = 1800;
  std::lock_guard<std::mutex> lock(names().mutex);
  const auto found = names().all.find(function);
  const std::string name = found != names().all.end() ? found->second : "an unknown one";
  if (name.find("spin_kernel") != std::string::npos) {
    mycoll_standin_stream_sleep(stream,
                                *static_cast<int64_t*>(arguments[0]) / kCyclesPerMicrosecond);
    return kSuccess;
  }
  return fail(kNotSupported,
              "the stand-in for CUDA's runtime has no kernels, and was given " + name);
}

struct Field {
  size_t place;
  int value;
};
#define STANDIN_FIELD(field, place, value) {place, value},
constexpr Field kProperties[] = {STANDIN_PROPERTIES(STANDIN_FIELD)};

struct PointerAttributes {
  int type;  // 0: unknown, 1: pinned, 2: device memory
  int device;
  void* devicePointer;
  void* hostPointer;
  long reserved[8];
};

}  // namespace

#define API extern "C" STANDIN_API Error

// --- errors

API cudaGetLastError() { return std::exchange(lastError, kSuccess); }
API cudaPeekAtLastError() { return lastError; }

extern "C" STANDIN_API const char* cudaGetErrorString(int error) {
  if (!lastSentence.empty() && error != kSuccess) return lastSentence.c_str();
  return error == kSuccess ? "no error" : "an error of the stand-in for CUDA's runtime";
}

extern "C" STANDIN_API const char* cudaGetErrorName(int error) {
  switch (error) {
    case kSuccess: return "cudaSuccess";
    case kInvalidValue: return "cudaErrorInvalidValue";
    case kMemoryAllocation: return "cudaErrorMemoryAllocation";
    case kInvalidDevice: return "cudaErrorInvalidDevice";
    case kNotReady: return "cudaErrorNotReady";
    case kNotSupported: return "cudaErrorNotSupported";
    case kCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
  }
}

// --- devices

API cudaGetDeviceCount(int* count) {
  *count = mycoll_standin_device_count();
  return kSuccess;
}

API cudaGetDevice(int* device) {
  *device = mycoll_standin_current_device();
  return kSuccess;
}

API cudaSetDevice(int device) {
  if (device < 0 || device >= mycoll_standin_device_count()) {
    return fail(kInvalidDevice, "there is no device " + std::to_string(device));
  }
  mycoll_standin_set_current_device(device);
  enter();
  return kSuccess;
}

API cudaDeviceSynchronize() {
  enter();
  return outcome(mycoll_standin_device_synchronize(mycoll_standin_current_device()));
}

API cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
API cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

API cudaGetDeviceProperties(void* properties, int device) {
  auto* const bytes = static_cast<char*>(properties);
  std::memset(bytes, 0, kPropertiesBytes);
  std::snprintf(bytes, 256, "stand-in");
  bytes[kUuidOffset] = static_cast<char>(device + 1);
  std::memcpy(bytes + kTotalGlobalMemOffset, &kMemoryBytes, sizeof kMemoryBytes);
  for (const Field& field : kProperties) {
    std::memcpy(bytes + field.place, &field.value, sizeof field.value);
  }
  std::memcpy(bytes + kPciBusIdOffset, &device, sizeof device);
  return kSuccess;
}

API cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return kSuccess;
}
API cudaDeviceEnablePeerAccess(int, unsigned) {
  enter();
  return kSuccess;
}

API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return kSuccess;
}

API cudaMemGetInfo(size_t* available, size_t* total) {
  enter();
  mycoll_standin_counts counts;
  mycoll_standin_count(&counts);
  *total = kMemoryBytes;
  *available = kMemoryBytes - std::min(kMemoryBytes, static_cast<size_t>(counts.liveBytes));
  return kSuccess;
}

// --- streams. CUDA's handle 0 is the current device's default stream, as in standin_device.h.

API cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
  enter();
  *stream = mycoll_standin_stream_create(mycoll_standin_current_device(), priority);
  return kSuccess;
}
API cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// Streams are never freed.
API cudaStreamDestroy(void*) {
  enter();
  return kSuccess;
}

API cudaStreamGetPriority(void* stream, int* priority) {
  *priority = mycoll_standin_stream_priority(stream);
  return kSuccess;
}

API cudaStreamSynchronize(void* stream) {
  enter();
  return outcome(mycoll_standin_stream_synchronize(stream));
}

API cudaStreamQuery(void* stream) {
  enter();
  int isDone = 0;
  const char* const refusal = mycoll_standin_stream_query(stream, &isDone);
  return isReady(refusal, isDone);
}

API cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  enter();
  return outcome(mycoll_standin_event_block(event, stream));
}

API cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  enter();
  mycoll_standin_enqueue(stream, function, argument);
  return kSuccess;
}

// --- events

API cudaEventCreateWithFlags(void** event, unsigned) {
  enter();
  *event = mycoll_standin_event_create();
  return kSuccess;
}
API cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }

API cudaEventDestroy(void* event) {
  enter();
  mycoll_standin_event_destroy(event);
  return kSuccess;
}

API cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  enter();
  return outcome(mycoll_standin_event_record(event, stream));
}
API cudaEventRecord(void* event, void* stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaEventQuery(void* event) {
  enter();
  int isDone = 0;
  const char* const refusal = mycoll_standin_event_query(event, &isDone);
  return isReady(refusal, isDone);
}

API cudaEventSynchronize(void* event) {
  enter();
  return outcome(mycoll_standin_event_synchronize(event));
}

API cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
  enter();
  double time = 0;
  const char* const refusal = mycoll_standin_event_elapsed(start, end, &time);
  *milliseconds = static_cast<float>(time);
  return outcome(refusal);
}

// --- memory

API cudaMalloc(void** address, size_t bytes) {
  enter();
  *address = mycoll_standin_malloc(bytes, nullptr);
  return *address != nullptr ? kSuccess : fail(kMemoryAllocation, "the device's memory is full");
}

// Waits until the device has finished all work, as cudaFree does.
API cudaFree(void* address) {
  enter();
  if (address == nullptr) return kSuccess;
  const char* const refusal =
      mycoll_standin_device_synchronize(mycoll_standin_pointer_device(address));
  mycoll_standin_free(address);
  return outcome(refusal);
}

API cudaHostAlloc(void** address, size_t bytes, unsigned) {
  enter();
  *address = mycoll_standin_host_malloc(bytes);
  return *address != nullptr ? kSuccess : fail(kMemoryAllocation, "no memory");
}
API cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
API cudaFreeHost(void* address) {
  enter();
  mycoll_standin_free(address);
  return kSuccess;
}

API cudaPointerGetAttributes(PointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->device = mycoll_standin_pointer_device(address);
  if (attributes->device >= 0) {
    attributes->type = 2;
    attributes->devicePointer = const_cast<void*>(address);
  } else if (mycoll_standin_is_pinned(address)) {
    *attributes = {1, 0, const_cast<void*>(address), const_cast<void*>(address), {}};
  }
  return kSuccess;
}

API cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, void* stream) {
  enter();
  return outcome(mycoll_standin_copy(target, source, bytes, stream));
}
API cudaMemcpy(void* target, const void* source, size_t bytes, int) {
  enter();
  const char* const refusal = mycoll_standin_copy(target, source, bytes, nullptr);
  return outcome(refusal != nullptr ? refusal : mycoll_standin_stream_synchronize(nullptr));
}
API cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, void* stream) {
  enter();
  return outcome(mycoll_standin_copy(target, source, bytes, stream));
}

API cudaMemsetAsync(void* target, int byte, size_t bytes, void* stream) {
  enter();
  mycoll_standin_fill(target, byte, bytes, stream);
  return kSuccess;
}
API cudaMemset(void* target, int byte, size_t bytes) {
  return cudaMemsetAsync(target, byte, bytes, nullptr);
}

// --- graphs. An instantiated graph is the captured graph itself.

API cudaStreamBeginCapture(void* stream, int mode) {
  enter();
  return outcome(mycoll_standin_capture_begin(stream, mode));
}

API cudaStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;
  return outcome(mycoll_standin_capture_end(stream, graph));
}

API cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph,
                             const void** dependencies, const void** edges, size_t* count) {
  enter();
  const uint64_t capture = mycoll_standin_capture_id(stream);
  *status = capture != 0 ? 1 : 0;
  if (id != nullptr) *id = capture;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return kSuccess;
}

API cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  enter();
  *executable = mycoll_standin_graph_share(graph);
  return kSuccess;
}
API cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API cudaGraphLaunch(void* executable, void* stream) {
  enter();
  mycoll_standin_graph_launch(executable, stream);
  return kSuccess;
}

API cudaGraphDestroy(void* graph) {
  enter();
  mycoll_standin_graph_destroy(graph);
  return kSuccess;
}
API cudaGraphExecDestroy(void* executable) { return cudaGraphDestroy(executable); }

API cudaGraphGetNodes(void*, void*, size_t* count) {
  *count = 1;  // torch checks that the graph is not empty
  return kSuccess;
}

// --- the driver: functions that torch calls when it starts

API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* isActive) {
  *flags = 0;
  *isActive = (mycoll_standin_device_contexts() >> device & 1) != 0;
  return kSuccess;
}

API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
// The device has none of the optional features: virtual memory management, multicast, ...
API cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return kSuccess;
}
API cuGetErrorString(int error, const char** text) {
  *text = cudaGetErrorString(error);
  return kSuccess;
}

namespace {
Error refuseDriver() { return kNotSupported; }  // only the runtime keeps a last error
}  // namespace

API cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                     unsigned long long, int* status) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(&refuseDriver);
  if (status != nullptr) *status = 0;
  return kSuccess;
}

// Programs recognize the library by this symbol.
extern "C" {
STANDIN_API extern const int mycoll_standin_cuda = kVersion;
}

// --- kernels

extern "C" STANDIN_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
extern "C" STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" STANDIN_API void __cudaUnregisterFatBinary(void**) {}
extern "C" STANDIN_API char __cudaInitModule(void**) { return 1; }
extern "C" STANDIN_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int,
                                              int) {}

extern "C" STANDIN_API void __cudaRegisterFunction(void**, const char* function, char*,
                                                   const char* name, int, void*, void*, void*,
                                                   void*, int*) {
  std::lock_guard<std::mutex> lock(names().mutex);
  names().all.emplace(function, name);
}

API __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return kSuccess;
}

struct Dim3 {
  unsigned x, y, z;
};
thread_local void* launchStream = nullptr;

extern "C" STANDIN_API unsigned __cudaPushCallConfiguration(Dim3, Dim3, size_t, void* stream) {
  launchStream = stream;
  return 0;
}
API __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = *block = {1, 1, 1};
  *shared = 0;
  *stream = launchStream;
  return kSuccess;
}

API __cudaLaunchKernel(const void* kernel, Dim3, Dim3, void** arguments, size_t, void* stream) {
  return launch(kernel, arguments, stream);
}
API cudaLaunchKernel(const void* function, Dim3, Dim3, void** arguments, size_t, void* stream) {
  return launch(function, arguments, stream);
}
struct LaunchConfig {
  Dim3 grid, block;
  size_t sharedBytes;
  void* stream;
};
API cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** arguments) {
  return launch(function, arguments, config->stream);
}

// --- functions that torch is linked with and that always fail

API cudaHostRegister(void*, size_t, unsigned) { return missing("cudaHostRegister"); }
API cudaHostUnregister(void*) { return missing("cudaHostUnregister"); }
API cudaIpcGetMemHandle(void*, void*) { return missing("cudaIpcGetMemHandle"); }
API cudaIpcOpenMemHandle(void*, void*, unsigned) { return missing("cudaIpcOpenMemHandle"); }
API cudaIpcCloseMemHandle(void*) { return missing("cudaIpcCloseMemHandle"); }
API cudaIpcGetEventHandle(void*, void*) { return missing("cudaIpcGetEventHandle"); }
API cudaIpcOpenEventHandle(void*, void*) { return missing("cudaIpcOpenEventHandle"); }
API cudaMallocAsync(void**, size_t, void*) { return missing("cudaMallocAsync"); }
API cudaFreeAsync(void*, void*) { return missing("cudaFreeAsync"); }
API cudaDeviceGetDefaultMemPool(void**, int) { return missing("cudaDeviceGetDefaultMemPool"); }
API cudaGetSymbolAddress(void**, const void*) { return missing("cudaGetSymbolAddress"); }
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) {
  return missing("cudaMemcpyToSymbol");
}
API cudaFuncGetAttributes(void*, const void*) { return missing("cudaFuncGetAttributes"); }
API cudaFuncSetAttribute(const void*, int, int) { return missing("cudaFuncSetAttribute"); }
API cudaStreamAddCallback(void*, void*, void*, unsigned) {
  return missing("cudaStreamAddCallback");
}
