// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "device/work.h"

// A second opinion on numbers: the narrow floating-point types computed from the definition of
// their format in float64, and reductions as a plain loop over the sources.
namespace unisono::protocol {

// A binary floating-point format of at most 16 bits.
struct Format {
  int exponentBits;
  int mantissaBits;
  bool hasInfinity;  // else the largest exponent holds numbers, and only all ones is NaN
  bool saturates;    // conversions to it: beyond the largest number becomes the largest number
};

bool isNarrow(device::DataType type);  // float16, bfloat16, float8e4m3, float8e5m2
Format formatOf(device::DataType type);

double decode(const Format& format, uint32_t code);
// To nearest, ties to even.
uint32_t encode(const Format& format, double value);
double largestOf(const Format& format);

// Any floating-point type, from and to the bits of an element.
double toDouble(device::DataType type, uint64_t bits);
uint64_t fromDouble(device::DataType type, double value);
bool isNan(device::DataType type, uint64_t bits);

inline uint64_t readElement(const void* from, size_t index, size_t elementSize) {
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const std::byte*>(from) + index * elementSize, elementSize);
  return bits;
}
inline void writeElement(void* to, size_t index, size_t elementSize, uint64_t bits) {
  std::memcpy(static_cast<std::byte*>(to) + index * elementSize, &bits, elementSize);
}

// A reduction over some sources.
struct Operator {
  device::DataType type;
  device::Reduction reduction;
  // preMulSum, one a source: what an element is multiplied by. Integers use `integer`.
  struct Factor {
    double real;
    uint64_t integer;
  };
  std::vector<Factor> factors;
  uint64_t divisor = 1;  // sumPostDivide
};

// One element of every source, combined from the first to the last: integers modulo 2^bits, narrow
// floating-point types in float and rounded once at the end, the others in their own arithmetic.
uint64_t reduceInOrder(const Operator& op, std::span<const uint64_t> elements);

// The `scalar` of device::ReductionSpec for a factor that the host gives.
uint64_t scalarOf(device::DataType type, const Operator::Factor& factor);

}  // namespace unisono::protocol
