// SPDX-License-Identifier: Apache-2.0
#include "device/collective/one_shot.h"
#include "device/collective/ring.h"
#include "device/collective/send_receive.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

__global__ void __launch_bounds__(kChannelThreads, 1)
    collective(const __grid_constant__ CollectiveArguments arguments) {
  ThreadGroup group(kChannelThreads / kWarpSize, 0, 1);
  collectiveBlock(group, static_cast<int>(blockIdx.x), arguments);
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    sendReceive(const __grid_constant__ SendReceiveArguments arguments) {
  constexpr int kSendWarps = kChannelThreads / kWarpSize / 2;
  constexpr int kReceiveWarps = kChannelThreads / kWarpSize - kSendWarps;
  if (threadIdx.x < kSendWarps * kWarpSize) {
    ThreadGroup group(kSendWarps, 0, 1);
    messageBlock(group, true, static_cast<int>(blockIdx.x), arguments);
  } else {
    ThreadGroup group(kReceiveWarps, kSendWarps, 4);
    messageBlock(group, false, static_cast<int>(blockIdx.x), arguments);
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

template <typename Ranks, Reduction kReduction>
const void* oneShotOf(DataType type) {
  auto address = [](auto function) { return reinterpret_cast<const void*>(function); };
  switch (type) {
    case DataType::int8:
      return address(&oneShot<Ranks, Reducer<int8_t, kReduction>>);
    case DataType::uint8:
      return address(&oneShot<Ranks, Reducer<uint8_t, kReduction>>);
    case DataType::int32:
      return address(&oneShot<Ranks, Reducer<int32_t, kReduction>>);
    case DataType::uint32:
      return address(&oneShot<Ranks, Reducer<uint32_t, kReduction>>);
    case DataType::int64:
      return address(&oneShot<Ranks, Reducer<int64_t, kReduction>>);
    case DataType::uint64:
      return address(&oneShot<Ranks, Reducer<uint64_t, kReduction>>);
    default:
      break;
  }
  if constexpr (kReduction != Reduction::sumPostDivide) {
    switch (type) {
      case DataType::float16:
        return address(&oneShot<Ranks, Reducer<Float16, kReduction>>);
      case DataType::float32:
        return address(&oneShot<Ranks, Reducer<float, kReduction>>);
      case DataType::float64:
        return address(&oneShot<Ranks, Reducer<double, kReduction>>);
      case DataType::bfloat16:
        return address(&oneShot<Ranks, Reducer<BFloat16, kReduction>>);
      case DataType::float8e4m3:
        return address(&oneShot<Ranks, Reducer<Float8E4M3, kReduction>>);
      case DataType::float8e5m2:
        return address(&oneShot<Ranks, Reducer<Float8E5M2, kReduction>>);
      default:
        break;
    }
  }
  return nullptr;
}

template <typename Ranks>
const void* oneShotFor(DataType type, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return oneShotOf<Ranks, Reduction::sum>(type);
    case Reduction::prod:
      return oneShotOf<Ranks, Reduction::prod>(type);
    case Reduction::max:
      return oneShotOf<Ranks, Reduction::max>(type);
    case Reduction::min:
      return oneShotOf<Ranks, Reduction::min>(type);
    case Reduction::preMulSum:
      return oneShotOf<Ranks, Reduction::preMulSum>(type);
    case Reduction::sumPostDivide:
      return oneShotOf<Ranks, Reduction::sumPostDivide>(type);
  }
  return nullptr;
}

}  // namespace

const void* collectiveCudaFunction() {
  return reinterpret_cast<const void*>(&collective);
}
const void* sendReceiveCudaFunction() {
  return reinterpret_cast<const void*>(&sendReceive);
}
const void* oneShotCudaFunction(int ranks, DataType type, Reduction reduction) {
  if (ranks == 2) return oneShotFor<OneShotRanks<2, true>>(type, reduction);
  if (ranks == 4) return oneShotFor<OneShotRanks<4, true>>(type, reduction);
  return oneShotFor<OneShotRanks<kOneShotMaxRanks, false>>(type, reduction);
}

}  // namespace unisono::device
