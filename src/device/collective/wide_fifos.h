// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/direct_work.h"
#include "device/protocol/lines.h"

namespace unisono::device::UNISONO_TARGET {

// The FIFOs over LL128 (device/direct_work.h) between a block of this rank and the blocks of the
// same number of its peers.
class WideFifos {
 public:
  using CopyFormat = VectorLinesFormat;

 protected:
  UNISONO_DEVICE WideFifos(const WideMemory& memory, const uint32_t* abortFlag, int rank, int ranks,
                           int blocks, uint32_t slotLines, int block)
      : memory_(memory),
        abortFlag_(abortFlag),
        me_(rank),
        peers_(ranks - 1),
        blocks_(blocks),
        slotLines_(slotLines),
        block_(block) {}

  UNISONO_DEVICE int rankOf(int peer) const { return peer < me_ ? peer : peer + 1; }

  UNISONO_DEVICE WideSteps* stepsOf(int peer) const {
    return memory_.steps + block_ * peers_ + peer;
  }
  UNISONO_DEVICE uint64_t sentTo(int peer) const {
    noteRead(&stepsOf(peer)->sent, sizeof(uint64_t));
    return stepsOf(peer)->sent;
  }
  UNISONO_DEVICE uint64_t receivedFrom(int peer) const {
    noteRead(&stepsOf(peer)->received, sizeof(uint64_t));
    return stepsOf(peer)->received;
  }
  // What the peer `peer` has taken of what this block sends, and the reverse.
  UNISONO_DEVICE const uint64_t* takenBy(int peer) const {
    return reinterpret_cast<const uint64_t*>(memory_.window) + block_ * kDirectMaxRanks +
           rankOf(peer);
  }
  UNISONO_DEVICE uint64_t* takenFrom(int peer) const {
    return reinterpret_cast<uint64_t*>(memory_.theirs[peer]) + block_ * kDirectMaxRanks + me_;
  }
  // The slot of a step in the window of its receiver, where the sender is peer `sender`.
  UNISONO_DEVICE std::byte* slot(std::byte* window, int sender, uint64_t step) const {
    const int fifo = sender * blocks_ + block_;
    const uint64_t index = static_cast<uint64_t>(fifo) * kWideSlots + step % kWideSlots;
    return window + wideHeaderBytes() + index * slotLines_ * kWideLineBytes;
  }
  UNISONO_DEVICE std::byte* slotTo(int peer, uint64_t step) const {
    return slot(memory_.theirs[peer], peerOfRank(me_, rankOf(peer)), step);
  }
  UNISONO_DEVICE const std::byte* slotFrom(int peer, uint64_t step) const {
    return slot(memory_.window, peer, step);
  }
  // By whole warps, which store lines together afterwards: all lanes go on, or none. `taken`: what
  // the peer was last seen to have taken.
  UNISONO_DEVICE bool awaitSlot(int peer, uint64_t step, uint64_t& taken) const {
    const uint64_t* counter = takenBy(peer);
    return waitUntilAll(abortFlag_, {"room in the window", me_, rankOf(peer), block_}, [&] {
      if (step < taken + kWideSlots) return true;
      taken = loadRelaxed(counter);
      return step < taken + kWideSlots;
    });
  }

  const WideMemory& memory_;
  const uint32_t* abortFlag_;
  int me_;
  int peers_;
  int blocks_;  // of the window
  uint32_t slotLines_;
  int block_;
};

}  // namespace unisono::device::UNISONO_TARGET
