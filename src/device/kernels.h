// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "device/window.h"
#include "device/work.h"
#include "runtime/runtime.h"

// The kernels, in the form that runtime::Runtime::launch takes. Each has one by-value argument.
namespace unisono::device {

// The block layout: threads of a channel's block and how many tasks a block is on the host.
inline constexpr int kChannelThreads = 576;  // 16 warps of workers, a waiter and a poster
inline constexpr int kOneShotThreads = 512;

const runtime::Kernel& collectiveKernel();   // CollectiveArguments, a block a channel
const runtime::Kernel& sendReceiveKernel();  // SendReceiveArguments, a block a channel
const runtime::Kernel& oneShotKernel(int ranks,
                                     const ReductionSpec& reduction);  // OneShotArguments
const runtime::Kernel& changeWindowKernel();  // ChangeWindowArguments, one thread
// All kernels that a communicator of `ranks` ranks may launch.
std::vector<const runtime::Kernel*> kernelsOf(int ranks);
// Host tasks that one block of sendReceiveKernel needs.
inline constexpr int kSendReceiveGroups = 2;

#ifdef UNISONO_CUDA
// The __global__ functions behind them, defined in kernels_cuda.cu.
const void* collectiveCudaFunction();
const void* sendReceiveCudaFunction();
const void* changeWindowCudaFunction();
const void* oneShotCudaFunction(int ranks, const ReductionSpec& spec);
#endif

}  // namespace unisono::device
