#include "device/collective/one_shot.h"
#include "device/collective/ring.h"
#include "device/collective/send_receive.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

__global__ void __launch_bounds__(kChannelThreads, 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  Group group(kChannelThreads / kWarpSize, 0, 1);
  collectiveBlock(group, static_cast<int>(blockIdx.x), arguments);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    sendReceive(const __grid_constant__ SendReceiveArguments arguments) {
  constexpr int kSendWarps = kChannelThreads / kWarpSize / 2 + 1;
  constexpr int kReceiveWarps = kChannelThreads / kWarpSize - kSendWarps;
  if (threadIdx.x < kSendWarps * kWarpSize) {
    Group group(kSendWarps, 0, 1);
    sendBlock(group, static_cast<int>(blockIdx.x), arguments);
  } else {
    Group group(kReceiveWarps, kSendWarps, 3);
    receiveBlock(group, static_cast<int>(blockIdx.x), arguments);
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kOneShotThreads, 1)
    oneShot(const __grid_constant__ OneShotArguments arguments) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const uint32_t epoch = arguments.epochs[block] + 1;
  const uint64_t lane = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  oneShotAllReduce<kRanks>(arguments, epoch, lane, uint64_t{gridDim.x} * blockDim.x, block);
  __syncthreads();  // every lane has read its block's epoch
  advanceEpochs(arguments, epoch, block, blocks, static_cast<int>(threadIdx.x),
                static_cast<int>(blockDim.x));
}

}  // namespace

const void* collectiveCudaFunction() {
  return reinterpret_cast<const void*>(&collective);
}
const void* sendReceiveCudaFunction() {
  return reinterpret_cast<const void*>(&sendReceive);
}
const void* oneShotCudaFunction(int ranks) {
  if (ranks == 2) return reinterpret_cast<const void*>(&oneShot<2>);
  if (ranks == 4) return reinterpret_cast<const void*>(&oneShot<4>);
  return reinterpret_cast<const void*>(&oneShot<kOneShotMaxRanks>);
}

}  // namespace unisono::device
