// SPDX-License-Identifier: Apache-2.0
#include "device/collective/direct_wide.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

// One for each reducer: a kernel for all of them would have fewer registers for each.
template <typename R>
__global__ void __launch_bounds__(kDirectMaxThreads, 1)
    directWideWork(const __grid_constant__ WideArguments arguments) {
  awaitEarlierKernels();
  __shared__ PeerBuffers buffers[kDirectMaxPeers];
  // An exchange of buffers needs all lanes or none. Otherwise those that run end at the abort flag.
  const auto stopped = [&] {
    const bool isSet = *arguments.launchFlag != 0;
    return arguments.offers ? __syncthreads_or(isSet) != 0 : isSet;
  };
  directWide<R>(arguments, thisLane(), buffers, stopped, [] { __syncthreads(); });
}

struct MakeWideKernel {
  template <typename R>
  constexpr auto operator()() const {
    return &directWideWork<R>;
  }
};

}  // namespace

const void* directWideReductionCudaFunction(const ReductionSpec& spec) {
  static constexpr auto kKernels = makeReductionTable<void (*)(WideArguments)>(MakeWideKernel{});
  return reinterpret_cast<const void*>(kKernels.of(spec));
}
const void* directWideCopyCudaFunction() {
  return reinterpret_cast<const void*>(&directWideWork<DirectCopy>);
}

}  // namespace unisono::device
