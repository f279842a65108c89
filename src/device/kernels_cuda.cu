// SPDX-License-Identifier: Apache-2.0
#include "device/collective/send_receive.h"
#include "device/kernels.h"
#include "device/protocol/barrier.h"
#include "device/protocol/window.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

__global__ void __launch_bounds__(kChannelThreads, 1)
    sendReceive(const __grid_constant__ SendReceiveArguments arguments) {
  awaitEarlierKernels();
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

__global__ void __launch_bounds__(kBarrierThreads, 1)
    barrier(const __grid_constant__ BarrierArguments arguments) {
  awaitEarlierKernels();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) markStart(arguments.mark, 0, 0);
  if (thread < arguments.ranks - 1) {
    arriveAt(arguments, thread);
    awaitArrival(arguments, thread);
  }
  syncWarp();
  if (thread == 0) markEnd(arguments.mark, 0, 0);
}

__global__ void change(const __grid_constant__ ChangeWindowArguments arguments) {
  if (threadIdx.x == 0) changeWindow(arguments);
}

__global__ void stamp(const __grid_constant__ StampArguments arguments) {
  if (threadIdx.x == 0) stampReplay(arguments);
}

}  // namespace

const void* sendReceiveCudaFunction() {
  return reinterpret_cast<const void*>(&sendReceive);
}
const void* barrierCudaFunction() {
  return reinterpret_cast<const void*>(&barrier);
}
const void* changeWindowCudaFunction() {
  return reinterpret_cast<const void*>(&change);
}
const void* stampCudaFunction() {
  return reinterpret_cast<const void*>(&stamp);
}

}  // namespace unisono::device
