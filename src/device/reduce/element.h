// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/simt/simt.h"
#include "device/work.h"

// The element types, and how they are computed with. The narrow floating-point types, as bits with
// conversions to and from float. On a GPU the conversions are instructions; elsewhere the same
// rounding (to nearest, ties to even) in integer arithmetic. The 8-bit formats saturate to their
// largest finite value, as OCP 8-bit Floating Point Specification 1.0 allows and NVIDIA's
// "satfinite" conversions do.
namespace unisono::device::UNISONO_TARGET {

template <typename To, typename From>
UNISONO_DEVICE To bitsAs(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

// Rounds a float to a format of `kExponentBits` and `kMantissaBits`. With `kSaturate` values beyond
// the largest finite one become that value, else infinity. `kLargest` are the bits of the largest
// finite value, `kInfinity` those of infinity (unused when saturating), `kNan` those of a NaN.
template <int kExponentBits, int kMantissaBits, bool kSaturate, uint32_t kLargest,
          uint32_t kInfinity, uint32_t kNan>
UNISONO_DEVICE uint32_t narrowFloat(float value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kDropped = 23 - kMantissaBits;
  uint32_t bits = bitsAs<uint32_t>(value);
  uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kNan;
  if (magnitude == 0x7f800000u) return sign | (kSaturate ? kLargest : kInfinity);
  int exponent = static_cast<int>(magnitude >> 23) - 127;
  uint32_t result;
  if (exponent >= 1 - kBias) {
    uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
    uint32_t odd = (rebased >> kDropped) & 1;
    result = (rebased + ((1u << (kDropped - 1)) - 1) + odd) >> kDropped;
  } else {
    // Subnormal: shift the mantissa with its hidden bit to the fixed exponent.
    int shift = kDropped + (1 - kBias - exponent);
    if (shift > 31) return sign;
    uint32_t mantissa = (magnitude & 0x7fffffu) | (magnitude >> 23 != 0 ? 0x800000u : 0);
    uint32_t odd = (mantissa >> shift) & 1;
    result = static_cast<uint32_t>(
        (uint64_t{mantissa} + ((uint64_t{1} << (shift - 1)) - 1) + odd) >> shift);
  }
  if (result > kLargest) result = kSaturate ? kLargest : kInfinity;
  return sign | result;
}

template <int kExponentBits, int kMantissaBits>
UNISONO_DEVICE float widenFloat(uint32_t sign, uint32_t exponent, uint32_t mantissa) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  if (exponent == 0) {
    // mantissa * 2^(1 - bias - mantissa bits), exact in float for every format here.
    float scale = bitsAs<float>(static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
    float value = static_cast<float>(mantissa) * scale;
    return sign != 0 ? -value : value;
  }
  return bitsAs<float>(sign << 31 | (exponent + 127 - kBias) << 23 |
                       mantissa << (23 - kMantissaBits));
}

struct Float16 {
  uint16_t bits;

  UNISONO_DEVICE static Float16 from(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return {result};
#else
    return {static_cast<uint16_t>(narrowFloat<5, 10, false, 0x7bff, 0x7c00, 0x7e00>(value))};
#endif
  }
  UNISONO_DEVICE float toFloat() const {
#if defined(__CUDA_ARCH__)
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
#else
    uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 0x3ffu;
    if (exponent == 31) {
      return bitsAs<float>(uint32_t{bits} >> 15 << 31 | 0x7f800000u | mantissa << 13);
    }
    return widenFloat<5, 10>(bits >> 15, exponent, mantissa);
#endif
  }
};

struct BFloat16 {
  uint16_t bits;

  UNISONO_DEVICE static BFloat16 from(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint16_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return {result};
#else
    uint32_t word = bitsAs<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(word >> 16 | 0x40)};
    return {static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
#endif
  }
  UNISONO_DEVICE float toFloat() const {
    return bitsAs<float>(uint32_t{bits} << 16);
  }
};

struct Float8E4M3 {  // no infinity; 0x7f is NaN, the largest value 448
  uint8_t bits;

  UNISONO_DEVICE static Float8E4M3 from(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return {static_cast<uint8_t>(pair)};
#else
    return {static_cast<uint8_t>(narrowFloat<4, 3, true, 0x7e, 0, 0x7f>(value))};
#endif
  }
  UNISONO_DEVICE float toFloat() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bits)));
    return Float16{static_cast<uint16_t>(pair)}.toFloat();
#else
    uint32_t exponent = (bits >> 3) & 15u, mantissa = bits & 7u;
    if (exponent == 15 && mantissa == 7) return bitsAs<float>(0x7fc00000u);
    return widenFloat<4, 3>(bits >> 7, exponent, mantissa);
#endif
  }
};

struct Float8E5M2 {  // as IEEE: infinities and NaN, but conversions saturate
  uint8_t bits;

  UNISONO_DEVICE static Float8E5M2 from(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return {static_cast<uint8_t>(pair)};
#else
    return {static_cast<uint8_t>(narrowFloat<5, 2, true, 0x7b, 0, 0x7f>(value))};
#endif
  }
  UNISONO_DEVICE float toFloat() const {
    return Float16{static_cast<uint16_t>(uint16_t{bits} << 8)}.toFloat();
  }
};

// Elements are computed with a word at a time: 4 bytes, or one element if it is larger.
template <typename T>
using WordOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <typename T>
inline constexpr int kPerWord = static_cast<int>(sizeof(WordOf<T>) / sizeof(T));

