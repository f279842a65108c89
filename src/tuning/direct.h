// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "device/direct_work.h"
#include "tuning/names.h"

// What the direct family carries and with which blocks: the one place of its limits. Pure.
namespace unisono::tuning {

// The largest share (what one rank sends to another in a call) by protocol, 0: none; and the most
// blocks of a launch.
struct DirectLimits {
  std::array<uint64_t, device::kProtocols> shareBytes{};
  uint64_t messageBytes = ~uint64_t{0};  // of a message, in addition
  // By protocol: messages beyond it are faster by another path, as the user has measured.
  std::array<uint64_t, device::kProtocols> fasterMessageBytes{~uint64_t{0}, ~uint64_t{0},
                                                              ~uint64_t{0}};
  int blocks = device::kDirectMaxBlocks;

  uint64_t fasterBytes(Protocol protocol) const {
    return fasterMessageBytes[static_cast<size_t>(protocol)];
  }
  bool fits(Protocol protocol, uint64_t share) const {
    return share <= shareBytes[static_cast<size_t>(protocol)];
  }
};

// Lines of a stream between two of `ranks` ranks, as a power of two: 2 MiB from each of up to 4
// ranks, 8 MiB in all with more.
int directLineBits(int ranks);

// The limits of ranks with streams of 2^lineBits lines of LL.
DirectLimits directLimits(int lineBits);

// The FIFOs over LL128 between two of `ranks` ranks: one for each block, with slots of `slotLines`
// lines. About 16 MiB of slots at most.
struct WideGeometry {
  int blocks = 0;  // 0: there are none
  uint32_t slotLines = 0;
  // From which on ranks offer each other their buffers: of a share in a reduction, of all shares
  // that a rank receives in a copy.
  uint64_t offerBytes = ~uint64_t{0};
};
WideGeometry wideGeometry(int ranks, int mostBlocks = device::kWideMaxBlocks);

// What shapes differ by. `twoShot`: an all-reduce.
enum class WideKind { reduceScatter, twoShot, other };

// The blocks of a work over LL128 whose shares have `bytes` bytes, and the lines of a share that a
// block moves at a time.
struct WideShape {
  int blocks;
  uint32_t passLines;
};
WideShape wideShape(const WideGeometry& geometry, WideKind kind, uint64_t bytes,
                    int mostBlocks = device::kWideMaxBlocks);
// The threads of a block: as few as move a pass of `passLines` lines of each share at once, where
// `teams` teams (device::WideArguments) copy, or all threads reduce.
int wideThreads(uint32_t passLines, bool reduces, int teams);

// The most blocks of a work that begins with an exchange of buffers. Copies, and all-reduces in two
// shots of elements of two bytes and more, are bound by the links: 32 blocks have the speed of 64,
// within 3 %, and leave the other multiprocessors to the user (measured on 2 H200,
// docs/results/2026-11-23-clusters.md). Other reductions take up to a fifth longer with 32.
int mostBlocksInPlace(bool reduces, bool twoShot, device::DataType type);

// What a work over LL128 does with its buffers. Only the rank that multiplies its operands
// (`multiplies`) knows its factor, and in one shot the results of an all-reduce may take the place
// of operands that others still need (`replaces`).
struct WideUse {
  int peers;
  bool reduces, multiplies, replaces;
};
// Says whether a work whose shares have `bytes` bytes begins with an exchange of buffers.
bool offersBuffers(const WideGeometry& geometry, const WideUse& use, uint64_t bytes);

// The bytes of the part of an all-reduce in two shots that each of `ranks` ranks reduces. The last
// parts may be shorter, or empty.
uint64_t partOfTwoShot(uint64_t bytes, int ranks);

// What Algorithm::directTree moves along each rail: a share of its own, which the ranks of a node
// reduce and gather, and the rest, which every rank has. Small calls are all rest: two launches
// instead of three matter more than what a network then carries for each rank. In bytes.
struct RailParts {
  uint64_t share, rest;
};
RailParts railParts(const DirectLimits& limits, uint64_t bytes, int ranksPerNode);

// The share of a collective of `bytes` bytes (the larger of a rank's input and output).
uint64_t shareOf(Operation operation, uint64_t bytes, int ranks);

// The geometry of a launch for a work of `lines` lines: a thread for each line, as far as
// `mostBlocks` blocks have them. Few lines have small blocks.
struct DirectShape {
  int blocks;
  int threads;
};
DirectShape directShape(uint64_t lines, int mostBlocks = device::kDirectMaxBlocks);

}  // namespace unisono::tuning
