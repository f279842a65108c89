// SPDX-License-Identifier: Apache-2.0
#include "device/collective/collective.h"
#include "device/collective/one_shot.h"
#include "device/collective/send_receive.h"
#include "device/kernels.h"
#include "device/protocol/window.h"

namespace unisono::device {
namespace {

using namespace host_target;

void collective(const void* arguments, const runtime::HostGroupContext& context) {
  ThreadGroup group(context);
  Block block{};
  collectiveBlock(group, block, context.block, context.group,
                  *static_cast<const CollectiveArguments*>(arguments));
}

void sendReceive(const void* arguments, const runtime::HostGroupContext& context) {
  ThreadGroup group(context);
  const auto& launch = *static_cast<const SendReceiveArguments*>(arguments);
  Block block{};
  messageBlock(group, block, context.group == 0, context.block, launch);
}

void oneShot(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const OneShotArguments*>(arguments);
  // The roles of a group are the lanes of a block.
  const int lanes = context.roles;
  ThreadGroup group(context);
  if (group.isPoster() && loadRelaxed(launch.launchFlag) != 0) group.setAborted();
  group.syncAll();
  if (group.aborted()) return;
  runtime::host::noteRead(launch.epochs + context.block, sizeof(uint32_t));
  uint32_t epoch = launch.epochs[context.block] + 1;
  using Body = void (*)(const OneShotArguments&, uint32_t, uint64_t, uint64_t, int);
  static constexpr auto kBodies = makeReductionTable<Body>([]<typename R>() -> Body {
    return &oneShotAllReduce<OneShotRanks<kOneShotMaxRanks, false>, R>;
  });
  kBodies.of(launch.reduction)(launch, epoch,
                               static_cast<uint64_t>(context.block * lanes + context.role),
                               static_cast<uint64_t>(context.blocks * lanes), context.block);
  group.syncAll();  // every lane has read its block's epoch
  advanceEpochs(launch, epoch, context.block, context.blocks, context.role, lanes);
}

void change(const void* arguments, const runtime::HostGroupContext& context) {
  if (context.role == 0) changeWindow(*static_cast<const ChangeWindowArguments*>(arguments));
}

}  // namespace

const runtime::Kernel& collectiveKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"collective", collectiveCudaFunction(), collective};
#else
  static const runtime::Kernel kernel{"collective", nullptr, collective};
#endif
  return kernel;
}

const runtime::Kernel& sendReceiveKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"send-receive", sendReceiveCudaFunction(), sendReceive};
#else
  static const runtime::Kernel kernel{"send-receive", nullptr, sendReceive};
#endif
  return kernel;
}

const runtime::Kernel& changeWindowKernel() {
#ifdef UNISONO_CUDA
  static const runtime::Kernel kernel{"change-window", changeWindowCudaFunction(), change};
#else
  static const runtime::Kernel kernel{"change-window", nullptr, change};
#endif
  return kernel;
}

const runtime::Kernel& oneShotKernel(int ranks, const ReductionSpec& reduction) {
  struct Table {
    runtime::Kernel kernel[kDataTypes][kReductions];
    explicit Table(int ranksOfTable) {
      for (int t = 0; t < kDataTypes; t++) {
        for (int r = 0; r < kReductions; r++) {
          kernel[t][r] = {"one-shot", nullptr, oneShot};
#ifdef UNISONO_CUDA
          const ReductionSpec spec{static_cast<DataType>(t), static_cast<Reduction>(r), false, 0};
          kernel[t][r].cudaFunction = oneShotCudaFunction(ranksOfTable, spec);
#endif
        }
      }
      (void)ranksOfTable;
    }
  };
  static const Table two(2), four(4), any(kOneShotMaxRanks);
  const Table& table = ranks == 2 ? two : ranks == 4 ? four : any;
  return table.kernel[static_cast<int>(reduction.type)][static_cast<int>(reduction.reduction)];
}

std::vector<const runtime::Kernel*> kernelsOf(int ranks) {
  std::vector<const runtime::Kernel*> kernels{&collectiveKernel(), &sendReceiveKernel(),
                                              &changeWindowKernel()};
  if (ranks < 2 || ranks > kOneShotMaxRanks) return kernels;
  for (int t = 0; t < kDataTypes; t++) {
    for (int r = 0; r < kReductions; r++) {
      const ReductionSpec spec{static_cast<DataType>(t), static_cast<Reduction>(r), false, 0};
      if (isReduction(spec.type, spec.reduction)) kernels.push_back(&oneShotKernel(ranks, spec));
    }
  }
  return kernels;
}

}  // namespace unisono::device
