// SPDX-License-Identifier: Apache-2.0
#include "device/collective/collective.h"
#include "device/collective/nvls.h"
#include "device/kernels.h"

// The kernels for collectives over FIFOs: every algorithm with every protocol. That of CollNet
// direct shares the functions that reduce with them.
namespace unisono::device {
namespace {

using namespace cuda_target;

template <Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>
__global__ void __launch_bounds__(maxChannelThreads(kProtocol), 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  awaitEarlierKernels();
  constexpr int kGroups = groupsOf(kAlgorithm);
  constexpr Service kService = hasServiceWarps(kProtocol) ? Service::warps : Service::none;
  __shared__ Block blocks[kGroups];
  const int channel = static_cast<int>(blockIdx.x);
  int warps = static_cast<int>(blockDim.x) / kWarpSize;  // a multiple of kGroups
  int index = 0;
  bool isWhole = true;
  if constexpr (kGroups > 1) {
    isWhole = usesOneGroup(arguments, channel);
    if (!isWhole) {
      warps /= kGroups;
      index = static_cast<int>(threadIdx.x) / (warps * kWarpSize);
    }
  }
  ThreadGroup group(warps, index * warps, 1 + 3 * index, kService);
  if (kGroups > 1 && isWhole && group.isPoster()) markStart(arguments.mark, channel, 1);
  collectiveBlock<kAlgorithm, kProtocol, kCopies>(group, blocks[index], channel, index, arguments);
  if (kGroups > 1 && isWhole && group.isPoster()) markEnd(arguments.mark, channel, 1);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    collNetDirect(const __grid_constant__ CollectiveArguments arguments) {
  awaitEarlierKernels();
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

const void* collectiveCudaFunction(Algorithm algorithm, Protocol protocol, bool copies) {
  const void* function = nullptr;
  forEachCollectiveKernel([&]<Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>() {
    if (algorithm != kAlgorithm || protocol != kProtocol || copies != kCopies) return;
    function = reinterpret_cast<const void*>(&collective<kAlgorithm, kProtocol, kCopies>);
  });
  return function;
}

}  // namespace unisono::device