// How a type is computed with: narrow floating-point types accumulate in float.
template <typename T>
struct Arithmetic {
  using Accumulator = T;
  static constexpr bool kFloating = std::is_floating_point_v<T>;
  UNISONO_DEVICE static T widen(T value) { return value; }
  UNISONO_DEVICE static T narrow(T value) { return value; }
  UNISONO_DEVICE static void widenWord(WordOf<T> word, T (&value)[kPerWord<T>]) {
    memcpy(value, &word, sizeof(word));
  }
  UNISONO_DEVICE static WordOf<T> narrowWord(const T (&value)[kPerWord<T>]) {
    return bitsAs<WordOf<T>>(value);
  }
};

template <typename T>
struct NarrowArithmetic {
  using Accumulator = float;
  static constexpr bool kFloating = true;
  UNISONO_DEVICE static float widen(T value) { return value.toFloat(); }
  UNISONO_DEVICE static T narrow(float value) { return T::from(value); }
  UNISONO_DEVICE static void widenWord(uint32_t word, float (&value)[kPerWord<T>]) {
    T element[kPerWord<T>];
    memcpy(element, &word, sizeof(word));
    UNISONO_UNROLL
    for (int e = 0; e < kPerWord<T>; e++) value[e] = widen(element[e]);
  }
  UNISONO_DEVICE static uint32_t narrowWord(const float (&value)[kPerWord<T>]) {
    T element[kPerWord<T>];
    UNISONO_UNROLL
    for (int e = 0; e < kPerWord<T>; e++) element[e] = narrow(value[e]);
    return bitsAs<uint32_t>(element);
  }
};

// GPUs convert two elements at a time. The second element is in the high half.
template <>
struct Arithmetic<Float16> : NarrowArithmetic<Float16> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  UNISONO_DEVICE static uint32_t narrowWord(const float (&value)[2]) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
    return word;
  }
#endif
};
template <>
struct Arithmetic<BFloat16> : NarrowArithmetic<BFloat16> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  UNISONO_DEVICE static void widenWord(uint32_t word, float (&value)[2]) {
    value[0] = bitsAs<float>(word << 16);
    value[1] = bitsAs<float>(word & 0xffff0000u);
  }
  UNISONO_DEVICE static uint32_t narrowWord(const float (&value)[2]) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
    return word;
  }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Both 8-bit formats are exact in Float16. Four elements to two pairs of these and back; back, what
// is too large becomes the largest number.
template <typename T>
UNISONO_DEVICE void widenToHalves(uint32_t word, uint32_t (&pair)[2]) {
  const auto low = static_cast<uint16_t>(word), high = static_cast<uint16_t>(word >> 16);
  if constexpr (std::is_same_v<T, Float8E4M3>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair[0]) : "h"(low));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair[1]) : "h"(high));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair[0]) : "h"(low));
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair[1]) : "h"(high));
  }
}
template <typename T>
UNISONO_DEVICE uint32_t narrowFromHalves(const uint32_t (&pair)[2]) {
  uint16_t low, high;
  if constexpr (std::is_same_v<T, Float8E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(low) : "r"(pair[0]));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(high) : "r"(pair[1]));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(low) : "r"(pair[0]));
    asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(high) : "r"(pair[1]));
  }
  return uint32_t{low} | uint32_t{high} << 16;
}
#endif

template <typename T>
struct Arithmetic8 : NarrowArithmetic<T> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  UNISONO_DEVICE static void widenWord(uint32_t word, float (&value)[4]) {
    uint32_t pair[2];
    widenToHalves<T>(word, pair);
    UNISONO_UNROLL
    for (int e = 0; e < 4; e++) {
      value[e] = Float16{static_cast<uint16_t>(pair[e / 2] >> (e % 2 * 16))}.toFloat();
    }
  }
  UNISONO_DEVICE static uint32_t narrowWord(const float (&value)[4]) {
    uint16_t pair[2];
    UNISONO_UNROLL
    for (int i = 0; i < 2; i++) {
      if constexpr (std::is_same_v<T, Float8E4M3>) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(pair[i])
            : "f"(value[2 * i + 1]), "f"(value[2 * i]));
      } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;"
            : "=h"(pair[i])
            : "f"(value[2 * i + 1]), "f"(value[2 * i]));
      }
    }
    return uint32_t{pair[0]} | uint32_t{pair[1]} << 16;
  }
#endif
};
template <>
struct Arithmetic<Float8E4M3> : Arithmetic8<Float8E4M3> {};
template <>
struct Arithmetic<Float8E5M2> : Arithmetic8<Float8E5M2> {};

// The element type of each DataType. Everything that exists once for each type is made from this
// list, and does not compile if a type is missing here.
template <DataType kType>
struct ElementOf;
template <>
struct ElementOf<DataType::int8> : std::type_identity<int8_t> {};
template <>
struct ElementOf<DataType::uint8> : std::type_identity<uint8_t> {};
template <>
struct ElementOf<DataType::int32> : std::type_identity<int32_t> {};
template <>
struct ElementOf<DataType::uint32> : std::type_identity<uint32_t> {};
template <>
struct ElementOf<DataType::int64> : std::type_identity<int64_t> {};
template <>
struct ElementOf<DataType::uint64> : std::type_identity<uint64_t> {};
template <>
struct ElementOf<DataType::float16> : std::type_identity<Float16> {};
template <>
struct ElementOf<DataType::float32> : std::type_identity<float> {};
template <>
struct ElementOf<DataType::float64> : std::type_identity<double> {};
template <>
struct ElementOf<DataType::bfloat16> : std::type_identity<BFloat16> {};
template <>
struct ElementOf<DataType::float8e4m3> : std::type_identity<Float8E4M3> {};
template <>
struct ElementOf<DataType::float8e5m2> : std::type_identity<Float8E5M2> {};

}  // namespace unisono::device::UNISONO_TARGET
