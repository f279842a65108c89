// SPDX-License-Identifier: Apache-2.0
#include "device/collective/direct_messages.h"
#include "device/collective/send_receive.h"
#include "device/collective/wide_messages.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

// By all threads of a block.
template <typename Arguments>
__device__ __forceinline__ void runTeam(const Arguments& arguments, int block, int firstBlock) {
  const int teamWarps = arguments.wide.teamWarps.count, threads = teamWarps * kWarpSize;
  const int team = arguments.wide.teamWarps.divide(static_cast<int>(threadIdx.x) / kWarpSize);
  const DirectLane at{block, 0, static_cast<int>(threadIdx.x) - team * threads, threads};
  wideTeam(
      arguments, at, team, firstBlock, [&] { return *arguments.launchFlag != 0; },
      [&] {
        if (teamWarps == 1) {
          syncWarp();
        } else {
          syncThreads(1 + team, threads);
        }
      },
      [] {
        __syncthreads();
        return threadIdx.x == 0;
      });
}

__device__ __forceinline__ void run(ThreadGroup& group, int groupThreads, int firstThread,
                                    Block& block, bool sends, const MessagesArguments& arguments) {
  const int peer = static_cast<int>(blockIdx.x) - arguments.channels;
  if (peer < 0) {
    messageBlock(group, block, sends, static_cast<int>(blockIdx.x), arguments);
    return;
  }
  const DirectLane at{peer, arguments.ranks - 1, static_cast<int>(threadIdx.x) - firstThread,
                      groupThreads};
  directStream(
      arguments, peer, sends, at, [&] { return *arguments.launchFlag != 0; },
      [&] { group.syncAll(); });
}

__global__ void __launch_bounds__(kChannelThreads, 1)
    messages(const __grid_constant__ MessagesArguments arguments) {
  awaitEarlierKernels();
  const int wideBlock = static_cast<int>(blockIdx.x) - arguments.firstWideBlock();
  if (wideBlock >= 0) {
    runTeam(arguments, wideBlock, arguments.firstWideBlock());
    return;
  }
  __shared__ Block blocks[2];
  constexpr int kSendWarps = kChannelThreads / kWarpSize / 2;
  constexpr int kReceiveWarps = kChannelThreads / kWarpSize - kSendWarps;
  if (threadIdx.x < kSendWarps * kWarpSize) {
    ThreadGroup group(kSendWarps, 0, 1);
    run(group, kSendWarps * kWarpSize, 0, blocks[0], true, arguments);
  } else {
    ThreadGroup group(kReceiveWarps, kSendWarps, 4);
    run(group, kReceiveWarps * kWarpSize, kSendWarps * kWarpSize, blocks[1], false, arguments);
  }
}

__global__ void __launch_bounds__(kMaxWideMessageThreads, 1)
    wideMessages(const __grid_constant__ WideMessagesArguments arguments) {
  awaitEarlierKernels();
  runTeam(arguments, static_cast<int>(blockIdx.x), 0);
}

}  // namespace

const void* messagesCudaFunction() {
  return reinterpret_cast<const void*>(&messages);
}
const void* wideMessagesCudaFunction() {
  return reinterpret_cast<const void*>(&wideMessages);
}

}  // namespace unisono::device
