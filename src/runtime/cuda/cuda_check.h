// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "base/error.h"

// Turns the status codes of the CUDA runtime and driver into Error(unhandledCudaError).
namespace unisono::runtime {

// The Error for a failed call: its name, the device (negative: not of one device), CUDA's own name
// and text of the code, and what to do where the code tells. The cudaError_t form also clears the
// runtime's last error, so that no later call reports this one again.
Error cudaFailure(cudaError_t status, const char* call, int device);
Error cudaFailure(CUresult result, const char* call, int device);

inline void check(cudaError_t status, const char* call, int device = -1) {
  if (status != cudaSuccess) [[unlikely]]
    throw cudaFailure(status, call, device);
}
inline void check(CUresult result, const char* call, int device = -1) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    throw cudaFailure(result, call, device);
}

// For calls in destructors and calls whose failure is expected: throws nothing and clears the error
// for the next caller of cudaGetLastError. Returns whether the call succeeded.
inline bool quietly(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess;
}
inline bool quietly(CUresult result) {
  return result == CUDA_SUCCESS;
}

}  // namespace unisono::runtime
