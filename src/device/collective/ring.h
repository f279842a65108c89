// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"

// The ring algorithms. Data always flows from the previous rank to the next; `order[i]` is the rank
// i steps after this one.
namespace unisono::device::UNISONO_TARGET {

// Loads the ends of the FIFOs that a group uses.
UNISONO_DEVICE void loadRingEnds(ThreadGroup& group, Block& block, Channel& channel, int protocol) {
  if (group.isLoader(kEndLoader)) {
    Connection& previous = channel.connections[channel.ring.previous];
    loadEnd(block.receive[0], &previous.receive[protocol], previous.peer);
  }
  if (group.isLoader(kEndLoader + 1)) {
    Connection& next = channel.connections[channel.ring.next];
    loadEnd(block.send[0], &next.send[protocol], next.peer);
  }
}

// What a rank does in the steps of a round.
struct RingRole {
  int steps;
  int firstReceive;  // the first step that receives from the rank before
  int sends;         // steps that send to the next rank, from the first on
  int operands;      // steps that combine with this rank's input, from the first on
  int firstOutput;   // the first step that stores in the output
  int finish;        // the step that completes a reduction, or -1
  bool prepares;     // the input is a contribution to a reduction
  bool isResult;     // a receiver may offer its output for the data of step `firstOutput` and later

  UNISONO_DEVICE explicit RingRole(const Block& block) {
    const CollectiveWork& work = block.work;
    const int last = block.ranks - 1;
    const bool isRoot = block.rank == work.root;
    steps = block.ranks;
    firstReceive = 1;
    sends = last;
    operands = block.ranks;
    firstOutput = last;
    finish = last;
    prepares = true;
    isResult = true;
    switch (work.operation) {
      case Operation::allReduce:
        steps = 2 * last + 1;
        sends = 2 * last;
        break;
      case Operation::reduceScatter:
        isResult = false;
        break;
      case Operation::allGather:
        operands = 1;
        firstOutput = 0;
        finish = -1;
        prepares = false;
        break;
      case Operation::broadcast:
        steps = 1;
        firstReceive = isRoot ? 1 : 0;
        sends = block.send[0].peer != work.root ? 1 : 0;
        operands = isRoot ? 1 : 0;
        firstOutput = 0;
        finish = -1;
        prepares = false;
        isResult = false;
        break;
      case Operation::reduce:
        steps = 1;
        firstReceive = block.receive[0].peer != work.root ? 0 : 1;
        sends = isRoot ? 0 : 1;
        operands = 1;
        firstOutput = isRoot ? 0 : 1;
        finish = isRoot ? 0 : -1;
        isResult = false;
        break;
      case Operation::local:
        break;
    }
  }
};

template <template <int, int> class ProtocolOf>
class RingCollective {
 public:
  UNISONO_DEVICE RingCollective(ThreadGroup& group, Block& block)
      : block_(block),
        operation_(block.work.operation),
        ranks_(block.ranks),
        elementBytes_(elementBytes(block.work.reduction.type)),
        input_(static_cast<const std::byte*>(block.work.input)),
        output_(static_cast<std::byte*>(block.work.output)),
        role_(block),
        mover_(group, block) {}

  // The part of a channel is cut into rounds. In each, a chunk of every rank (all-reduce) or one
  // chunk travels along the ring, and a rank handles one in each step. The work stays in registers:
  // the block would be read again in every step.
  UNISONO_DEVICE void run() {
    const ChannelPart part = block_.work.part(block_.channel);
    const bool all = operation_ == Operation::allReduce;
    uint32_t chunk = block_.work.chunkElements;
    const uint64_t round = all ? chunk * static_cast<uint64_t>(ranks_) : chunk;
    const int first = all ? block_.ring.position : 0;
    mover_.begin(role_.isResult ? kPrevious : kNobody);
    for (uint64_t done = 0; done < part.count; done += round) {
      const uint64_t left = part.count - done;
      if (all && left < round) chunk = part.lastChunk;
      int index = first;
      for (int step = 0; step < role_.steps; step++) {
        // Of the chunks of an all-reduce, a rank begins with that of the rank before it, and goes
        // back by one in each step.
        if (all) index = index == 0 ? ranks_ - 1 : index - 1;
        const uint64_t begin = uint64_t{chunk} * static_cast<uint32_t>(index);
        const uint64_t rest = begin < left ? left - begin : 0;
        Slice slice = sliceOf(step, part.offset + done + begin);
        slice.elements = rest < chunk ? static_cast<uint32_t>(rest) : chunk;
        mover_.move(slice);
      }
    }
    mover_.finish();
  }

 private:
  // The one peer on either side.
  static constexpr Peers kPrevious = 1, kNext = 1;

  // What a rank does in a step with its chunk, `index` elements into the user's buffers or, if
  // these have a share for each rank, into a share.
  UNISONO_DEVICE Slice sliceOf(int step, uint64_t index) const {
    Slice slice;
    if (step >= role_.firstReceive) slice.receive = kPrevious;
    if (step < role_.sends) slice.send = kNext;
    slice.finish = step == role_.finish;
    const uint64_t offset = index * elementBytes_;
    uint64_t inputOffset = offset, outputOffset = offset;
    if (operation_ == Operation::allGather) outputOffset += shareOf(rankBefore(step));
    if (operation_ == Operation::reduceScatter) inputOffset += shareOf(rankBefore(step + 1));
    if (step < role_.operands) {
      slice.input = input_ + inputOffset;
      slice.prepare = role_.prepares;
    }
    if (step >= role_.firstOutput) {
      slice.output = output_ + outputOffset;
      slice.sendsResult = role_.isResult;
      slice.receivesResult = role_.isResult && step >= role_.operands;
      slice.place = outputOffset;
      // This rank's part of a result may be in place already.
      if (!role_.prepares && slice.input == slice.output) slice.output = nullptr;
    }
    return slice;
  }

  // The rank `distance` steps before this one, 0 .. ranks.
  UNISONO_DEVICE int rankBefore(int distance) const {
    if (distance == 0 || distance == ranks_) return block_.rank;
    if (distance == 1) return block_.receive[0].peer;  // without a load from the table
    return block_.ring.order[ranks_ - distance];
  }
  // Where a rank's share of an all-gather or reduce-scatter begins, in bytes.
  UNISONO_DEVICE uint64_t shareOf(int rank) const {
    return static_cast<uint64_t>(rank) * block_.work.count * elementBytes_;
  }

  Block& block_;
  Operation operation_;
  int ranks_;
  uint32_t elementBytes_;
  const std::byte* input_;
  std::byte* output_;
  RingRole role_;
  Mover<ProtocolOf<1, 1>> mover_;
};

}  // namespace unisono::device::UNISONO_TARGET
