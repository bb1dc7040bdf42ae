// libnvidia-ml.so.1 for NCCL: as many devices as the stand-in has, each of which reaches the
// others. What else NCCL looks for there it does without, or has from NCCL_TOPO_FILE.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nvmlwrap.h"
#include "standin_device.h"

namespace {

// Handles are numbers from 1 on.
nvmlDevice_t handleOf(unsigned index) {
  return reinterpret_cast<nvmlDevice_t>(static_cast<uintptr_t>(index + 1));
}

}  // namespace

extern "C" {

STANDIN_API nvmlReturn_t nvmlInit_v2() { return NVML_SUCCESS; }
STANDIN_API nvmlReturn_t nvmlShutdown() { return NVML_SUCCESS; }
STANDIN_API const char* nvmlErrorString(nvmlReturn_t) {
  return "an error of the stand-in for NVML";
}

STANDIN_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(mycoll_standin_device_count());
  return NVML_SUCCESS;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  *device = handleOf(index);
  return NVML_SUCCESS;
}
// As cudaDeviceGetPCIBusId in cuda.cpp makes them: DOMAIN:INDEX:00.0
STANDIN_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* id, nvmlDevice_t* device) {
  unsigned index = 0;
  if (std::sscanf(id, "%*x:%x:", &index) != 1) return NVML_ERROR_INVALID_ARGUMENT;
  return nvmlDeviceGetHandleByIndex(index, device);
}
STANDIN_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return NVML_SUCCESS;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t, nvmlDevice_t, nvmlGpuP2PCapsIndex_t,
                                                nvmlGpuP2PStatus_t* status) {
  *status = NVML_P2P_STATUS_OK;
  return NVML_SUCCESS;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t, unsigned,
                                                       nvmlNvLinkCapability_t, unsigned*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t, unsigned, nvmlEnableState_t*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t, int, nvmlFieldValue_t*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t, nvmlPciInfo_t* info) {
  std::memset(info, 0, sizeof *info);
  return NVML_SUCCESS;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t, unsigned*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
STANDIN_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t, unsigned*) {
  return NVML_ERROR_NOT_SUPPORTED;
}

}  // extern "C"
