// SPDX-License-Identifier: Apache-2.0
#include "device/collective/nvls.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

__global__ void __launch_bounds__(kChannelThreads, 1)
    multicast(const __grid_constant__ CollectiveArguments arguments) {
  awaitEarlierKernels();
  __shared__ MulticastBlock blocks[kMulticastGroups];
  constexpr int kWarps = kChannelThreads / kWarpSize / kMulticastGroups;
  const int index = static_cast<int>(threadIdx.x) / (kWarps * kWarpSize);
  ThreadGroup group(kWarps, index * kWarps, 1 + 3 * index);
  headBlock<MulticastView>(group, blocks[index], static_cast<int>(blockIdx.x), index, arguments);
}

}  // namespace

const void* multicastCudaFunction() {
  return reinterpret_cast<const void*>(&multicast);
}

}  // namespace unisono::device
