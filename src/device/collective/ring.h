// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"

// The ring algorithms. Data always flows from the previous rank to the next; `order[i]` is the rank
// i steps after this one.
namespace unisono::device::UNISONO_TARGET {

// Loads the ends of the FIFOs that a group uses.
UNISONO_DEVICE void loadRingEnds(ThreadGroup& group, Block& block, Channel& channel, int protocol) {
  if (group.isLoader(0)) {
    Connection& previous = channel.connections[channel.ring.previous];
    loadEnd(block.receive[0], &previous.receive[protocol], previous.peer);
  }
  if (group.isLoader(1)) {
    Connection& next = channel.connections[channel.ring.next];
    loadEnd(block.send[0], &next.send[protocol], next.peer);
  }
}

template <template <int, int> class ProtocolOf>
class RingCollective {
 public:
  UNISONO_DEVICE RingCollective(ThreadGroup& group, Block& block)
      : block_(block),
        elementBytes_(elementBytes(block.work.reduction.type)),
        mover_(group, block) {}

  // The part of a channel is cut into rounds. In each, a chunk of every rank (all-reduce) or one
  // chunk travels along the ring, and a rank handles one in each step.
  UNISONO_DEVICE void run() {
    const CollectiveWork& work = block_.work;
    const ChannelPart part = work.part(block_.channel);
    const int ranks = block_.ranks;
    const bool all = work.operation == Operation::allReduce;
    const int chunksPerRound = all ? ranks : 1;
    uint64_t chunk = work.chunkElements;
    const uint64_t round = chunk * static_cast<uint64_t>(chunksPerRound);
    const int steps = stepsOf(work.operation);
    mover_.begin(receivesResults() ? kPrevious : kNobody);
    for (uint64_t done = 0; done < part.count; done += round) {
      const uint64_t left = part.count - done;
      if (all && left < round) chunk = part.lastChunk;
      for (int step = 0; step < steps; step++) {
        const int index = all ? allReduceChunk(step) : 0;
        const uint64_t begin = chunk * static_cast<uint64_t>(index);
        const uint64_t rest = begin < left ? left - begin : 0;
        Slice slice = sliceOf(step, part.offset + done + begin);
        slice.elements = rest < chunk ? rest : chunk;
        mover_.move(slice);
      }
    }
    mover_.finish();
  }

 private:
  // The one peer on either side.
  static constexpr Peers kPrevious = 1, kNext = 1;

  UNISONO_DEVICE int stepsOf(Operation operation) const {
    switch (operation) {
      case Operation::allReduce:
        return 2 * block_.ranks - 1;
      case Operation::allGather:
      case Operation::reduceScatter:
        return block_.ranks;
      default:
        return 1;
    }
  }
  UNISONO_DEVICE bool receivesResults() const {
    switch (block_.work.operation) {
      case Operation::allReduce:
      case Operation::allGather:
        return true;
      case Operation::broadcast:
        return block_.rank != block_.work.root;
      default:
        return false;
    }
  }
  // Which chunk of a round a rank handles: it begins with the chunk of the rank before it, and goes
  // back by one in each step.
  UNISONO_DEVICE int allReduceChunk(int step) const {
    int index = block_.ring.position - 1 - step;
    while (index < 0) index += block_.ranks;
    return index;
  }

  // What a rank does in a step with its chunk, `index` elements into the user's buffers or, if
  // these have a share for each rank, into a share.
  UNISONO_DEVICE Slice sliceOf(int step, uint64_t index) const {
    const CollectiveWork& work = block_.work;
    const int last = block_.ranks - 1;
    Slice slice;
    switch (work.operation) {
      case Operation::allReduce:
        if (step > 0) slice.receive = kPrevious;
        if (step < 2 * last) slice.send = kNext;
        if (step <= last) addOperand(slice, index);
        slice.finish = step == last;
        if (step >= last) addResult(slice, index);
        break;
      case Operation::allGather: {
        if (step > 0) slice.receive = kPrevious;
        if (step < last) slice.send = kNext;
        addResult(slice, shareOf(rankBefore(step)) + index);
        if (step == 0) addOwnResult(slice, index);
        break;
      }
      case Operation::reduceScatter:
        if (step > 0) slice.receive = kPrevious;
        if (step < last) slice.send = kNext;
        addOperand(slice, shareOf(rankBefore(step + 1)) + index);
        slice.finish = step == last;
        if (step == last) slice.output = output(index);
        break;
      case Operation::broadcast:
        if (block_.rank != work.root) slice.receive = kPrevious;
        if (block_.send[0].peer != work.root) slice.send = kNext;
        addResult(slice, index);
        if (block_.rank == work.root) addOwnResult(slice, index);
        break;
      case Operation::reduce:
        if (block_.receive[0].peer != work.root) slice.receive = kPrevious;
        addOperand(slice, index);
        if (block_.rank == work.root) {
          slice.finish = true;
          slice.output = output(index);
        } else {
          slice.send = kNext;
        }
        break;
      case Operation::local:
        break;
    }
    return slice;
  }

  UNISONO_DEVICE void addOperand(Slice& slice, uint64_t index) const {
    slice.input = input(index);
    slice.prepare = true;
  }
  // What goes on to other ranks from here on is part of the result.
  UNISONO_DEVICE void addResult(Slice& slice, uint64_t index) const {
    slice.output = output(index);
    slice.receivesResult = slice.input == nullptr && slice.receive != kNobody;
    slice.sendsResult = true;
    slice.place = index * elementBytes_;
  }
  // This rank's part of a result, which may be in place already.
  UNISONO_DEVICE void addOwnResult(Slice& slice, uint64_t index) const {
    slice.input = input(index);
    if (slice.input == slice.output) slice.output = nullptr;
  }

  // Element `index` of the user's buffers.
  UNISONO_DEVICE const std::byte* input(uint64_t index) const {
    return static_cast<const std::byte*>(block_.work.input) + index * elementBytes_;
  }
  UNISONO_DEVICE std::byte* output(uint64_t index) const {
    return static_cast<std::byte*>(block_.work.output) + index * elementBytes_;
  }
  // The rank `distance` steps before this one, 0 .. ranks.
  UNISONO_DEVICE int rankBefore(int distance) const {
    if (distance == 0 || distance == block_.ranks) return block_.rank;
    if (distance == 1) return block_.receive[0].peer;  // without a load from the table
    return block_.ring.order[block_.ranks - distance];
  }
  // Where a rank's share of an all-gather or reduce-scatter begins.
  UNISONO_DEVICE uint64_t shareOf(int rank) const {
    return static_cast<uint64_t>(rank) * block_.work.count;
  }

  Block& block_;
  uint64_t elementBytes_;
  Mover<ProtocolOf<1, 1>> mover_;
};

}  // namespace unisono::device::UNISONO_TARGET
