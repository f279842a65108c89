// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/direct_work.h"
#include "device/protocol/launch_mark.h"
#include "device/simt/simt.h"

// A barrier of all ranks that reach each other's memory: what a rank, or a copy before it on its
// stream, has stored is seen by what follows the barrier on the streams of the others. Every rank
// counts its barriers with each peer, and stores the count into that peer's window. A peer is at
// most one barrier ahead, so a count never skips one that is waited for.
namespace unisono::device::UNISONO_TARGET {

UNISONO_DEVICE BarrierCounts& barrierCounts(std::byte* window) {
  return *reinterpret_cast<BarrierCounts*>(window + kBarrierCountsAt);
}
UNISONO_DEVICE uint64_t* passedWith(const BarrierArguments& arguments, int peer) {
  return barrierCounts(arguments.memory.window).passed + rankOfPeer(peer, arguments.rank);
}

// By one thread for each peer: arriveAt(), then awaitArrival().
UNISONO_DEVICE void arriveAt(const BarrierArguments& arguments, int peer) {
  const uint64_t count = loadRelaxed(passedWith(arguments, peer)) + 1;
  storeRelease(barrierCounts(arguments.memory.theirs[peer]).arrived + arguments.rank, count);
}
// After an abort the counts mean nothing any more.
UNISONO_DEVICE void awaitArrival(const BarrierArguments& arguments, int peer) {
  const int other = rankOfPeer(peer, arguments.rank);
  const uint64_t* arrived = barrierCounts(arguments.memory.window).arrived + other;
  const uint64_t count = loadRelaxed(passedWith(arguments, peer)) + 1;
  const WaitSubject subject{"a barrier", arguments.rank, other, 0, arrived, count};
  static_cast<void>(
      waitUntil(arguments.abortFlag, subject, [&] { return loadAcquire(arrived) >= count; }));
  storeRelaxed(passedWith(arguments, peer), count);
}

}  // namespace unisono::device::UNISONO_TARGET
