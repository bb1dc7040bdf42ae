// What NCCL asks of CUDA beyond ../cuda/runtime.cpp, with CUDA's own declarations. Hidden in the
// library that it is linked into, so NCCL's calls find these before the runtime's, and nobody else
// does.
//
// Kernels do nothing, but they run as kernels do: in the order of their stream, on the device that
// is current, and they read the communicator's memory. hostNcclHoldKernels() keeps them running, as
// those of a collective whose other ranks do not come, until the communicator is aborted.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
    std::fprintf(stderr,
                 "host_nccl: a kernel on a stream of device %d while device %d is current\n",
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

// --- memory that is mapped by hand. What is reserved is memory already, and stays until it is
// given back; mapping, handles and their counts are only looked after.

constexpr size_t kGranularity = size_t{64} << 10;

struct Allocation {
  size_t bytes;
  CUmemAllocationProp properties;
  int references = 1;
};

struct Mapped {
  size_t bytes;
  Allocation* allocation;
};

struct Mappings {
  std::mutex mutex;
  std::map<CUdeviceptr, size_t> reserved;
  std::map<CUdeviceptr, Mapped> mapped;

  // The mapping that holds the address, or end().
  std::map<CUdeviceptr, Mapped>::iterator find(CUdeviceptr address) {
    auto next = mapped.upper_bound(address);
    if (next == mapped.begin()) return mapped.end();
    --next;
    return address < next->first + next->second.bytes ? next : mapped.end();
  }
};
Mappings& mappings() {
  static Mappings& all = *new Mappings;
  return all;
}

Allocation* allocationOf(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<Allocation*>(handle);
}

CUresult memCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                   const CUmemAllocationProp* properties, unsigned long long) {
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Allocation{bytes, *properties});
  return CUDA_SUCCESS;
}
void dropLocked(Allocation* allocation) {
  if (--allocation->references == 0) delete allocation;
}
CUresult memRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  dropLocked(allocationOf(handle));
  return CUDA_SUCCESS;
}
CUresult memGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                     CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult memAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                           unsigned long long) {
  void* const memory = mycoll_standin_malloc(bytes, nullptr);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  std::lock_guard<std::mutex> lock(mappings().mutex);
  mappings().reserved[*address] = bytes;
  return CUDA_SUCCESS;
}
// As cudaFree in runtime.cpp, though CUDA does not wait here: unmapping under a kernel that uses
// the memory is a mistake, which the stand-in's poison shows.
CUresult memAddressFree(CUdeviceptr address, size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mappings().mutex);
    const auto found = mappings().reserved.find(address);
    if (found == mappings().reserved.end() || found->second != bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    mappings().reserved.erase(found);
  }
  mycoll_standin_free(reinterpret_cast<void*>(address));
  return CUDA_SUCCESS;
}
CUresult memMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                unsigned long long) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  if (mappings().find(address) != mappings().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  ++allocationOf(handle)->references;
  mappings().mapped[address] = {bytes, allocationOf(handle)};
  return CUDA_SUCCESS;
}
CUresult memUnmap(CUdeviceptr address, size_t) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  const auto found = mappings().mapped.find(address);
  if (found == mappings().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  dropLocked(found->second.allocation);
  mappings().mapped.erase(found);
  return CUDA_SUCCESS;
}
CUresult memSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult memRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  const auto found = mappings().find(reinterpret_cast<CUdeviceptr>(address));
  if (found == mappings().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  ++found->second.allocation->references;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->second.allocation);
  return CUDA_SUCCESS;
}
CUresult memGetAllocationProperties(CUmemAllocationProp* properties,
                                    CUmemGenericAllocationHandle handle) {
  *properties = allocationOf(handle)->properties;
  return CUDA_SUCCESS;
}
// Of memory from cudaMalloc it knows nothing, and needs not.
CUresult memGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mappings().mutex);
  const auto found = mappings().find(address);
  if (found == mappings().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  if (base != nullptr) *base = found->first;
  if (bytes != nullptr) *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}
// A handle travels as a descriptor of a file as long as the memory.
CUresult memExport(void* descriptor, CUmemGenericAllocationHandle handle,
                   CUmemAllocationHandleType type, unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int file = memfd_create("host_nccl", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (ftruncate(file, static_cast<off_t>(allocationOf(handle)->bytes)) != 0) {
    close(file);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *static_cast<int*>(descriptor) = file;
  return CUDA_SUCCESS;
}
constexpr CUmemAllocationProp kImported{};
CUresult memImport(CUmemGenericAllocationHandle* handle, void* descriptor,
                   CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  struct stat file{};
  if (fstat(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), &file) != 0) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return memCreate(handle, static_cast<size_t>(file.st_size), &kImported, 0);
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
CUresult deviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 1 : 0;
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
      {"cuMemAddressFree", reinterpret_cast<void*>(&memAddressFree)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&memAddressReserve)},
      {"cuMemCreate", reinterpret_cast<void*>(&memCreate)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&memExport)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&memGetAddressRange)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&memGetAllocationGranularity)},
      {"cuMemGetAllocationPropertiesFromHandle",
       reinterpret_cast<void*>(&memGetAllocationProperties)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&memImport)},
      {"cuMemMap", reinterpret_cast<void*>(&memMap)},
      {"cuMemRelease", reinterpret_cast<void*>(&memRelease)},
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&memRetainAllocationHandle)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&memSetAccess)},
      {"cuMemUnmap", reinterpret_cast<void*>(&memUnmap)},
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
