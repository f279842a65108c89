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

// NCCL_ALGO: a list of names separated by commas ("ring", "direct"), with a leading ^ all but
// these; empty allows all. The other names that NCCL has are taken and stand for nothing yet. A
// bad name throws Error(invalidArgument) that lists the good ones. Ring is always left for the
// calls that nothing else can carry.
AllowedAlgorithms parseAlgorithms(std::string_view text);

// What the choice depends on; the same on every rank.
struct Situation {
  int ranks = 1;
  int channels = 1;               // channels of the rings
  size_t oneShotMaxBytes = 0;     // 0: not every pair of ranks can map each other's memory
  size_t minBytesPerChannel = 1;  // a channel with less is not worth its start
  AllowedAlgorithms allowed;
};

// For an all-reduce of `bytes` bytes.
Algorithm chooseAllReduce(const Situation& situation, size_t bytes);

// Channels for collectives that together move `bytes` bytes: between 1 and situation.channels.
int chooseChannels(const Situation& situation, size_t bytes);

}  // namespace unisono::tuning
