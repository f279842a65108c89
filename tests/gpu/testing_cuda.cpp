// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <stdexcept>

#include "testing.h"

// GPUs for the tests of the C API. Ranks share one where there are not enough.
namespace unisono::system_test::device {
namespace {

// Before the library reads them; the environment of the test goes first.
const bool settingsMade = [] {
  ::setenv("UNISONO_BACKEND", "cuda", 0);
  ::setenv("UNISONO_BOOTSTRAP_TIMEOUT", "60", 0);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  return true;
}();

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
  }
}

}  // namespace

int count() {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  return devices;
}

void use(int device) {
  check(cudaSetDevice(device), "cudaSetDevice");
}

void* allocate(size_t bytes) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "cudaMalloc");
  return address;
}

void release(void* address) {
  cudaFree(address);
}

// In no stream that waits for others: these may be stuck for the test's sake.
void copy(void* to, const void* from, size_t bytes) {
  cudaStream_t stream = createStream();
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  synchronize(stream);
  destroyStream(stream);
}

cudaStream_t createStream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

void destroyStream(cudaStream_t stream) {
  cudaStreamDestroy(stream);
}

void synchronize(cudaStream_t stream) {
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

bool isIdle(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state != cudaErrorNotReady) check(state, "cudaStreamQuery");
  return state == cudaSuccess;
}

}  // namespace unisono::system_test::device
