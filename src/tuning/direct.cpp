// SPDX-License-Identifier: Apache-2.0
#include "tuning/direct.h"

#include <algorithm>
#include <array>

#include "base/math.h"

namespace unisono::tuning {

int directLineBits(int ranks) {
  int bits = 17;
  for (int most = 4; most < ranks; most *= 2) bits--;
  return bits;
}

DirectLimits directLimits(int lineBits) {
  DirectLimits limits;
  // Measured on 2 H200: faster than any ring as far as the streams reach.
  limits.shareBytes[static_cast<size_t>(Protocol::ll)] =
      (uint64_t{1} << lineBits) / device::kDirectShares * 8;
  // Shares are counted in 32 bits.
  limits.shareBytes[static_cast<size_t>(Protocol::ll128)] = uint64_t{1} << 30;
  return limits;
}

namespace {

// Lines that the threads of a block hold one part of each.
constexpr uint64_t kWideLinesPerRow = device::kDirectMaxThreads / 8;
// Those of works over LL128 of any size.
constexpr int kManyBlocks = 64;

}  // namespace

WideGeometry wideGeometry(int ranks, int mostBlocks) {
  constexpr auto kRow = static_cast<uint32_t>(kWideLinesPerRow);
  if (ranks <= 2) return {mostBlocks, 4 * kRow};
  const int most = ranks <= 8 ? kManyBlocks : kManyBlocks / 2;
  return {std::min(mostBlocks, most), ranks <= 4 ? 2 * kRow : kRow};
}

WideKind wideKindOf(Operation operation, bool twoShot) {
  switch (operation) {
    case Operation::allReduce:
      return twoShot ? WideKind::twoShot : WideKind::oneShot;
    case Operation::reduceScatter:
      return WideKind::reduceScatter;
    case Operation::reduce:
      return WideKind::reduce;
    default:
      return WideKind::copy;
  }
}

WideShape wideShape(const WideGeometry& geometry, WideKind kind, uint64_t bytes, int mostBlocks) {
  // Blocks with few lines need few threads; 61 lines in each of 9 blocks took 5 % longer (4 H200,
  // docs/results/2026-11-28-wide-kernels.md).
  constexpr uint64_t kLinesPerWarp = 4, kLinesPerBlock = 16;
  const uint64_t lines = std::max<uint64_t>(ceilDivide(bytes, uint64_t{device::kWideLineData}), 1);
  uint64_t most = geometry.slotLines;
  const auto limit = static_cast<uint64_t>(std::min(geometry.blocks, mostBlocks));
  uint64_t blocks = std::min(ceilDivide(lines, std::min(kLinesPerBlock, most)), limit);
  // The rest of the multiprocessors helps where each block then has one pass instead of two, or
  // half of one in two shots. A reduce-scatter of a few passes gains by shorter ones instead. Both
  // on 2 H100 (docs/results/2026-11-26-h100x2.md).
  constexpr uint64_t kFewPasses = 5;
  const uint64_t many = std::min<uint64_t>(blocks, kManyBlocks);
  const bool scatters = kind == WideKind::reduceScatter;
  const uint64_t least = kind == WideKind::twoShot ? most / 2 : most;
  if (scatters || lines <= many * least || lines > blocks * most) blocks = many;
  if (scatters && lines > blocks * most && lines <= kFewPasses * blocks * most) {
    most = std::min(most, 2 * kWideLinesPerRow);
  }
  // As equal as possible among the blocks and their passes.
  const uint64_t passes = ceilDivide(lines, blocks * most);
  const uint64_t passLines =
      std::min(roundUp(ceilDivide(lines, blocks * passes), std::min(kLinesPerWarp, most)), most);
  return {static_cast<int>(std::min(blocks, ceilDivide(lines, passLines))),
          static_cast<uint32_t>(passLines)};
}

namespace {

bool reduces(WideKind kind) {
  return kind != WideKind::copy && kind != WideKind::message;
}

// The threads of a block: as few as move a pass of `passLines` lines of each share at once, where
// `teams` teams copy, or all threads reduce.
int wideThreads(uint32_t passLines, bool reduces, int teams) {
  // Where the lines of a lane are in two pairs for copies, and in one for reductions. Blocks of 256
  // threads instead of 512 begin 0.13 us earlier (docs/results/2026-11-28-wide-kernels.md).
  constexpr int kLanesPerCopiedLine = 2, kLanesPerReducedLine = 4, kLeast = 256, kGrain = 128;
  const int lines = static_cast<int>(passLines);
  const int lanes =
      std::max(kLanesPerCopiedLine * lines * teams, reduces ? kLanesPerReducedLine * lines : 0);
  return std::clamp(roundUp(lanes, kGrain), kLeast, device::kDirectMaxThreads);
}

// Messages are limited to sizes below. Only the rank that multiplies its operands knows its factor,
// and in one shot the results of an all-reduce may take the place of operands that others need.
bool offersBuffers(const WideGeometry& geometry, const WideCall& call) {
  if (!call.hasWindows || (call.multiplies && reduces(call.kind))) return false;
  if (call.kind == WideKind::message || call.kind == WideKind::oneShot) return false;
  const auto peers = static_cast<uint64_t>(call.ranks - 1);
  return call.bytes * (reduces(call.kind) ? 1 : peers) >= geometry.offerBytes;
}

// The most blocks of a work. Where the links limit it, 32 blocks have the speed of 64, within 3 %,
// and leave the other multiprocessors to the user (measured on 2 H200). Those are copies and, with
// an exchange of buffers, all-reduces of elements of two bytes and more
// (docs/results/2026-11-23-clusters.md, docs/results/2026-11-28-blocks.md). Over lines this was not
// measured with more ranks, and smaller shares are faster in one pass of more blocks. Other
// reductions take up to a fifth longer with 32.
int mostBlocksOf(const WideCall& call, bool offers) {
  constexpr int kFewBlocks = kManyBlocks / 2;
  constexpr uint64_t kLargeShare = 4 << 20;
  const bool copies = !reduces(call.kind);
  if (offers) {
    const bool isTwoShot = call.kind == WideKind::twoShot && device::elementBytes(call.type) >= 2;
    return copies || isTwoShot ? kFewBlocks : kManyBlocks;
  }
  const bool isLarge = call.ranks == 2 && call.bytes >= kLargeShare;
  return copies && isLarge ? kFewBlocks : device::kWideMaxBlocks;
}

}  // namespace

WideCallShape wideCallShape(const WideGeometry& geometry, const WideCall& call) {
  const bool offers = offersBuffers(geometry, call);
  const WideShape shape = wideShape(geometry, call.kind, call.bytes, mostBlocksOf(call, offers));
  // In these an output may take the place of an input that goes to all peers.
  const bool replacesInput = call.kind == WideKind::oneShot || call.kind == WideKind::reduce;
  const int teams = replacesInput ? 1 : call.ranks - 1;
  return {shape.blocks, shape.passLines, wideThreads(shape.passLines, reduces(call.kind), teams),
          teams, offers};
}

uint64_t partOfTwoShot(uint64_t bytes, int ranks) {
  constexpr uint64_t kGrain = 128;
  return roundUp(ceilDivide(bytes, static_cast<uint64_t>(ranks)), kGrain);
}

RailParts railParts(const DirectLimits& limits, uint64_t bytes, int ranksPerNode) {
  constexpr uint64_t kSmall = 8 << 10, kGrain = 128;
  if (bytes <= kSmall && limits.fits(Protocol::ll, bytes)) return {0, bytes};
  const auto ranks = static_cast<uint64_t>(ranksPerNode);
  const uint64_t share = bytes / ranks / kGrain * kGrain;
  return {share, bytes - ranks * share};
}

uint64_t shareOf(Operation operation, uint64_t bytes, int ranks) {
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  if (!scatters) return bytes;
  const auto parts = static_cast<uint64_t>(ranks);
  return bytes / parts + (bytes % parts != 0 ? 1 : 0);
}

DirectShape directShape(uint64_t lines, int mostBlocks) {
  // The multiprocessors store in parallel what one would store to each peer in turn. Blocks of 128
  // threads instead of 512 make all-reduces of 4 to 16 KB 9 to 12 % faster, all-gathers of 16 to 64
  // KB 7 to 10 % (4 H100; 3 to 6 % on 2, docs/results/2026-11-27-small-blocks.md). Blocks of 512
  // are faster once all blocks are used.
  struct Tier {
    uint64_t threads;
    int blocks;
  };
  constexpr std::array<Tier, 2> kTiers{{{128, 32}, {256, device::kDirectMaxBlocks}}};
  uint64_t most = device::kDirectMaxThreads;
  for (const Tier& tier : kTiers) {
    if (lines <= tier.threads * static_cast<uint64_t>(std::min(tier.blocks, mostBlocks))) {
      most = tier.threads;
      break;
    }
  }
  const uint64_t blocks =
      std::clamp<uint64_t>(ceilDivide(lines, most), 1, static_cast<uint64_t>(mostBlocks));
  const uint64_t threads = std::clamp<uint64_t>(roundUp(lines, uint64_t{32}), 64, most);
  return {static_cast<int>(blocks), static_cast<int>(threads)};
}

}  // namespace unisono::tuning
