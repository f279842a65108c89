// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

// Which algorithm carries a call, and over how many channels. Pure.
namespace unisono::tuning {

enum class Algorithm : int { ring = 0, oneShot = 1 };
inline constexpr int kAlgorithms = 2;

// The algorithms that a user allows.
struct AllowedAlgorithms {
  bool allowed[kAlgorithms] = {true, true};
  bool operator[](Algorithm algorithm) const { return allowed[static_cast<int>(algorithm)]; }
};

// The algorithms that NCCL_ALGO allows for all-reduce, the only collective with a choice so far.
// Ring is always left for the calls that nothing else can carry.
//
// The syntax is NCCL's, with "direct" as an additional name: names separated by commas, of any
// case, which a leading ^ excludes; the list applies to all collectives, or after "allreduce:" to
// one. Several such lists are separated by semicolons, where only the first may lack the
// collective. Empty allows all. NCCL's other algorithms are accepted and fall back to ring.
// Anything else throws Error(invalidUsage) that lists what is allowed.
AllowedAlgorithms parseAlgorithms(std::string_view text);

// Checks NCCL_PROTO, which has the same syntax, with the names LL, LL128 and Simple. There is no
// choice of protocol yet.
void checkProtocols(std::string_view text);

// What the choice depends on; the same on every rank.
struct TuningInput {
  int ranks = 1;
  int channels = 1;               // channels of the rings
  size_t oneShotMaxBytes = 0;     // 0: not every pair of ranks can map each other's memory
  size_t minBytesPerChannel = 1;  // a channel with less is not worth its start
  AllowedAlgorithms allowed;
};

// For an all-reduce of `bytes` bytes.
Algorithm chooseAllReduce(const TuningInput& tuningInput, size_t bytes);

// Channels for collectives that together move `bytes` bytes: between 1 and tuningInput.channels.
int chooseChannels(const TuningInput& tuningInput, size_t bytes);

}  // namespace unisono::tuning
