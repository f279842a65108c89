// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include "device/protocol/fifo.h"

// What a protocol is, and how algorithms move data through it.
namespace unisono::device::UNISONO_TARGET {

// One slice on its way through a rank.
struct Slice {
  Peers receive = kNobody;      // combined with each other and with `input`
  const void* input = nullptr;  // this rank's own operand, or null
  Peers send = kNobody;         // get the combination
  void* output = nullptr;       // gets the combination, or null
  uint32_t elements = 0;
  bool prepare = false;  // `input` is the rank's contribution, not yet prepared (Reducer::prepare)
  bool finish = false;   // the combination is the complete reduction (Reducer::finish)
  // What is received, or sent, is part of the result of the collective, at `place` bytes in the
  // output of every rank.
  bool receivesResult = false, sendsResult = false;
  uint64_t place = 0;
};

// A protocol moves slices through the FIFOs of a group. It is made by every thread of the group
// after the block was loaded. Both ends of a FIFO move the same slices in the same order, each in
// one step. After an abort nothing is moved or published any more and every wait ends at once.
// `begin` comes first, with the peers from which results are received. `finish` saves the steps for
// the next work; a syncAll() follows before that begins.
template <typename P>
concept ProtocolType = requires(P protocol, ThreadGroup& group, Block& block, const Slice& slice) {
  { P::kProtocol } -> std::convertible_to<Protocol>;
  P(group, block);
  { protocol.begin(Peers{}) } -> std::same_as<void>;
  { protocol.move(slice) } -> std::same_as<void>;
  { protocol.finish() } -> std::same_as<void>;
};

// Moves chunks, with protocol Simple in slices of the size that the host has chosen; every chunk
// takes at least one step, even an empty one. An algorithm should call move() at one place: the
// code of a protocol is inlined there, and what runs again is in the instruction cache already.
template <ProtocolType P>
class Mover {
 public:
  UNISONO_DEVICE Mover(ThreadGroup& group, Block& block)
      : sliceElements_(block.work.sliceElements),
        elementBytes_(elementBytes(block.work.reduction.type)),
        protocol_(group, block) {}

  // Comes before move(). `from`: the peers from which results are received.
  UNISONO_DEVICE void begin(Peers from) { protocol_.begin(from); }

  UNISONO_DEVICE void move(const Slice& chunk) {
    if constexpr (P::kProtocol != Protocol::simple) {
      protocol_.move(chunk);
    } else {
      uint32_t done = 0;
      do {
        const uint64_t offset = uint64_t{done} * elementBytes_;
        const uint32_t left = chunk.elements - done;
        Slice slice = chunk;
        if (chunk.input != nullptr) {
          slice.input = static_cast<const std::byte*>(chunk.input) + offset;
        }
        if (chunk.output != nullptr) {
          slice.output = static_cast<std::byte*>(chunk.output) + offset;
        }
        slice.elements = left < sliceElements_ ? left : sliceElements_;
        slice.place += offset;
        protocol_.move(slice);
        done += slice.elements;
      } while (done < chunk.elements);
    }
  }

  UNISONO_DEVICE void finish() { protocol_.finish(); }

 private:
  // In registers: after every barrier the compiler would read the block again.
  uint32_t sliceElements_, elementBytes_;
  P protocol_;
};

}  // namespace unisono::device::UNISONO_TARGET
