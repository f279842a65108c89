// SPDX-License-Identifier: Apache-2.0
#include "transport/launcher.h"

#include "device/kernels.h"
#include "device/multicast.h"

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
  launch.arguments.channels = context.channels;
  launch.arguments.launchFlag = context.launchFlag;
  launch.arguments.mark = context.mark;
  static_assert(device::kMulticastGroups <= device::kMarkGroups);
  const device::CollectiveWork& work = launch.arguments.work[0];
  return {device::usesHeads(work.algorithm)
              ? device::headKernel(work.algorithm)
              : device::collectiveKernel(device::codeOf(work.algorithm), work.protocol),
          {.blocks = launch.blocks,
           .threadsPerBlock = launch.threads,
           .groupsPerBlock = launch.arguments.groups(),
           .argumentBytes = launch.arguments.bytesInUse()},
          &launch.arguments};
}

Prepared prepare(const LaunchContext& context, plan::SendReceiveLaunch& launch) {
  launch.arguments.communicator = context.communicator;
  launch.arguments.launchFlag = context.launchFlag;
  launch.arguments.mark = context.mark;
  return {device::sendReceiveKernel(),
          {.blocks = launch.blocks,
           .threadsPerBlock = device::kChannelThreads,
           .groupsPerBlock = device::kSendReceiveGroups,
           .argumentBytes = launch.arguments.bytesInUse()},
          &launch.arguments};
}

Prepared prepare(const LaunchContext& context, plan::DirectLaunch& launch) {
  device::DirectArguments& arguments = launch.arguments;
  arguments.memory = *context.direct;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::directKernel(arguments),
          {.blocks = launch.blocks,
           .threadsPerBlock = launch.threads,
           .argumentBytes = launch.argumentBytes()},
          &arguments};
}

Prepared prepare(const LaunchContext& context, plan::MessagesLaunch& launch) {
  device::MessagesArguments& arguments = *launch.arguments;
  arguments.memory = *context.direct;
  arguments.communicator = context.communicator;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::messagesKernel(),
          {.blocks = launch.blocks(),
           .threadsPerBlock = device::kChannelThreads,
           .groupsPerBlock = device::kSendReceiveGroups,
           .argumentBytes = sizeof(arguments)},
          &arguments};
}

Prepared prepare(const LaunchContext& context, plan::WideLaunch& launch) {
  device::WideArguments& arguments = launch.arguments;
  arguments.memory = *context.wide;
  arguments.windows = context.windows;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::directWideKernel(),
          {.blocks = launch.blocks,
           .threadsPerBlock = device::kDirectMaxThreads,
           .argumentBytes = sizeof(arguments)},
          &arguments};
}

}  // namespace

int launch(runtime::Runtime& runtime, const LaunchContext& context, plan::Launch& launch,
           runtime::Stream stream) {
  return std::visit(
      [&](auto& one) {
        Prepared prepared = prepare(context, one);
        prepared.shape.clusterBlocks = context.clusterBlocks;
        runtime.launch(prepared.kernel, prepared.shape, prepared.arguments, stream);
        return prepared.shape.blocks * prepared.shape.groupsPerBlock;
      },
      launch);
}

}  // namespace unisono::transport
