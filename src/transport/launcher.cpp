// SPDX-License-Identifier: Apache-2.0
#include "transport/launcher.h"

#include <algorithm>

#include "device/kernels.h"

namespace unisono::transport {
namespace {

// A kernel with its shape; fills the arguments that every launch of its kind lacks.
struct Prepared {
  const runtime::Kernel& kernel;
  runtime::LaunchShape shape;
  const void* arguments;
};

Prepared prepare(const LaunchContext& context, plan::CollectiveLaunch& launch) {
  launch.arguments.communicator = context.communicator;
  launch.arguments.launchFlag = context.launchFlag;
  return {device::collectiveKernel(),
          {.blocks = launch.blocks,
           .threadsPerBlock = device::kChannelThreads,
           .groupsPerBlock = launch.arguments.groups,
           .argumentBytes = launch.arguments.bytesInUse()},
          &launch.arguments};
}

Prepared prepare(const LaunchContext& context, plan::SendReceiveLaunch& launch) {
  launch.arguments.communicator = context.communicator;
  launch.arguments.launchFlag = context.launchFlag;
  return {device::sendReceiveKernel(),
          {.blocks = launch.blocks,
           .threadsPerBlock = device::kChannelThreads,
           .groupsPerBlock = device::kSendReceiveGroups,
           .argumentBytes = launch.arguments.bytesInUse()},
          &launch.arguments};
}

Prepared prepare(const LaunchContext& context, plan::OneShotLaunch& launch) {
  device::OneShotArguments& arguments = launch.arguments;
  std::copy(context.oneShot->scratch.begin(), context.oneShot->scratch.end(), arguments.scratch);
  arguments.epochs = context.oneShot->epochs;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  return {device::oneShotKernel(arguments.ranks, arguments.reduction),
          {.blocks = launch.blocks,
           .threadsPerBlock = launch.threads,
           .argumentBytes = sizeof(arguments)},
          &arguments};
}

}  // namespace

void launch(runtime::Runtime& runtime, const LaunchContext& context, plan::Launch& launch,
            runtime::Stream stream) {
  std::visit(
      [&](auto& one) {
        const Prepared prepared = prepare(context, one);
        runtime.launch(prepared.kernel, prepared.shape, prepared.arguments, stream);
      },
      launch);
}

}  // namespace unisono::transport
