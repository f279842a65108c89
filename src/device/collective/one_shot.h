// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/protocol/low_latency.h"

// One-shot direct all-reduce: one hop, nothing but latency. Each lane stores its pack to every
// peer, then polls for the peers' packs of the same index and reduces them.
namespace unisono::device::UNISONO_TARGET {

// How many ranks a body is made for: exactly kRanks, or any number up to it.
template <int kRanks, bool kExactly>
struct OneShotRanks {
  static constexpr int kMost = kRanks;
  UNISONO_DEVICE static int of(const OneShotArguments& arguments) {
    return kExactly ? kRanks : arguments.ranks;
  }
};

// Lane `lane` of `lanes` in all blocks. Here, where a call takes two microseconds, there is a body
// for each (type, operator) and for the common numbers of ranks: see docs/decisions/0003.
template <typename Ranks, typename R>
UNISONO_DEVICE void oneShotAllReduce(const OneShotArguments& arguments, uint32_t epoch,
                                     uint64_t lane, uint64_t lanes, int block) {
  using Element = typename R::Element;
  constexpr int kRanks = Ranks::kMost;
  const int ranks = Ranks::of(arguments);
  const int me = arguments.rank;
  const R reducer(arguments.reduction);
  const uint64_t bytes = arguments.count * sizeof(Element);
  const uint64_t packs = (bytes + 7) / 8;
  const uint64_t capacity = arguments.linesPerRank;
  const uint64_t half = (epoch & 1) * ranks * capacity;
  const Line* mine = reinterpret_cast<const Line*>(arguments.scratch[me]) + half;

  for (uint64_t base = lane; base < packs; base += lanes * kLinesPerPass) {
    uint64_t own[kLinesPerPass];
    UNISONO_UNROLL
    for (int l = 0; l < kLinesPerPass; l++) {
      const uint64_t index = base + l * lanes;
      if (index >= packs) break;
      own[l] = preparePack(reducer, loadPack<Element>(arguments.input, index, bytes));
      UNISONO_UNROLL
      for (int k = 1; k < kRanks; k++) {
        if (k >= ranks) break;
        // Every rank starts with another peer, so that no receiver is everybody's first.
        const int peer = me + k < ranks ? me + k : me + k - ranks;
        Line* theirs = reinterpret_cast<Line*>(arguments.scratch[peer]) + half;
        storeLine(theirs + me * capacity + index, own[l], epoch);
      }
    }
    UNISONO_UNROLL
    for (int l = 0; l < kLinesPerPass; l++) {
      const uint64_t index = base + l * lanes;
      if (index >= packs) break;
      Line line[kRanks];
      auto allHere = [&] {
        UNISONO_UNROLL
        for (int r = 0; r < kRanks; r++) {
          if (r < ranks && r != me) line[r] = loadLine(mine + r * capacity + index);
        }
        bool here = true;
        UNISONO_UNROLL
        for (int r = 0; r < kRanks; r++) {
          if (r < ranks && r != me) here = here && lineHolds(line[r], epoch);
        }
        return here;
      };
      if (!waitUntil(arguments.abortFlag, {"lines of every peer", me, -1, block}, allHere)) {
        return;
      }
      uint64_t pack[kRanks];
      UNISONO_UNROLL
      for (int r = 0; r < kRanks; r++) pack[r] = r == me ? own[l] : lineData(line[r]);
      storePack<Element>(arguments.output, index, bytes, reducePacks(reducer, pack, ranks));
    }
  }
}

// What is left for block `block` of `blocks` when its lanes are done: every epoch counter advances
// in every call, whatever its number of blocks, so that calls of all sizes share the scratch.
// `lane` of `lanes` inside the block.
UNISONO_DEVICE void advanceEpochs(const OneShotArguments& arguments, uint32_t epoch, int block,
                                  int blocks, int lane, int lanes) {
  for (int i = block + lane * blocks; i < kOneShotMaxBlocks; i += lanes * blocks) {
    noteWrite(arguments.epochs + i, sizeof(epoch));
    arguments.epochs[i] = epoch;
  }
}

}  // namespace unisono::device::UNISONO_TARGET
