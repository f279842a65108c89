// SPDX-License-Identifier: Apache-2.0
#include "device/collective/direct_wide.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

template <WideReducers kReducers>
__global__ void __launch_bounds__(kDirectMaxThreads, 1)
    directWideWork(const __grid_constant__ WideArguments arguments) {
  awaitEarlierKernels();
  __shared__ PeerBuffers buffers[kDirectMaxPeers];
  directWide<kReducers>(
      arguments, thisLane(), buffers, [&] { return *arguments.launchFlag != 0; },
      [] { __syncthreads(); });
}

}  // namespace

const void* directWideCudaFunction(WideReducers reducers) {
  switch (reducers) {
    case WideReducers::none:
      return reinterpret_cast<const void*>(&directWideWork<WideReducers::none>);
    case WideReducers::own:
      return reinterpret_cast<const void*>(&directWideWork<WideReducers::own>);
    case WideReducers::shared:
      return reinterpret_cast<const void*>(&directWideWork<WideReducers::shared>);
  }
  return nullptr;
}

}  // namespace unisono::device
