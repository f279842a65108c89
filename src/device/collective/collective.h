// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

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
  UNISONO_DEVICE static void loadPlace(Block& block, const Channel& channel,
                                       const CollectiveWork&) {
    block.ring = channel.ring;
  }
  UNISONO_DEVICE static void loadEnds(ThreadGroup& group, int, Block& block, Channel& channel,
                                      const CollectiveWork& work) {
    loadRingEnds(group, block, channel, static_cast<int>(work.protocol));
  }
};

template <>
struct AlgorithmCode<Algorithm::tree> {
  template <template <int, int> class P>
  using Type = TreeCollective<P>;
  UNISONO_DEVICE static void loadPlace(Block& block, const Channel& channel,
                                       const CollectiveWork& work) {
    block.tree = treeOf(channel, work);
  }
  UNISONO_DEVICE static void loadEnds(ThreadGroup& group, int groupIndex, Block& block,
                                      Channel& channel, const CollectiveWork& work) {
    loadTreeEnds(group, groupIndex, block, channel, treeOf(channel, work),
                 static_cast<int>(work.protocol));
  }
};

template <Protocol kProtocol, bool kCopies>
struct ProtocolCode;
template <>
struct ProtocolCode<Protocol::ll, false> {
  template <int kReceives, int kSends>
  using Type = Lines<LowLatencyFormat, kReceives, kSends>;
};
template <>
struct ProtocolCode<Protocol::ll128, false> {
  template <int kReceives, int kSends>
  using Type =
      Lines<std::conditional_t<kReceives == 1 && kSends == 1, RingLinesFormat, VectorLinesFormat>,
            kReceives, kSends>;
};
template <>
struct ProtocolCode<Protocol::ll128, true> {
  template <int kReceives, int kSends>
  using Type = Lines<VectorLinesFormat, kReceives, kSends, true>;
};
template <>
struct ProtocolCode<Protocol::simple, false> {
  template <int kReceives, int kSends>
  using Type = Simple<kReceives, kSends>;
};

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

// What one group of a block does: the works that cover its channel, in order. All of them have this
// algorithm and protocol and, with `kCopies`, reduce nothing. Everything is inlined: a function
// would save the registers of its caller, in memory that does not fit into the first-level cache
// for all threads.
template <Algorithm kAlgorithm, Protocol kProtocol, bool kCopies>
UNISONO_DEVICE void collectiveBlock(ThreadGroup& group, Block& block, int channelIndex,
                                    int groupIndex, const CollectiveArguments& arguments) {
  using Code = AlgorithmCode<kAlgorithm>;
  constexpr int kProtocolIndex = static_cast<int>(kProtocol);
  DeviceCommunicator& communicator = *arguments.communicator;
  Channel& channel = arguments.channels[channelIndex];
  // Works of one rank alone: such communicators have no connections.
  const bool alone = arguments.work[0].operation == Operation::local;
  if (group.isPoster()) markStart(arguments.mark, channelIndex, groupIndex);
  if (group.isLoader(kCommunicatorLoader)) {
    loadCommunicator(block, communicator, channelIndex);
    block.slotBytes = communicator.slotBytes[kProtocolIndex];
    block.group = groupIndex;
    // What a launch does not use may be connected while it runs. What follows before the next
    // barrier reads none of this from the block.
    if (!alone) Code::loadPlace(block, channel, arguments.work[0]);
  }
  stayStopped(group, communicator, arguments.launchFlag);
  for (int w = 0; w < arguments.works; w++) {
    const CollectiveWork& work = arguments.work[w];
    if (channelIndex < work.firstChannel || channelIndex >= work.firstChannel + work.channels) {
      continue;
    }
    if (group.isLoader(kWorkLoader)) block.work = work;
    if (!alone) Code::loadEnds(group, groupIndex, block, channel, work);
    group.syncAll();  // also for stayStopped
    if (!alone) {
      using Protocols = ProtocolCode<kProtocol, kCopies>;
      typename Code::template Type<Protocols::template Type>(group, block).run();
    } else if constexpr (kAlgorithm == kLocalAlgorithm && kProtocol == kLocalProtocol) {
      localCollective(group, block);
    }
    group.syncAll();  // the next work takes the place of this one and reads what it saved
  }
  keepStopped(group, communicator);
  if (group.isPoster()) markEnd(arguments.mark, channelIndex, groupIndex);
}

}  // namespace unisono::device::UNISONO_TARGET
