// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/driver.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/cuda/cuda_check.h"

namespace unisono::runtime {
namespace {

// The newest version of the driver API that any function in the table needs in its present form.
constexpr unsigned kDriverApiVersion = 12000;

void find(const char* name, void** function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaError_t status = cudaGetDriverEntryPointByVersion(name, function, kDriverApiVersion,
                                                        cudaEnableLegacyStream, &found);
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess && *function != nullptr) return;
  cudaGetLastError();
  throw Error(ErrorCode::unhandledCudaError,
              fmt::format("The NVIDIA driver has no function {} ({})", name,
                          status == cudaSuccess ? "symbol not found" : cudaGetErrorString(status)))
      .remedy("Install the driver of CUDA 13 (580) or newer");
}

Driver loadDriver() {
  countDevices();  // initialises the driver, and says clearly if there is none
  Driver table;
#define UNISONO_FIND(member, function) find(#function, reinterpret_cast<void**>(&table.member));
  UNISONO_DRIVER_FUNCTIONS(UNISONO_FIND)
#undef UNISONO_FIND
  return table;
}

Error noDevices(cudaError_t status) {
  cudaGetLastError();
  std::string remedy;
  switch (status) {
    case cudaSuccess:
    case cudaErrorNoDevice:
      remedy =
          "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container, pass the GPUs in "
          "(--gpus all); or set UNISONO_BACKEND=host for simulated devices";
      break;
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      remedy =
          "Install the NVIDIA driver 580 (CUDA 13) or newer and make sure that libcuda.so.1 "
          "is found; or set UNISONO_BACKEND=host for simulated devices";
      break;
    case cudaErrorInitializationError:
      remedy =
          "CUDA cannot be used in a process forked after its parent used CUDA: start workers "
          "by spawn; otherwise check `nvidia-smi` and `dmesg`";
      break;
    case cudaErrorSystemNotReady:
      remedy = "Start the services that the GPUs need (nvidia-fabricmanager on NVSwitch machines)";
      break;
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      remedy =
          "libcuda and the kernel module are of different versions: reboot or reinstall the "
          "driver, and remove a CUDA compatibility package that this GPU does not support";
      break;
    default:
      remedy = "Check `nvidia-smi` and `dmesg`; or set UNISONO_BACKEND=host for simulated devices";
  }
  return Error(ErrorCode::unhandledCudaError,
               fmt::format("No GPU can be used: {} ({})",
                           status == cudaSuccess ? "none is there" : cudaGetErrorString(status),
                           cudaGetErrorName(status == cudaSuccess ? cudaErrorNoDevice : status)))
      .remedy(remedy);
}

}  // namespace

int countDevices() {
  // A set of devices never changes in a process, so that a success need not be asked for again.
  static std::atomic<int> known{0};
  int count = known.load(std::memory_order_relaxed);
  if (count > 0) return count;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) throw noDevices(status);
  known.store(count, std::memory_order_relaxed);
  return count;
}

const Driver& driver() {
  static const Driver table = loadDriver();
  return table;
}

bool hasContext(int device) {
  unsigned flags = 0;
  int active = 0;
  return quietly(driver().primaryContextState(device, &flags, &active)) && active != 0;
}

CUcontext primaryContext(int device) {
  static const int count = countDevices();
  static std::atomic<CUcontext>* const contexts = new std::atomic<CUcontext>[count] {};
  if (device < 0 || device >= count) {
    throw invalidArgument("Device {} does not exist: this process sees {}", device, count)
        .remedy("Use a smaller ordinal, or let the process see more GPUs (CUDA_VISIBLE_DEVICES)");
  }
  CUcontext context = contexts[device].load(std::memory_order_acquire);
  if (context != nullptr) return context;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  context = contexts[device].load(std::memory_order_acquire);
  if (context == nullptr) {
    check(driver().primaryContextRetain(&context, device), "cuDevicePrimaryCtxRetain", device);
    contexts[device].store(context, std::memory_order_release);
  }
  return context;
}

CaptureRelaxedScope::CaptureRelaxedScope()
    : exchanged_(driver().exchangeCaptureMode(&mode_) == CUDA_SUCCESS) {}

CaptureRelaxedScope::~CaptureRelaxedScope() {
  if (exchanged_) driver().exchangeCaptureMode(&mode_);
}

CUcontext makeContextCurrent(int device) {
  CUcontext wanted = primaryContext(device);
  CUcontext before = nullptr;
  check(driver().contextGetCurrent(&before), "cuCtxGetCurrent", device);
  if (before != wanted) check(driver().contextSetCurrent(wanted), "cuCtxSetCurrent", device);
  return before;
}

}  // namespace unisono::runtime
