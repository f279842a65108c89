// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/protocol.h"

// The ring algorithms. Data always flows from the previous rank to the next; `order[i]` is the rank
// i steps after this one.
namespace unisono::device::UNISONO_TARGET {

// Loads the ends of the FIFOs that a group uses.
UNISONO_DEVICE void loadRingEnds(ThreadGroup& group, Block& block, Channel& channel, int protocol) {
  if (group.isLoader(0)) {
    Connection& previous = channel.connections[block.ring.previous];
    loadEnd(block.receive[0], &previous.receive[protocol], previous.peer);
  }
  if (group.isLoader(1)) {
    Connection& next = channel.connections[block.ring.next];
    loadEnd(block.send[0], &next.send[protocol], next.peer);
  }
}

template <template <int, int> class ProtocolOf>
class RingCollective {
 public:
  UNISONO_DEVICE RingCollective(ThreadGroup& group, Block& block)
      : work_(block.work),
        ring_(block.ring),
        ranks_(block.ranks),
        rank_(block.rank),
        elementBytes_(elementBytes(block.work.reduction.type)),
        part_(block.work.part(block.channel)),
        mover_(group, block) {}

  UNISONO_DEVICE void run() {
    switch (work_.operation) {
      case Operation::allReduce:
        mover_.begin(kPrevious);
        allReduce();
        break;
      case Operation::allGather:
        mover_.begin(kPrevious);
        allGather();
        break;
      case Operation::reduceScatter:
        mover_.begin(kNobody);
        reduceScatter();
        break;
      case Operation::broadcast:
        mover_.begin(rank_ == work_.root ? kNobody : kPrevious);
        broadcast();
        break;
      case Operation::reduce:
        mover_.begin(kNobody);
        reduce();
        break;
      case Operation::local:
        break;
    }
    mover_.finish();
  }

 private:
  // The one peer on either side.
  static constexpr Peers kPrevious = 1, kNext = 1;

  // Element `index` of the user's buffers.
  UNISONO_DEVICE const std::byte* input(uint64_t index) const {
    return static_cast<const std::byte*>(work_.input) + index * elementBytes_;
  }
  UNISONO_DEVICE std::byte* output(uint64_t index) const {
    return static_cast<std::byte*>(work_.output) + index * elementBytes_;
  }

  // The part is cut into rounds of a chunk for each rank; the chunks of a round circulate at once.
  UNISONO_DEVICE void allReduce() {
    const uint64_t ranks = static_cast<uint64_t>(ranks_);
    const int position = ring_.position;
    uint64_t chunk = work_.chunkElements;
    for (uint64_t base = 0; base < part_.count; base += chunk * ranks) {
      const uint64_t remaining = part_.count - base;
      if (remaining < chunk * ranks) chunk = part_.lastChunk;
      auto sizeOf = [&](int index) {
        const uint64_t begin = chunk * static_cast<uint64_t>(index);
        return begin >= remaining ? uint64_t{0}
                                  : (remaining - begin < chunk ? remaining - begin : chunk);
      };
      auto offsetOf = [&](int index) {
        return part_.offset + base + chunk * static_cast<uint64_t>(index);
      };
      auto wrapped = [&](int index) { return index >= ranks_ ? index - ranks_ : index; };

      int index = wrapped(position + ranks_ - 1);
      mover_.send(kNext, input(offsetOf(index)), sizeOf(index), true);
      for (int step = 2; step < ranks_; step++) {
        index = wrapped(position + ranks_ - step);
        mover_.receiveReduceSend(kPrevious, kNext, input(offsetOf(index)), sizeOf(index));
      }
      index = position;
      mover_.receiveReduceCopySend(kPrevious, kNext, input(offsetOf(index)),
                                   output(offsetOf(index)), sizeOf(index));
      for (int step = 1; step < ranks_ - 1; step++) {
        index = wrapped(position + ranks_ - step);
        mover_.receiveCopySend(kPrevious, kNext, output(offsetOf(index)), sizeOf(index));
      }
      index = wrapped(position + 1);
      mover_.receive(kPrevious, output(offsetOf(index)), sizeOf(index));
    }
  }

  UNISONO_DEVICE void allGather() {
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      const uint64_t size = chunkSize(done);
      const uint64_t offset = part_.offset + done;
      mover_.sendCopy(kNext, input(offset), output(shareOf(rank_) + offset), size);
      for (int step = 1; step < ranks_ - 1; step++) {
        mover_.receiveCopySend(kPrevious, kNext,
                               output(shareOf(ring_.order[ranks_ - step]) + offset), size);
      }
      mover_.receive(kPrevious, output(shareOf(ring_.order[1]) + offset), size);
    }
  }

  UNISONO_DEVICE void reduceScatter() {
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      const uint64_t size = chunkSize(done);
      const uint64_t offset = part_.offset + done;
      mover_.send(kNext, input(shareOf(ring_.order[ranks_ - 1]) + offset), size, true);
      for (int step = 2; step < ranks_; step++) {
        mover_.receiveReduceSend(kPrevious, kNext,
                                 input(shareOf(ring_.order[ranks_ - step]) + offset), size);
      }
      mover_.receiveReduceCopy(kPrevious, input(shareOf(rank_) + offset), output(offset), size);
    }
  }

  UNISONO_DEVICE void broadcast() {
    const bool last = ring_.order[1] == work_.root;
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      const uint64_t size = chunkSize(done);
      const uint64_t offset = part_.offset + done;
      if (rank_ == work_.root) {
        mover_.sendCopy(kNext, input(offset), output(offset), size);
      } else if (last) {
        mover_.receive(kPrevious, output(offset), size);
      } else {
        mover_.receiveCopySend(kPrevious, kNext, output(offset), size);
      }
    }
  }

  UNISONO_DEVICE void reduce() {
    const bool first = ring_.order[ranks_ - 1] == work_.root;
    for (uint64_t done = 0; done < part_.count; done += work_.chunkElements) {
      const uint64_t size = chunkSize(done);
      const uint64_t offset = part_.offset + done;
      if (rank_ == work_.root) {
        mover_.receiveReduceCopy(kPrevious, input(offset), output(offset), size);
      } else if (first) {
        mover_.send(kNext, input(offset), size, true);
      } else {
        mover_.receiveReduceSend(kPrevious, kNext, input(offset), size);
      }
    }
  }

  UNISONO_DEVICE uint64_t chunkSize(uint64_t done) const {
    const uint64_t remaining = part_.count - done;
    return remaining < work_.chunkElements ? remaining : work_.chunkElements;
  }
  // Where a rank's share of an all-gather or reduce-scatter begins.
  UNISONO_DEVICE uint64_t shareOf(int rank) const {
    return static_cast<uint64_t>(rank) * work_.count;
  }

  const CollectiveWork& work_;
  const Ring& ring_;
  int ranks_, rank_;
  uint64_t elementBytes_;
  ChannelPart part_;
  Mover<ProtocolOf<1, 1>> mover_;
};

}  // namespace unisono::device::UNISONO_TARGET
