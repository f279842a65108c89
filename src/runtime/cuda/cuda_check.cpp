// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/cuda_check.h"

#include "runtime/cuda/driver.h"

namespace unisono::runtime {
namespace {

Error failure(const char* call, int device, std::string_view name, std::string_view text,
              bool outOfMemory, bool captureForbids) {
  Error error(ErrorCode::unhandledCudaError, fmt::format("{} failed: {} ({})", call, text, name));
  if (device >= 0) error.device(device);
  if (outOfMemory) {
    error.remedy("Free memory of the device, or lower NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS");
  } else if (captureForbids) {
    error.remedy("A stream capture was in progress; make this call before or after it");
  }
  return error;
}

}  // namespace

Error cudaFailure(cudaError_t status, const char* call, int device) {
  cudaGetLastError();
  bool captureForbids =
      status >= cudaErrorStreamCaptureUnsupported && status <= cudaErrorStreamCaptureWrongThread;
  return failure(call, device, cudaGetErrorName(status), cudaGetErrorString(status),
                 status == cudaErrorMemoryAllocation, captureForbids);
}

Error cudaFailure(CUresult result, const char* call, int device) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver().getErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  if (driver().getErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no text";
  bool captureForbids = result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                        result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  return failure(call, device, name, text, result == CUDA_ERROR_OUT_OF_MEMORY, captureForbids);
}

}  // namespace unisono::runtime
