// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"

// All-reduce on a tree, a rail, or CollNet chains. One group of a block reduces from the children
// to the parent, the other passes the result down, both chunk by chunk, so that the two directions
// overlap. The root does both in one step. Even and odd channels have trees of their own in which
// nearly every inner rank is a leaf of the other, so that together they use what every rank can
// send and receive.
namespace unisono::device::UNISONO_TARGET {

enum TreeGroup { kUpGroup = 0, kDownGroup = 1 };

UNISONO_DEVICE const Tree& treeOf(const Channel& channel, const CollectiveWork& work) {
  if (work.algorithm == Algorithm::directTree) return channel.rail;
  return work.algorithm == Algorithm::collNetChain ? channel.chain : channel.tree;
}

// Whether one group does the work of a channel, because the rank is the root: it can have all
// threads of the block.
UNISONO_DEVICE bool usesOneGroup(const CollectiveArguments& arguments, int channel) {
  return treeOf(arguments.channels[channel], arguments.work[0]).up < 0;
}

// Loads the ends of the FIFOs that a group uses.
UNISONO_DEVICE void loadTreeEnds(ThreadGroup& group, int groupIndex, Block& block, Channel& channel,
                                 const Tree& tree, int protocol) {
  const bool isRoot = tree.up < 0;
  auto receiveFrom = [&](int loader, int place, int connection) {
    if (!group.isLoader(kEndLoader + loader)) return;
    block.receive[place].origin = nullptr;
    if (connection < 0) return;
    Connection& from = channel.connections[connection];
    loadEnd(block.receive[place], &from.receive[protocol], from.peer);
  };
  auto sendTo = [&](int loader, int place, int connection) {
    if (!group.isLoader(kEndLoader + loader)) return;
    block.send[place].origin = nullptr;
    if (connection < 0) return;
    Connection& to = channel.connections[connection];
    loadEnd(block.send[place], &to.send[protocol], to.peer);
  };
  const bool up = groupIndex == kUpGroup;
  if (isRoot && !up) return;  // the other group does both
  const bool toChildren = !up || isRoot;
  for (int i = 0; i < kMaxTreeChildren; i++) {
    const int parent = i == 0 ? tree.up : -1;
    receiveFrom(i, i, up ? tree.down[i] : parent);
    sendTo(kMaxTreeChildren + i, i, toChildren ? tree.down[i] : parent);
  }
}

template <template <int, int> class ProtocolOf>
class TreeCollective {
 public:
  UNISONO_DEVICE TreeCollective(ThreadGroup& group, Block& block) : group_(group), block_(block) {
    for (int i = 0; i < kMaxTreeChildren; i++) {
      if (block.tree.down[i] >= 0) children_ |= Peers{1} << i;
    }
  }

  UNISONO_DEVICE void run() {
    const CollectiveWork& work = block_.work;
    const bool up = block_.group == kUpGroup;
    const bool isRoot = block_.tree.up < 0;
    if (isRoot && !up) return;
    const uint64_t size = elementBytes(work.reduction.type);
    const ChannelPart part = work.part(block_.channel);
    Mover<ProtocolOf<kMaxTreeChildren, kMaxTreeChildren>> mover(group_, block_);
    // What a network returns is the sum of all nodes, not yet the result.
    const bool isResult = !up && block_.receive[0].peer != kNetworkPeer;
    mover.begin(isResult ? kParent : kNobody);
    for (uint64_t done = 0; done < part.count; done += work.chunkElements) {
      const uint64_t left = part.count - done;
      Slice slice;
      slice.elements = left < work.chunkElements ? static_cast<uint32_t>(left) : work.chunkElements;
      slice.place = (part.offset + done) * size;
      slice.receive = up ? children_ : kParent;
      slice.send = up && !isRoot ? kParent : children_;
      if (up) {
        slice.input = static_cast<const std::byte*>(work.input) + slice.place;
        slice.prepare = true;
      }
      if (!up || isRoot) {
        slice.output = static_cast<std::byte*>(work.output) + slice.place;
        slice.finish = !isResult;
        slice.receivesResult = isResult;
        slice.sendsResult = true;
      }
      mover.move(slice);
    }
    mover.finish();
  }

 private:
  static constexpr Peers kParent = 1;

  ThreadGroup& group_;
  Block& block_;
  Peers children_ = kNobody;
};

}  // namespace unisono::device::UNISONO_TARGET
