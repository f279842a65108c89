#include "device/collective/one_shot.h"
#include "device/collective/ring.h"
#include "device/collective/send_receive.h"
#include "device/kernels.h"

namespace unisono::device {
namespace {

using namespace host_target;

void collective(const void* arguments, const runtime::HostGroupContext& context) {
  Group group;
  collectiveBlock(group, context.block, *static_cast<const CollectiveArguments*>(arguments));
}

void sendReceive(const void* arguments, const runtime::HostGroupContext& context) {
  Group group;
  const auto& launch = *static_cast<const SendReceiveArguments*>(arguments);
  if (context.group == 0) {
    sendBlock(group, context.block, launch);
  } else {
    receiveBlock(group, context.block, launch);
  }
}

void oneShot(const void* arguments, const runtime::HostGroupContext& context) {
  const auto& launch = *static_cast<const OneShotArguments*>(arguments);
  uint32_t epoch = launch.epochs[context.block] + 1;
  oneShotAllReduce<kOneShotMaxRanks>(launch, epoch, static_cast<uint64_t>(context.block),
                                     static_cast<uint64_t>(context.blocks), context.block);
  advanceEpochs(launch, epoch, context.block, context.blocks, 0, 1);
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

const runtime::Kernel& oneShotKernel(int ranks) {
#ifdef UNISONO_CUDA
  static const runtime::Kernel two{"one-shot-2", oneShotCudaFunction(2), oneShot};
  static const runtime::Kernel four{"one-shot-4", oneShotCudaFunction(4), oneShot};
  static const runtime::Kernel any{"one-shot", oneShotCudaFunction(0), oneShot};
  return ranks == 2 ? two : ranks == 4 ? four : any;
#else
  static const runtime::Kernel any{"one-shot", nullptr, oneShot};
  return (void)ranks, any;
#endif
}

}  // namespace unisono::device
