// SPDX-License-Identifier: Apache-2.0
#include "runtime_cuda_kernels.h"

#include "device_clock.cuh"

namespace unisono::runtime::test {
namespace {

using unisono::test::deviceNs;

__global__ void fill(FillArguments arguments) {
  if (arguments.delayNs != 0) {
    unsigned long long end = deviceNs() + arguments.delayNs;
    while (deviceNs() < end) {
    }
  }
  unsigned long long step = 1ull * blockDim.x * gridDim.x;
  for (unsigned long long i = 1ull * blockIdx.x * blockDim.x + threadIdx.x; i < arguments.bytes;
       i += step) {
    arguments.target[i] = arguments.value;
  }
}

}  // namespace

Kernel fillKernel() {
  return {"test fill", reinterpret_cast<const void*>(&fill), nullptr};
}

}  // namespace unisono::runtime::test
