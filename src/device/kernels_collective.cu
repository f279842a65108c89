// SPDX-License-Identifier: Apache-2.0
#include "device/collective/collective.h"
#include "device/collective/nvls.h"
#include "device/kernels.h"

// The kernels for collectives over FIFOs. Each algorithm has one with each protocol of lines; all
// share one with Simple, because each kernel has a copy of the functions that reduce.
namespace unisono::device {
namespace {

using namespace cuda_target;

template <Algorithm kAlgorithm, Protocol kProtocol>
__device__ __forceinline__ void runCollective(Block* blocks, const CollectiveArguments& arguments) {
  constexpr int kGroups = groupsOf(kAlgorithm);
  constexpr Service kService = hasServiceWarps(kProtocol) ? Service::warps : Service::none;
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
  collectiveBlock<kAlgorithm, kProtocol>(group, blocks[index], channel, index, arguments);
  if (kGroups > 1 && isWhole && group.isPoster()) markEnd(arguments.mark, channel, 1);
}

template <Algorithm kAlgorithm, Protocol kProtocol>
__global__ void __launch_bounds__(maxChannelThreads(kProtocol), 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  __shared__ Block blocks[groupsOf(kAlgorithm)];
  runCollective<kAlgorithm, kProtocol>(blocks, arguments);
}

template <Algorithm... kList>
__device__ __forceinline__ void runWithSimple(AlgorithmList<kList...>, Algorithm algorithm,
                                              Block* blocks, const CollectiveArguments& arguments) {
  ((algorithm == kList ? runCollective<kList, Protocol::simple>(blocks, arguments) : void()), ...);
}

__device__ __forceinline__ void runCollNetDirect(MulticastBlock* blocks,
                                                 const CollectiveArguments& arguments) {
  constexpr int kWarps = kChannelThreads / kWarpSize / kMulticastGroups;
  const int index = static_cast<int>(threadIdx.x) / (kWarps * kWarpSize);
  ThreadGroup group(kWarps, index * kWarps, 1 + 3 * index);
  headBlock<MembersView>(group, blocks[index], static_cast<int>(blockIdx.x), index, arguments);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    collectiveSimple(const __grid_constant__ CollectiveArguments arguments) {
  __shared__ Block blocks[kMaxGroups];
  __shared__ MulticastBlock headBlocks[kMulticastGroups];
  const Algorithm algorithm = codeOf(arguments.work[0].algorithm);
  if (algorithm == Algorithm::collNetDirect) {
    runCollNetDirect(headBlocks, arguments);
  } else {
    runWithSimple(CollectiveAlgorithms{}, algorithm, blocks, arguments);
  }
}

}  // namespace

const void* collNetDirectCudaFunction() {
  return reinterpret_cast<const void*>(&collectiveSimple);
}

const void* collectiveCudaFunction(Algorithm algorithm, Protocol protocol) {
  const void* function = nullptr;
  forEachCollectiveKernel([&]<Algorithm kAlgorithm, Protocol kProtocol>() {
    if (algorithm != kAlgorithm || protocol != kProtocol) return;
    if constexpr (kProtocol == Protocol::simple) {
      function = reinterpret_cast<const void*>(&collectiveSimple);
    } else {
      function = reinterpret_cast<const void*>(&collective<kAlgorithm, kProtocol>);
    }
  });
  return function;
}

}  // namespace unisono::device
