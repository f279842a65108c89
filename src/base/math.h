// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace unisono {

// The quotient of non-negative integers, rounded up.
template <typename T>
constexpr T ceilDivide(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

// The smallest multiple of `multiple` that is not below `value`.
template <typename T>
constexpr T roundUp(T value, T multiple) {
  return ceilDivide(value, multiple) * multiple;
}

// The finalizer of SplitMix64, a good hash of a counter.
constexpr uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// The next number of SplitMix64 (Steele, Lea, Flood 2014), a fast generator that is not for
// secrets. Its state is any 64-bit number.
constexpr uint64_t splitMix64(uint64_t& state) {
  return mix64(state += 0x9e3779b97f4a7c15u);
}

// Raises `target` to `value` unless it is larger already.
template <typename T>
void atomicMax(std::atomic<T>& target, T value) {
  T now = target.load(std::memory_order_relaxed);
  while (now < value && !target.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}

}  // namespace unisono
