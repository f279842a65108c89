// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include "device/protocol/fifo.h"

// What a protocol is, and the verbs in which algorithms are written.
namespace unisono::device::UNISONO_TARGET {

// One slice on its way through a rank.
struct Slice {
  Peers receive;      // combined with each other and with `input`
  const void* input;  // this rank's own operand, or null
  Peers send;         // get the result
  void* output;       // gets the result, or null
  uint64_t elements;
  bool prepare;  // `input` is the rank's contribution, not yet prepared (Reducer::prepare)
  bool finish;   // the result is the complete reduction (Reducer::finish)
};

// A protocol moves slices through the FIFOs of a group. It is made by every thread of the group
// after the block was loaded. Both ends of a FIFO move the same slices in the same order, each in
// one step. After an abort nothing is moved or published any more and every wait ends at once.
// `finish` saves the steps for the next work; a syncAll() follows before that begins.
template <typename P>
concept ProtocolType = requires(P protocol, ThreadGroup& group, Block& block, const Slice& slice) {
  { P::kProtocol } -> std::convertible_to<Protocol>;
  P(group, block);
  { protocol.move(slice) } -> std::same_as<void>;
  { protocol.finish() } -> std::same_as<void>;
};

// The verbs. A chunk moves in slices of the size that the host has chosen; every chunk takes at
// least one step, even an empty one.
template <ProtocolType P>
class Mover {
 public:
  UNISONO_DEVICE Mover(ThreadGroup& group, Block& block) : block_(block), protocol_(group, block) {}

  UNISONO_DEVICE void send(Peers to, const void* input, uint64_t elements, bool prepare) {
    move(kNobody, input, to, nullptr, elements, prepare, false);
  }
  UNISONO_DEVICE void sendCopy(Peers to, const void* input, void* output, uint64_t elements) {
    move(kNobody, input, to, output, elements, false, false);
  }
  UNISONO_DEVICE void receive(Peers from, void* output, uint64_t elements) {
    move(from, nullptr, kNobody, output, elements, false, false);
  }
  UNISONO_DEVICE void receiveCopySend(Peers from, Peers to, void* output, uint64_t elements) {
    move(from, nullptr, to, output, elements, false, false);
  }
  UNISONO_DEVICE void receiveReduceSend(Peers from, Peers to, const void* input,
                                        uint64_t elements) {
    move(from, input, to, nullptr, elements, true, false);
  }
  // Complete the reduction.
  UNISONO_DEVICE void receiveReduceCopy(Peers from, const void* input, void* output,
                                        uint64_t elements) {
    move(from, input, kNobody, output, elements, true, true);
  }
  UNISONO_DEVICE void receiveReduceCopySend(Peers from, Peers to, const void* input, void* output,
                                            uint64_t elements) {
    move(from, input, to, output, elements, true, true);
  }
  UNISONO_DEVICE void finish() { protocol_.finish(); }

 private:
  UNISONO_DEVICE void move(Peers from, const void* input, Peers to, void* output, uint64_t elements,
                           bool prepare, bool finish) {
    const uint64_t most = block_.work.sliceElements;
    const uint64_t size = elementBytes(block_.work.reduction.type);
    uint64_t done = 0;
    do {
      const uint64_t offset = done * size;
      const uint64_t count = elements - done < most ? elements - done : most;
      protocol_.move({from,
                      input == nullptr ? nullptr : static_cast<const std::byte*>(input) + offset,
                      to, output == nullptr ? nullptr : static_cast<std::byte*>(output) + offset,
                      count, prepare, finish});
      done += count;
    } while (done < elements);
  }

  Block& block_;
  P protocol_;
};

}  // namespace unisono::device::UNISONO_TARGET
