// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

// The element types of the bench: sizes, limits, and conversions between stored bits and double,
// also for the small floats that have no C++ type.
namespace unisono::bench {

// Numbered as ncclDataType_t.
enum class ElementType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
  float8e4m3 = 10,
  float8e5m2 = 11,
};
inline constexpr int kElementTypes = 12;

enum class NumberKind { signedInteger, unsignedInteger, floating };

struct ElementInfo {
  ElementType type;
  const char* name;       // as printed and accepted by -d: the names of nccl-tests
  const char* otherName;  // also accepted by -d
  size_t bytes;
  NumberKind kind;
  int valueBits;        // integers: bits without the sign; floats: bits of the significand with
                        // the implied one
  double smallest;      // floats: the smallest positive (subnormal) number
  double intermediate;  // floats: unit roundoff of the next wider type, in which a library may
                        // compute before it rounds to this one; 0 if it computes in the type
  // Half the distance between 1 and the next number: the greatest relative error of one rounding.
  double unitRoundoff() const;
};

std::span<const ElementInfo> elementTypes();
const ElementInfo& elementInfo(ElementType type);
// Null if no type has this name.
const ElementInfo* findElementType(std::string_view name);

// Decodes the number in the lowest `bytes` of `bits`. Integers convert to the nearest double.
double decodeElement(ElementType type, uint64_t bits);

// The element nearest to `value`, ties to even. Beyond the largest finite number: infinity, or NaN
// for fp8 e4m3, which has none. Integers: `value` must be whole and in range.
uint64_t encodeElement(ElementType type, double value);

// Decodes `count` elements at `source` (any alignment).
void decodeElements(ElementType type, const std::byte* source, size_t count, double* out);

}  // namespace unisono::bench
