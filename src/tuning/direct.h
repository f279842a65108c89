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

// What works over LL128 differ by: messages are all-to-alls, gathers and scatters; all-reduces take
// one shot or two.
enum class WideKind { copy, message, oneShot, twoShot, reduceScatter, reduce };
WideKind wideKindOf(Operation operation, bool twoShot);

// The blocks of a work over LL128 whose shares have `bytes` bytes, and the lines of a share that a
// block moves at a time.
struct WideShape {
  int blocks;
  uint32_t passLines;
};
WideShape wideShape(const WideGeometry& geometry, WideKind kind, uint64_t bytes,
                    int mostBlocks = device::kWideMaxBlocks);

// A work over LL128 whose shares have `bytes` bytes. `multiplies`: it multiplies its operands with
// factors that only their ranks know. `hasWindows`: ranks can map each other's buffers.
struct WideCall {
  WideKind kind;
  int ranks;
  uint64_t bytes;
  device::DataType type;
  bool multiplies = false, hasWindows = true;
};
// How it is launched. `teams`: as in device::WideArguments. `offers`: it begins with an exchange of
// buffers.
struct WideCallShape {
  int blocks;
  uint32_t passLines;
  int threads, teams;
  bool offers;
};
WideCallShape wideCallShape(const WideGeometry& geometry, const WideCall& call);

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
