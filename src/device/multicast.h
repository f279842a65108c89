// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/algorithm.h"
#include "device/work.h"

// What the ranks of a node share for NVLS, NVLSTree and CollNet direct. Each rank has a buffer for
// each channel, all of the same layout, and all buffers of a channel together have a multicast
// address: a store there reaches every buffer, a load reduces what all of them hold. CollNet direct
// accesses the buffers one by one.
//
// Every step of a channel has a piece for each head, a rank that reduces or broadcasts this piece
// for all. Three thread groups of a block work at once, each through all steps in order:
//   scatter: waits reduced[h] + slots > step for every head h; copies its own operand of piece h to
//            the contribution slot of h; contributed = step + 1 (release)
//   head:    waits until the smallest `contributed` of all ranks > step (acquire) and the smallest
//            `gathered` + slots > step (acquire); loads its piece from the contribution slots of
//            all ranks and stores it to the result slots of all ranks through the multicast
//            address; reduced[h] = broadcast[h] = step + 1 in all buffers (release)
//   gather:  waits broadcast[h] > step for every head h (acquire); copies piece h from the result
//            slot of h to the output; gathered = step + 1 (release)
// A reduce-scatter has no gather, an all-gather no scatter: heads store to their own output, or
// load from their own input. So contributions and results are counted apart. Every step has a piece
// of every head, which may be empty. Each word has one writer; all polls but the head's are local.
//
// With NVLSTree the heads of all nodes for one piece form a binary tree, whose edges are FIFOs of
// protocol Simple. A head then makes a step in two moves:
//   up:   combines the contributions with what its children send, for its parent
//   down: passes the result from its parent to the results of its node and to its children
// The root does both in one move. The moves up of the other heads are up to twice as many as there
// are slots ahead of their moves down, so that all levels of the tree work at once. With one more,
// a child of the root could wait for a slot that the root returns in a move for which this child
// has yet to return a slot.
//
// NVLS on several nodes and CollNet direct have a network that reduces as the parent of every head.
// All-gather and reduce-scatter then need as many heads as a node has ranks: a head sends a piece
// of its share and receives those of the heads of its number on all nodes, or the reverse. Slots
// have room for a piece of each node.
namespace unisono::device {

inline constexpr int kMaxMulticastRanks = 32;  // a lane of a warp for each
inline constexpr int kMulticastGroups = groupsOf(Algorithm::nvls);

// The counters of the steps that each group has made, kept between launches.
enum MulticastStep { kScatterStep, kReduceStep, kBroadcastStep, kGatherStep, kMulticastSteps };

// A rank's buffer of one channel.
struct MulticastChannel {
  std::byte* own;             // its address
  std::byte* all;             // the multicast address of the buffers of all ranks
  std::byte* const* members;  // without a multicast address: the buffers of all ranks
  uint64_t step[kMulticastSteps];
  // Of the heads for this rank's piece: for NVLSTree, and for NVLS, where the parent is the
  // network. No edges inside one node.
  Tree tree, network;
};
inline constexpr int kMaxHeadChildren = 2;

// Where everything is in a buffer, in bytes. Each counter has a line of its own.
struct MulticastLayout {
  uint32_t heads;
  uint32_t slots;      // of each piece and direction: a power of two
  uint32_t slotBytes;  // a multiple of 16

  static constexpr uint64_t kLineBytes = 128;
  static constexpr uint64_t contributed() { return 0; }
  static constexpr uint64_t gathered() { return kLineBytes; }
  static constexpr uint64_t reduced(int head) {
    return (2 + static_cast<uint64_t>(head)) * kLineBytes;
  }
  constexpr uint64_t broadcast(int head) const { return reduced(static_cast<int>(heads) + head); }
  constexpr uint64_t contribution(int head, uint64_t step) const { return slot(head, step); }
  constexpr uint64_t result(int head, uint64_t step) const {
    return slot(static_cast<int>(heads) + head, step);
  }
  // Of the buffer of one channel.
  constexpr uint64_t bytes() const { return slot(2 * static_cast<int>(heads), 0); }

 private:
  constexpr uint64_t slot(int index, uint64_t step) const {
    return broadcast(static_cast<int>(heads)) +
           (static_cast<uint64_t>(index) * slots + (step & (slots - 1))) * slotBytes;
  }
};

// In device memory; null where a communicator has no multicast.
struct Multicast {
  MulticastLayout layout;
  int32_t head;           // the piece of which this rank is the head; -1: none
  int32_t members;        // ranks of the node
  int32_t nodes;          // of which there are heads
  const int32_t* rankOf;  // [head * nodes + node]
  MulticastChannel* channels;
};

// The types and operators that an NVSwitch reduces.
constexpr bool isMulticastReduction(DataType type, Reduction reduction) {
  const bool sum = reduction == Reduction::sum;
  const bool extreme = reduction == Reduction::min || reduction == Reduction::max;
  switch (type) {
    case DataType::float32:
    case DataType::float64:
      return sum;
    case DataType::int32:
    case DataType::uint32:
    case DataType::int64:
    case DataType::uint64:
    case DataType::float16:
    case DataType::bfloat16:
      return sum || extreme;
    default:
      return false;
  }
}

}  // namespace unisono::device
