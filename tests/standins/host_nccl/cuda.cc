// What NCCL asks of CUDA beyond ../cuda/runtime.cpp, with CUDA's own declarations. Hidden in the library
// that it is linked into, so NCCL's calls find these before the runtime's, and nobody else does.
//
// Kernels do nothing, but they run as kernels do: in the order of their stream, on the device that is
// current, and they read the communicator's memory. hostNcclHoldKernels() keeps them running, as those
// of a collective whose other ranks do not come, until the communicator is aborted.
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "device.h"
#include "nccl.h"
#include "standin_device.h"

namespace {

std::atomic<bool> isHeld{false};
std::atomic<int64_t> launches{0}, running{0};

struct Launch {
  ncclKernelComm* comm;
};

void run(void* argument) {
  ++running;
  auto* const launch = static_cast<Launch*>(argument);
  while (isHeld) {
    const auto* const comm = static_cast<const ncclKernelComm*>(
        mycoll_standin_touch(launch->comm, sizeof(ncclKernelComm), "a kernel of NCCL's"));
    if (comm->abortFlag != nullptr && *comm->abortFlag != 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  --running;
}

CUresult launch(void* stream, void** extra) {
  mycoll_standin_enter();
  if (mycoll_standin_stream_device(stream) != mycoll_standin_current_device()) {
    std::fprintf(stderr, "host_nccl: a kernel on a stream of device %d while device %d is current\n",
                 mycoll_standin_stream_device(stream), mycoll_standin_current_device());
    return CUDA_ERROR_INVALID_HANDLE;
  }
  ncclDevKernelArgs arguments;
  std::memcpy(&arguments, extra[1], sizeof arguments);
  ++launches;
  mycoll_standin_enqueue_owned(stream, &run, new Launch{arguments.comm},
                               [](void* owned) { delete static_cast<Launch*>(owned); });
  return CUDA_SUCCESS;
}

// Memory of another process is as much memory of this one: no kernel looks at it.
struct Opened {
  std::mutex mutex;
  std::map<void*, int> blocks;
};
Opened& opened() {
  static Opened& all = *new Opened;
  return all;
}

// --- the driver

CUresult errorString(CUresult, const char** text) {
  *text = "an error of the stand-in for CUDA's driver";
  return CUDA_SUCCESS;
}
CUresult deviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult deviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult deviceGetUuid(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(device + 1);
  return CUDA_SUCCESS;
}
// A device has one context.
CUresult ctxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(uintptr_t(mycoll_standin_current_device()) + 1);
  return CUDA_SUCCESS;
}
CUresult ctxSetCurrent(CUcontext context) {
  mycoll_standin_set_current_device(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult ctxGetDevice(CUdevice* device) {
  *device = mycoll_standin_current_device();
  return CUDA_SUCCESS;
}
CUresult launchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void** extra) {
  return launch(config->hStream, extra);
}
CUresult launchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, CUstream stream, void**, void** extra) {
  return launch(stream, extra);
}
CUresult pointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  const int device = mycoll_standin_pointer_device(reinterpret_cast<void*>(address));
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(data) = device; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<CUmemorytype*>(data) = device >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *static_cast<int*>(data) = 1; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& driver() {
  static const auto& known = *new std::map<std::string, void*>{
      {"cuGetErrorString", reinterpret_cast<void*>(&errorString)},
      {"cuGetErrorName", reinterpret_cast<void*>(&errorString)},
      {"cuDeviceGet", reinterpret_cast<void*>(&deviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&deviceGetAttribute)},
      {"cuDeviceGetUuid", reinterpret_cast<void*>(&deviceGetUuid)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&ctxGetCurrent)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&ctxSetCurrent)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(&ctxGetDevice)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(&launchKernelEx)},
      {"cuLaunchKernel", reinterpret_cast<void*>(&launchKernel)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(&pointerGetAttribute)},
  };
  return known;
}

}  // namespace

extern "C" {

// --- for tests

STANDIN_API void hostNcclHoldKernels(int isOn) { isHeld = isOn != 0; }
STANDIN_API int64_t hostNcclLaunches() { return launches; }
STANDIN_API int64_t hostNcclRunning() { return running; }

// --- devices and functions

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
// In a PCI domain that this machine does not have: NCCL reads about devices in /sys.
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "00a0:%02x:00.0", static_cast<unsigned>(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const auto found = driver().find(symbol);
  *function = found != driver().end() ? found->second : nullptr;
  *status = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

// --- memory

cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  if (mycoll_standin_pointer_device(memory) < 0) return cudaErrorInvalidValue;
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &memory, sizeof memory);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned) {
  mycoll_standin_enter();
  *memory = mycoll_standin_malloc(1, nullptr);
  std::lock_guard<std::mutex> lock(opened().mutex);
  ++opened().blocks[*memory];
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  {
    std::lock_guard<std::mutex> lock(opened().mutex);
    if (opened().blocks.erase(memory) == 0) return cudaErrorInvalidValue;
  }
  return cudaFree(memory);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = reinterpret_cast<cudaMemPool_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete reinterpret_cast<char*>(pool);
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t,
                                    cudaStream_t stream) {
  mycoll_standin_enter();
  *memory = mycoll_standin_malloc(bytes, stream);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  mycoll_standin_free(memory);
  return cudaSuccess;
}

// --- graphs: captures of NCCL's calls are refused

cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*,
                                        size_t, cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                     const cudaGraphEdgeData*, size_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaMemcpyBatchAsync(void* const*, const void* const*, const size_t*, size_t,
                                 cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"
