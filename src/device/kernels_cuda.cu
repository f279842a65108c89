// SPDX-License-Identifier: Apache-2.0
#include "device/collective/collective.h"
#include "device/collective/one_shot.h"
#include "device/collective/send_receive.h"
#include "device/kernels.h"
#include "device/protocol/window.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

// Of a block that is split into two groups.
constexpr int kHalfWarps = kChannelThreads / kWarpSize / 2;

__global__ void __launch_bounds__(kChannelThreads, 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  __shared__ Block blocks[kMaxGroups];
  const int channel = static_cast<int>(blockIdx.x);
  if (arguments.groups == 1) {
    ThreadGroup group(kChannelThreads / kWarpSize, 0, 1);
    collectiveBlock(group, blocks[0], channel, 0, arguments);
    return;
  }
  const int index = static_cast<int>(threadIdx.x) / (kHalfWarps * kWarpSize);
  ThreadGroup group(kHalfWarps, index * kHalfWarps, index == 0 ? 1 : 4);
  collectiveBlock(group, blocks[index], channel, index, arguments);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    sendReceive(const __grid_constant__ SendReceiveArguments arguments) {
  __shared__ Block blocks[2];
  constexpr int kSendWarps = kChannelThreads / kWarpSize / 2;
  constexpr int kReceiveWarps = kChannelThreads / kWarpSize - kSendWarps;
  if (threadIdx.x < kSendWarps * kWarpSize) {
    ThreadGroup group(kSendWarps, 0, 1);
    messageBlock(group, blocks[0], true, static_cast<int>(blockIdx.x), arguments);
  } else {
    ThreadGroup group(kReceiveWarps, kSendWarps, 4);
    messageBlock(group, blocks[1], false, static_cast<int>(blockIdx.x), arguments);
  }
}

template <typename Ranks, typename R>
__global__ void __launch_bounds__(kOneShotThreads, 1)
    oneShot(const __grid_constant__ OneShotArguments arguments) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const uint32_t epoch = arguments.epochs[block] + 1;
  // A plain load by every thread, in flight together with that of the epoch: a barrier after the
  // load of one thread costs several percent of a small call. If the flag changes in between, some
  // threads leave and the others end at the abort flag.
  if (*arguments.launchFlag != 0) return;
  const uint64_t lane = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  oneShotAllReduce<Ranks, R>(arguments, epoch, lane, uint64_t{gridDim.x} * blockDim.x, block);
  __syncthreads();  // every lane has read its block's epoch
  advanceEpochs(arguments, epoch, block, blocks, static_cast<int>(threadIdx.x),
                static_cast<int>(blockDim.x));
}

template <typename Ranks>
struct MakeOneShotKernel {
  template <typename R>
  constexpr auto operator()() const {
    return &oneShot<Ranks, R>;
  }
};

template <typename Ranks>
const void* oneShotFor(const ReductionSpec& spec) {
  using Kernel = void (*)(OneShotArguments);
  static constexpr auto kKernels = makeReductionTable<Kernel>(MakeOneShotKernel<Ranks>{});
  return reinterpret_cast<const void*>(kKernels.of(spec));
}

__global__ void change(const __grid_constant__ ChangeWindowArguments arguments) {
  if (threadIdx.x == 0) changeWindow(arguments);
}

}  // namespace

const void* collectiveCudaFunction() {
  return reinterpret_cast<const void*>(&collective);
}
const void* sendReceiveCudaFunction() {
  return reinterpret_cast<const void*>(&sendReceive);
}
const void* changeWindowCudaFunction() {
  return reinterpret_cast<const void*>(&change);
}
const void* oneShotCudaFunction(int ranks, const ReductionSpec& spec) {
  if (ranks == 2) return oneShotFor<OneShotRanks<2, true>>(spec);
  if (ranks == 4) return oneShotFor<OneShotRanks<4, true>>(spec);
  return oneShotFor<OneShotRanks<kOneShotMaxRanks, false>>(spec);
}

}  // namespace unisono::device
