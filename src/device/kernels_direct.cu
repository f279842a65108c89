// SPDX-License-Identifier: Apache-2.0
#include "device/collective/direct_group.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace cuda_target;

using AnyRanks = DirectRanks<8, false>;

// The flag is a plain load by every thread, in flight together with those of the positions: a
// barrier after the load of one thread costs several percent of a small call. If the flag changes
// in between, some threads leave and the others end at the abort flag.
template <typename Ranks, typename Combine>
__device__ __forceinline__ void runCall(const DirectCallArguments& arguments) {
  directCall<Ranks, Combine>(
      arguments, thisLane(), [&] { return *arguments.launchFlag != 0; }, [] { __syncthreads(); });
}

template <typename Ranks, typename R>
__global__ void __launch_bounds__(kDirectMaxThreads, 1)
    directReduction(const __grid_constant__ DirectCallArguments arguments) {
  awaitEarlierKernels();
  runCall<Ranks, R>(arguments);
}

template <typename Ranks>
__global__ void __launch_bounds__(kDirectMaxThreads, 1)
    directCopy(const __grid_constant__ DirectCallArguments arguments) {
  awaitEarlierKernels();
  runCall<Ranks, DirectCopy>(arguments);
}

__global__ void __launch_bounds__(kDirectMaxThreads, 1)
    directWorks(const __grid_constant__ DirectArguments arguments) {
  awaitEarlierKernels();
  directGroup(
      arguments, thisLane(), [&] { return *arguments.launchFlag != 0; }, [] { __syncthreads(); });
}

template <typename Ranks>
struct MakeReductionKernel {
  template <typename R>
  constexpr auto operator()() const {
    return &directReduction<Ranks, R>;
  }
};

// Kernels for few ranks are small: all pairs have one of their own.
template <typename Ranks>
const void* reductionFor(const ReductionSpec& spec) {
  using Kernel = void (*)(DirectCallArguments);
  constexpr bool kIsSmall = Ranks::kIsExact && Ranks::kBatch < 4;
  using Typed = std::conditional_t<kIsSmall, AllPairs, PairsWithLoops>;
  static constexpr auto kKernels = makeReductionTable<Kernel, Typed>(MakeReductionKernel<Ranks>{});
  return reinterpret_cast<const void*>(kKernels.of(spec));
}

}  // namespace

const void* directReductionCudaFunction(int ranks, const ReductionSpec& spec) {
  if (ranks == 2) return reductionFor<DirectRanks<2, true>>(spec);
  if (ranks == 3) return reductionFor<DirectRanks<3, true>>(spec);
  if (ranks == 4) return reductionFor<DirectRanks<4, true>>(spec);
  if (ranks == 8) return reductionFor<DirectRanks<8, true>>(spec);
  return reductionFor<AnyRanks>(spec);
}
const void* directCopyCudaFunction(int ranks) {
  if (ranks == 2) return reinterpret_cast<const void*>(&directCopy<DirectRanks<2, true>>);
  if (ranks == 3) return reinterpret_cast<const void*>(&directCopy<DirectRanks<3, true>>);
  if (ranks == 4) return reinterpret_cast<const void*>(&directCopy<DirectRanks<4, true>>);
  if (ranks == 8) return reinterpret_cast<const void*>(&directCopy<DirectRanks<8, true>>);
  return reinterpret_cast<const void*>(&directCopy<AnyRanks>);
}
const void* directGroupCudaFunction() {
  return reinterpret_cast<const void*>(&directWorks);
}

}  // namespace unisono::device
