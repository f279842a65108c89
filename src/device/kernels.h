// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "device/direct_work.h"
#include "device/window.h"
#include "device/work.h"
#include "runtime/runtime.h"

// The kernels, in the form that runtime::Runtime::launch takes. Each has one by-value argument. On
// CUDA, those of plans begin with awaitEarlierKernels(), because they may be launched early:
// without it they would read what earlier kernels have yet to store.
namespace unisono::device {

// CollectiveArguments, one block for each channel. `copies`: works that reduce nothing.
const runtime::Kernel& collectiveKernel(Algorithm algorithm, Protocol protocol, bool copies);
// The same for algorithms with heads. Communicators do not prepare them: no runtime but the host's
// has multicast addresses or a network that reduces yet.
const runtime::Kernel& headKernel(Algorithm algorithm);
const runtime::Kernel& sendReceiveKernel();  // SendReceiveArguments, one block for each channel
// The first works of DirectArguments, as many as there are.
const runtime::Kernel& directKernel(const DirectArguments& arguments);
const runtime::Kernel& messagesKernel();                          // MessagesArguments
const runtime::Kernel& wideMessagesKernel();                      // WideMessagesArguments
const runtime::Kernel& directWideKernel(const DirectWork& work);  // WideArguments
const runtime::Kernel& barrierKernel();                           // BarrierArguments, one block
const runtime::Kernel& changeWindowKernel();  // ChangeWindowArguments, one thread
const runtime::Kernel& stampKernel();         // StampArguments, one thread
// All kernels that a communicator with `localRanks` ranks on this host may launch.
std::vector<const runtime::Kernel*> kernelsOf(int localRanks);
// Host tasks that one block of sendReceiveKernel or messagesKernel needs.
inline constexpr int kSendReceiveGroups = 2;

#ifdef UNISONO_CUDA
// The __global__ functions that they launch, defined in kernels_cuda.cu.
const void* collectiveCudaFunction(Algorithm algorithm, Protocol protocol,
                                   bool copies);  // in kernels_collective.cu
const void* collNetDirectCudaFunction();          // in kernels_collective.cu
const void* multicastCudaFunction();  // in kernels_multicast.cu, with UNISONO_CUDA_MULTICAST
const void* sendReceiveCudaFunction();
const void* barrierCudaFunction();
const void* changeWindowCudaFunction();
const void* stampCudaFunction();
// The kernels of one work and of several, in kernels_direct.cu.
const void* directReductionCudaFunction(int ranks, const ReductionSpec& spec);
const void* directCopyCudaFunction(int ranks);
const void* directGroupCudaFunction();
const void* messagesCudaFunction();                                      // in kernels_messages.cu
const void* wideMessagesCudaFunction();                                  // in kernels_messages.cu
const void* directWideReductionCudaFunction(const ReductionSpec& spec);  // in kernels_wide.cu
const void* directWideCopyCudaFunction();                                // in kernels_wide.cu
#endif

}  // namespace unisono::device
