// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/collective/ring.h"
#include "device/collective/tree.h"
#include "device/protocol/lines.h"
#include "device/protocol/simple.h"

// Every algorithm with every protocol, and the loop over the works of a launch.
namespace unisono::device::UNISONO_TARGET {

// The code of each algorithm and protocol of device/algorithm.h. One without an entry here does not
// compile.
template <Algorithm kAlgorithm>
struct AlgorithmCode;
template <>
struct AlgorithmCode<Algorithm::ring> {
  template <template <int, int> class P>
  using Type = RingCollective<P>;
  UNISONO_DEVICE static void loadEnds(ThreadGroup& group, Block& block, Channel& channel,
                                      const CollectiveWork& work) {
    loadRingEnds(group, block, channel, static_cast<int>(work.protocol));
  }
};

template <>
struct AlgorithmCode<Algorithm::tree> {
  template <template <int, int> class P>
  using Type = TreeCollective<P>;
  UNISONO_DEVICE static void loadEnds(ThreadGroup& group, Block& block, Channel& channel,
                                      const CollectiveWork& work) {
    loadTreeEnds(group, block, channel, treeOf(channel, work), static_cast<int>(work.protocol));
  }
};

template <Protocol kProtocol>
struct ProtocolCode;
template <>
struct ProtocolCode<Protocol::ll> {
  template <int kReceives, int kSends>
  using Type = Lines<LowLatencyFormat, kReceives, kSends>;
};
template <>
struct ProtocolCode<Protocol::ll128> {
  template <int kReceives, int kSends>
  using Type = Lines<LowLatency128Format, kReceives, kSends>;
};
template <>
struct ProtocolCode<Protocol::simple> {
  template <int kReceives, int kSends>
  using Type = Simple<kReceives, kSends>;
};

template <Algorithm kAlgorithm, Protocol kProtocol>
UNISONO_DEVICE_CALL void runWork(ThreadGroup& group, Block& block) {
  typename AlgorithmCode<kAlgorithm>::template Type<ProtocolCode<kProtocol>::template Type>(group,
                                                                                            block)
      .run();
}

template <Algorithm kAlgorithm, Protocol... kProtocols>
UNISONO_DEVICE void runWorkBy(ThreadGroup& group, Block& block, ProtocolList<kProtocols...>) {
  ((block.work.protocol == kProtocols ? runWork<kAlgorithm, kProtocols>(group, block) : void()),
   ...);
}
template <Algorithm... kAlgorithms>
UNISONO_DEVICE void runAnyWork(ThreadGroup& group, Block& block, AlgorithmList<kAlgorithms...>) {
  ((codeOf(block.work.algorithm) == kAlgorithms
        ? runWorkBy<kAlgorithms>(group, block, CollectiveProtocols())
        : void()),
   ...);
}

// Loads the ends of the FIFOs that a group uses for a work.
template <Algorithm... kAlgorithms>
UNISONO_DEVICE void loadEnds(ThreadGroup& group, Block& block, Channel& channel,
                             const CollectiveWork& work, AlgorithmList<kAlgorithms...>) {
  ((codeOf(work.algorithm) == kAlgorithms
        ? AlgorithmCode<kAlgorithms>::loadEnds(group, block, channel, work)
        : void()),
   ...);
}

// One rank alone: the reduction of its own input.
UNISONO_DEVICE void localCollective(ThreadGroup& group, const Block& block) {
  const CollectiveWork& work = block.work;
  const ChannelPart part = work.part(block.channel);
  const uint64_t bytes = part.offset * elementBytes(work.reduction.type);
  ReduceCopy copy{};
  copy.addSource(static_cast<const std::byte*>(work.input) + bytes, true);
  copy.addDestination(static_cast<std::byte*>(work.output) + bytes);
  copy.elements = part.count;
  copy.finish = true;
  if (group.isWorker() && !group.aborted()) reduceCopy(group, work.reduction, copy);
}

// What one group of a block does: the works that cover its channel, in order.
UNISONO_DEVICE void collectiveBlock(ThreadGroup& group, Block& block, int channelIndex,
                                    int groupIndex, const CollectiveArguments& arguments) {
  DeviceCommunicator& communicator = *arguments.communicator;
  Channel& channel = communicator.channels[channelIndex];
  if (group.isPoster()) markStart(arguments.mark, channelIndex, groupIndex);
  if (group.isLoader(0)) {
    loadCommunicator(block, communicator, channelIndex);
    block.group = groupIndex;
    block.groups = arguments.groups;
    // A launch has works over rings, over trees, or of one rank alone. What it does not use may
    // be connected while it runs.
    if (arguments.groups == 1 && arguments.work[0].operation != Operation::local) {
      block.ring = channel.ring;
    }
  }
  stayStopped(group, communicator, arguments.launchFlag);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (channelIndex < work.firstChannel || channelIndex >= work.firstChannel + work.channels) {
      continue;
    }
    const bool alone = work.operation == Operation::local;
    if (group.isLoader(0)) {
      block.work = work;
      if (arguments.groups > 1) block.tree = treeOf(channel, work);
      block.slotBytes = communicator.slotBytes[static_cast<int>(work.protocol)];
    }
    if (!alone) loadEnds(group, block, channel, work, CollectiveAlgorithms());
    group.syncAll();
    if (alone) {
      localCollective(group, block);
    } else {
      runAnyWork(group, block, CollectiveAlgorithms());
    }
    group.syncAll();  // the next work takes the place of this one and reads what it saved
  }
  keepStopped(group, communicator);
  if (group.isPoster()) markEnd(arguments.mark, channelIndex, groupIndex);
}

}  // namespace unisono::device::UNISONO_TARGET
