// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"

// All-reduce on a tree, or on CollNet chains. One group of a block reduces from the children to the
// parent, the other passes the result down, both chunk by chunk, so that the two directions
// overlap. The root does both in one step. Even and odd channels have trees of their own in which
// nearly every inner rank is a leaf of the other, so that together they use what every rank can
// send and receive.
namespace unisono::device::UNISONO_TARGET {

enum TreeGroup { kUpGroup = 0, kDownGroup = 1 };

UNISONO_DEVICE const Tree& treeOf(const Channel& channel, const CollectiveWork& work) {
  return work.algorithm == Algorithm::collNetChain ? channel.chain : channel.tree;
}

// Loads the ends of the FIFOs that a group uses.
UNISONO_DEVICE void loadTreeEnds(ThreadGroup& group, Block& block, Channel& channel,
                                 const Tree& tree, int protocol) {
  const bool isRoot = tree.up < 0;
  // Place `place` of an array of ends is loaded by lane `lane`.
  auto receiveFrom = [&](int lane, int place, int connection) {
    if (!group.isLoader(lane)) return;
    block.receive[place].origin = nullptr;
    if (connection < 0) return;
    Connection& from = channel.connections[connection];
    loadEnd(block.receive[place], &from.receive[protocol], from.peer);
  };
  auto sendTo = [&](int lane, int place, int connection) {
    if (!group.isLoader(lane)) return;
    block.send[place].origin = nullptr;
    if (connection < 0) return;
    Connection& to = channel.connections[connection];
    loadEnd(block.send[place], &to.send[protocol], to.peer);
  };
  const bool up = block.group == kUpGroup;
  if (isRoot && !up) return;  // the other group does both
  for (int i = 0; i < kMaxTreeChildren; i++) {
    if (up) receiveFrom(i, i, tree.down[i]);
    if (!up || isRoot) sendTo(kMaxTreeChildren + i, i, tree.down[i]);
  }
  if (isRoot) return;
  if (up) {
    sendTo(kMaxTreeChildren, 0, tree.up);
  } else {
    receiveFrom(0, 0, tree.up);
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
    const bool up = block_.group == kUpGroup;
    if (block_.tree.up < 0) {
      if (up) turnAround();
    } else if (up) {
      reduceUp();
    } else {
      broadcastDown();
    }
  }

 private:
  static constexpr Peers kParent = 1;

  // Calls body(first, count) for each chunk.
  template <typename Body>
  UNISONO_DEVICE void forEachChunk(Body body) {
    const ChannelPart part = block_.work.part(block_.channel);
    const uint64_t most = block_.work.chunkElements;
    for (uint64_t done = 0; done < part.count; done += most) {
      body(part.offset + done, part.count - done < most ? part.count - done : most);
    }
  }
  UNISONO_DEVICE const std::byte* input(uint64_t index) const {
    return static_cast<const std::byte*>(block_.work.input) +
           index * elementBytes(block_.work.reduction.type);
  }
  UNISONO_DEVICE std::byte* output(uint64_t index) const {
    return static_cast<std::byte*>(block_.work.output) +
           index * elementBytes(block_.work.reduction.type);
  }

  UNISONO_DEVICE void turnAround() {
    Mover<ProtocolOf<kMaxTreeChildren, kMaxTreeChildren>> mover(group_, block_);
    mover.begin(kNobody);
    forEachChunk([&](uint64_t first, uint64_t count) {
      mover.receiveReduceCopySend(children_, children_, input(first), output(first), count);
    });
    mover.finish();
  }

  UNISONO_DEVICE void reduceUp() {
    Mover<ProtocolOf<kMaxTreeChildren, 1>> mover(group_, block_);
    mover.begin(kNobody);
    forEachChunk([&](uint64_t first, uint64_t count) {
      mover.receiveReduceSend(children_, kParent, input(first), count);
    });
    mover.finish();
  }

  UNISONO_DEVICE void broadcastDown() {
    Mover<ProtocolOf<1, kMaxTreeChildren>> mover(group_, block_);
    const bool isReduced = block_.receive[0].peer != kNetworkPeer;
    mover.begin(isReduced ? kParent : kNobody);
    forEachChunk([&](uint64_t first, uint64_t count) {
      if (isReduced) {
        mover.receiveCopySend(kParent, children_, output(first), count);
      } else {
        mover.receiveReduceCopySend(kParent, children_, nullptr, output(first), count);
      }
    });
    mover.finish();
  }

  ThreadGroup& group_;
  Block& block_;
  Peers children_ = kNobody;
};

}  // namespace unisono::device::UNISONO_TARGET
