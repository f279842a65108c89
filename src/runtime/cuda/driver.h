// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "base/error.h"

// The CUDA driver: its functions, found at run time so that the library loads where libcuda is
// absent, and the scopes within which the rest of this folder calls CUDA.
namespace unisono::runtime {

// Our name and the driver's name of each function used. The types come from cuda.h, whose macros
// stand for the newest form of a function, which is also what loading by name yields.
#define UNISONO_DRIVER_FUNCTIONS(X)                                     \
  X(getErrorName, cuGetErrorName)                                       \
  X(getErrorString, cuGetErrorString)                                   \
  X(deviceGetName, cuDeviceGetName)                                     \
  X(deviceGetUuid, cuDeviceGetUuid)                                     \
  X(deviceGetAttribute, cuDeviceGetAttribute)                           \
  X(primaryContextState, cuDevicePrimaryCtxGetState)                    \
  X(primaryContextRetain, cuDevicePrimaryCtxRetain)                     \
  X(contextGetCurrent, cuCtxGetCurrent)                                 \
  X(contextSetCurrent, cuCtxSetCurrent)                                 \
  X(exchangeCaptureMode, cuThreadExchangeStreamCaptureMode)             \
  X(launchKernel, cuLaunchKernelEx)                                     \
  X(streamGetId, cuStreamGetId)                                         \
  X(streamIsCapturing, cuStreamIsCapturing)                             \
  X(eventRecord, cuEventRecord)                                         \
  X(pointerGetAttribute, cuPointerGetAttribute)                         \
  X(pointerGetAttributes, cuPointerGetAttributes)                       \
  X(memGetAddressRange, cuMemGetAddressRange)                           \
  X(memCreate, cuMemCreate)                                             \
  X(memRelease, cuMemRelease)                                           \
  X(memAddressReserve, cuMemAddressReserve)                             \
  X(memAddressFree, cuMemAddressFree)                                   \
  X(memMap, cuMemMap)                                                   \
  X(memUnmap, cuMemUnmap)                                               \
  X(memSetAccess, cuMemSetAccess)                                       \
  X(memGetAccess, cuMemGetAccess)                                       \
  X(memGetAllocationGranularity, cuMemGetAllocationGranularity)         \
  X(memGetAllocationProperties, cuMemGetAllocationPropertiesFromHandle) \
  X(memExportToShareableHandle, cuMemExportToShareableHandle)           \
  X(memImportFromShareableHandle, cuMemImportFromShareableHandle)       \
  X(memRetainAllocationHandle, cuMemRetainAllocationHandle)             \
  X(memGetHandleForAddressRange, cuMemGetHandleForAddressRange)

struct Driver {
#define UNISONO_DECLARE(member, function) decltype(&::function) member = nullptr;
  UNISONO_DRIVER_FUNCTIONS(UNISONO_DECLARE)
#undef UNISONO_DECLARE
};

// The driver's functions, found at the first call. Throws Error if there is no driver or one is too
// old; tries again at the next call then.
const Driver& driver();

// How many devices this process sees. Throws Error that says what is missing if there is none.
int countDevices();

// Whether this process has a context on `device` already; makes none.
bool hasContext(int device);

// The primary context of `device`, made if need be and then kept for the life of the process.
CUcontext primaryContext(int device);

// Lets this thread make calls that a capture in progress, by this thread or another, would forbid
// (allocation, synchronisation): they concern no captured stream.
class CaptureRelaxedScope {
 public:
  CaptureRelaxedScope();
  ~CaptureRelaxedScope();
  CaptureRelaxedScope(const CaptureRelaxedScope&) = delete;
  CaptureRelaxedScope& operator=(const CaptureRelaxedScope&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_;
};

// Makes the primary context of `device` current for this thread and returns the one before, or null
// for none. Putting back exactly that matters: nearly every call of the CUDA runtime makes a
// context on device 0 for a thread that has none, cudaSetDevice and the destruction of events and
// streams included.
CUcontext makeContextCurrent(int device);

// The primary context of a device, with captures relaxed, for as long as it lives.
class DeviceCallScope {
 public:
  explicit DeviceCallScope(int device) : before_(makeContextCurrent(device)) {}
  ~DeviceCallScope() { driver().contextSetCurrent(before_); }
  DeviceCallScope(const DeviceCallScope&) = delete;
  DeviceCallScope& operator=(const DeviceCallScope&) = delete;

 private:
  CaptureRelaxedScope relaxed_;
  CUcontext before_;
};

// For destructors: calls `release` within a DeviceCallScope. Where that cannot be had the driver is
// going or gone, and the resource with it.
template <typename Release>
void releaseOn(int device, Release release) noexcept {
  try {
    DeviceCallScope scope(device);
    release();
  } catch (const Error&) {
  }
}

}  // namespace unisono::runtime
