// SPDX-License-Identifier: Apache-2.0
#include "plan/fifo_steps.h"

#include <algorithm>

#include "base/math.h"

namespace unisono::plan {
namespace {

using device::CollectiveWork;
using device::Operation;

// Of a chunk (device::Mover): at least one, even if it is empty.
uint64_t chunkSteps(const CollectiveWork& work, uint64_t elements) {
  if (work.protocol != device::Protocol::simple) return 1;
  return std::max<uint64_t>(ceilDivide(elements, uint64_t{work.sliceElements}), 1);
}

// The steps of a round in which a rank receives, from `firstReceive` on, and those in which it
// sends, as in device::RingRole.
struct RingRound {
  int steps, firstReceive, sends;
};
RingRound roundOf(const CollectiveWork& work, const RingPlace& place) {
  const int last = place.ranks - 1;
  const bool isRoot = place.rank == work.root;
  switch (work.operation) {
    case Operation::allReduce:
      return {2 * last + 1, 1, 2 * last};
    case Operation::broadcast:
      return {1, isRoot ? 1 : 0, place.next != work.root ? 1 : 0};
    case Operation::reduce:
      return {1, place.previous != work.root ? 0 : 1, isRoot ? 0 : 1};
    default:
      return {place.ranks, 1, last};
  }
}

}  // namespace

RingSteps ringSteps(const CollectiveWork& work, int channel, const RingPlace& place) {
  const device::ChannelPart part = work.part(channel);
  const bool all = work.operation == Operation::allReduce;
  const auto ranks = static_cast<uint64_t>(place.ranks);
  const uint64_t whole = all ? work.chunkElements * ranks : work.chunkElements;
  const uint64_t rounds = part.count / whole, left = part.count % whole;
  const RingRound round = roundOf(work, place);
  RingSteps result;
  const auto add = [&](int step, uint64_t slots) {
    if (step >= round.firstReceive) result.received += slots;
    if (step < round.sends) result.sent += slots;
  };
  for (int step = 0; step < round.steps; step++) {
    add(step, rounds * chunkSteps(work, work.chunkElements));
  }
  if (left == 0) return result;
  const uint64_t chunk = all ? part.lastChunk : work.chunkElements;
  uint64_t index = all ? static_cast<uint64_t>(place.position) : 0;
  for (int step = 0; step < round.steps; step++) {
    if (all) index = index == 0 ? ranks - 1 : index - 1;
    const uint64_t begin = chunk * index;
    add(step, chunkSteps(work, begin < left ? std::min(left - begin, chunk) : 0));
  }
  return result;
}

uint64_t treeSteps(const CollectiveWork& work, int channel) {
  const uint64_t count = work.part(channel).count, chunk = work.chunkElements;
  return count / chunk * chunkSteps(work, chunk) +
         (count % chunk == 0 ? 0 : chunkSteps(work, count % chunk));
}

uint64_t headSteps(const CollectiveWork& work, int channel, int heads) {
  const bool follow = work.operation == Operation::allReduce;
  const uint64_t step = work.chunkElements * (follow ? static_cast<uint64_t>(heads) : 1);
  return ceilDivide(work.part(channel).count, step);
}

uint64_t messageSteps(const device::Message& message, int index) {
  const uint64_t offset = message.part * static_cast<uint64_t>(index);
  if (offset >= message.bytes) return message.bytes == 0 ? 1 : 0;
  const uint64_t left = message.bytes - offset;
  const uint64_t bytes = index == message.channels - 1 ? left : std::min(left, message.part);
  return ceilDivide(bytes, uint64_t{message.slice});
}

}  // namespace unisono::plan
