#pragma once

#include <cstdint>

namespace unisono::runtime::host {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), a good hash of a counter.
inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// The next number of SplitMix64, whose state is any 64-bit number.
inline uint64_t nextRandom(uint64_t& state) {
  return mix(state += 0x9e3779b97f4a7c15u);
}

}  // namespace unisono::runtime::host
