// SPDX-License-Identifier: Apache-2.0
#include "device/collective/nvls.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

template <typename View>
__global__ void __launch_bounds__(kChannelThreads, 1)
    heads(const __grid_constant__ CollectiveArguments arguments) {
  __shared__ MulticastBlock blocks[kMulticastGroups];
  constexpr int kWarps = kChannelThreads / kWarpSize / kMulticastGroups;
  const int index = static_cast<int>(threadIdx.x) / (kWarps * kWarpSize);
  ThreadGroup group(kWarps, index * kWarps, 1 + 3 * index);
  headBlock<View>(group, blocks[index], static_cast<int>(blockIdx.x), index, arguments);
}

}  // namespace

const void* headCudaFunction(bool multicast) {
  return multicast ? reinterpret_cast<const void*>(&heads<MulticastView>)
                   : reinterpret_cast<const void*>(&heads<MembersView>);
}

}  // namespace unisono::device
