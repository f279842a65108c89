// SPDX-License-Identifier: Apache-2.0
#include "device/collective/collective.h"
#include "device/collective/nvls.h"
#include "device/kernels.h"

// The kernels for collectives over FIFOs: every algorithm with every protocol. That of CollNet
// direct shares the functions that reduce with them.
namespace unisono::device {
namespace {

using namespace cuda_target;

template <Algorithm kAlgorithm, Protocol kProtocol>
__global__ void __launch_bounds__(maxChannelThreads(kProtocol), 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  constexpr int kGroups = groupsOf(kAlgorithm);
  __shared__ Block blocks[kGroups];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize / kGroups;  // a multiple of kGroups
  const int index = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x) / (warps * kWarpSize);
  ThreadGroup group(warps, index * warps, 1 + 3 * index);
  collectiveBlock<kAlgorithm, kProtocol>(group, blocks[index], static_cast<int>(blockIdx.x), index,
                                         arguments);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    collNetDirect(const __grid_constant__ CollectiveArguments arguments) {
  __shared__ MulticastBlock blocks[kMulticastGroups];
  constexpr int kWarps = kChannelThreads / kWarpSize / kMulticastGroups;
  const int index = static_cast<int>(threadIdx.x) / (kWarps * kWarpSize);
  ThreadGroup group(kWarps, index * kWarps, 1 + 3 * index);
  headBlock<MembersView>(group, blocks[index], static_cast<int>(blockIdx.x), index, arguments);
}

}  // namespace

const void* collNetDirectCudaFunction() {
  return reinterpret_cast<const void*>(&collNetDirect);
}

const void* collectiveCudaFunction(Algorithm algorithm, Protocol protocol) {
  const void* function = nullptr;
  forEachCollectiveKernel([&]<Algorithm kAlgorithm, Protocol kProtocol>() {
    if (algorithm != kAlgorithm || protocol != kProtocol) return;
    function = reinterpret_cast<const void*>(&collective<kAlgorithm, kProtocol>);
  });
  return function;
}

}  // namespace unisono::device
