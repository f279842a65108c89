// SPDX-License-Identifier: Apache-2.0
#include "transport/launcher.h"

#include <algorithm>
#include <vector>

#include "device/kernels.h"
#include "device/multicast.h"

namespace unisono::transport {
namespace {

// A kernel with its shape; fills the arguments that every launch of its kind lacks.
struct Prepared {
  const runtime::Kernel& kernel;
  runtime::LaunchShape shape;
  const void* arguments;
  int marks = 0;  // of groups that mark the launch; 0: all groups
};

// What the teams of a block for messages over LL128 share on the host.
constexpr size_t kWideSharedBytes = sizeof(uint32_t);

Prepared prepare(const LaunchContext& context, plan::CollectiveLaunch& launch) {
  launch.arguments.communicator = context.communicator;
  launch.arguments.channels = context.channels;
  launch.arguments.launchFlag = context.launchFlag;
  launch.arguments.mark = context.mark;
  static_assert(device::kMulticastGroups <= device::kMarkGroups);
  const device::CollectiveWork& work = launch.arguments.work[0];
  const bool copies = device::usesCopyKernel(work.algorithm, work.protocol, work.operation);
  return {device::usesHeads(work.algorithm)
              ? device::headKernel(work.algorithm)
              : device::collectiveKernel(device::codeOf(work.algorithm), work.protocol, copies),
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

Prepared prepare(const LaunchContext& context, plan::BarrierLaunch& launch) {
  device::BarrierArguments& arguments = launch.arguments;
  arguments.memory = *context.direct;
  arguments.abortFlag = context.abortFlag;
  arguments.mark = context.mark;
  return {
      device::barrierKernel(),
      {.blocks = 1, .threadsPerBlock = device::kBarrierThreads, .argumentBytes = sizeof(arguments)},
      &arguments};
}

Prepared prepare(const LaunchContext& context, plan::MessagesLaunch& launch) {
  device::MessagesArguments& arguments = *launch.arguments;
  arguments.memory = *context.direct;
  arguments.wide.memory = *context.wide;
  arguments.communicator = context.communicator;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::messagesKernel(),
          {.blocks = launch.blocks(),
           .threadsPerBlock = device::kChannelThreads,
           .groupsPerBlock = std::max(device::kSendReceiveGroups, arguments.wide.teams()),
           .argumentBytes = sizeof(arguments),
           .sharedBytes = kWideSharedBytes},
          &arguments,
          arguments.firstWideBlock() * device::kSendReceiveGroups + arguments.wide.launchBlocks()};
}

Prepared prepare(const LaunchContext& context, plan::WideMessagesLaunch& launch) {
  device::WideMessagesArguments& arguments = launch.arguments;
  arguments.wide.memory = *context.wide;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::wideMessagesKernel(),
          {.blocks = arguments.wide.launchBlocks(),
           .threadsPerBlock = arguments.threads(),
           .groupsPerBlock = arguments.wide.teams(),
           .argumentBytes = sizeof(arguments),
           .sharedBytes = kWideSharedBytes},
          &arguments,
          arguments.wide.launchBlocks()};
}

Prepared prepare(const LaunchContext& context, plan::WideLaunch& launch) {
  device::WideArguments& arguments = launch.arguments;
  arguments.memory = *context.wide;
  arguments.windows = context.windows;
  arguments.abortFlag = context.abortFlag;
  arguments.launchFlag = context.launchFlag;
  arguments.mark = context.mark;
  return {device::directWideKernel(arguments.work),
          {.blocks = launch.blocks,
           .threadsPerBlock = launch.threads,
           .argumentBytes = sizeof(arguments)},
          &arguments};
}

// Each returns how many thread groups mark the launch.
template <typename KernelLaunch>
int enqueue(runtime::Runtime& runtime, const LaunchContext& context, KernelLaunch& launch,
            runtime::Stream stream) {
  Prepared prepared = prepare(context, launch);
  prepared.shape.clusterBlocks = context.clusterBlocks;
  prepared.shape.startsEarly = context.startsEarly;
  prepared.shape.inRemoteDomain = context.inRemoteDomain;
  runtime.launch(prepared.kernel, prepared.shape, prepared.arguments, stream);
  return prepared.marks != 0 ? prepared.marks
                             : prepared.shape.blocks * prepared.shape.groupsPerBlock;
}
int enqueue(runtime::Runtime&, const LaunchContext& context, plan::CopyLaunch& launch,
            runtime::Stream stream) {
  std::vector<runtime::ParallelCopies::Range> copies;
  for (const plan::Copy& copy : launch.copies) copies.push_back({copy.to, copy.from, copy.bytes});
  context.copies->enqueue(copies, stream);
  return 0;
}

}  // namespace

int launch(runtime::Runtime& runtime, const LaunchContext& context, plan::Launch& launch,
           runtime::Stream stream) {
  return std::visit([&](auto& one) { return enqueue(runtime, context, one, stream); }, launch);
}

}  // namespace unisono::transport
