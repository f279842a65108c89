// SPDX-License-Identifier: Apache-2.0
#include "element_types.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace unisono::bench {
namespace {

// A binary floating point format of at most 16 bits. `finiteOnly`: no infinities, and only the
// all-ones pattern is NaN (the e4m3 of the OCP 8-bit floating point specification 1.0; e5m2 there,
// half and bfloat16 follow IEEE 754).
struct SmallFloat {
  int exponentBits;
  int mantissaBits;
  bool finiteOnly;

  int bias() const { return (1 << (exponentBits - 1)) - 1; }
  uint32_t exponentMask() const { return (1u << exponentBits) - 1; }
  uint32_t mantissaMask() const { return (1u << mantissaBits) - 1; }
  uint32_t signBit() const { return 1u << (exponentBits + mantissaBits); }

  double decode(uint32_t bits) const {
    double sign = (bits & signBit()) != 0 ? -1.0 : 1.0;
    uint32_t mantissa = bits & mantissaMask();
    uint32_t exponent = (bits >> mantissaBits) & exponentMask();
    if (exponent == exponentMask()) {
      bool nan = finiteOnly ? mantissa == mantissaMask() : mantissa != 0;
      if (nan) return std::numeric_limits<double>::quiet_NaN();
      if (!finiteOnly) return sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissaBits);
    return sign * std::ldexp(mantissa + (1u << mantissaBits),
                             static_cast<int>(exponent) - bias() - mantissaBits);
  }

  uint32_t encode(double value) const {
    uint32_t sign = std::signbit(value) ? signBit() : 0;
    uint32_t topExponent = exponentMask() << mantissaBits;
    uint32_t nan = topExponent | (finiteOnly ? mantissaMask() : 1u << (mantissaBits - 1));
    if (std::isnan(value)) return nan;
    uint32_t tooLarge = finiteOnly ? nan : (sign | topExponent);
    if (std::isinf(value)) return tooLarge;
    double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    int exponent = std::max(std::ilogb(magnitude), 1 - bias());
    auto steps =
        static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissaBits - exponent)));
    // A carry out of the mantissa moves into the exponent by itself when both are added up.
    uint32_t field = static_cast<uint32_t>(exponent + bias() - 1) << mantissaBits;
    int64_t bits = static_cast<int64_t>(field) + steps;
    int64_t largest = finiteOnly ? nan - 1 : topExponent - 1;
    return bits > largest ? tooLarge : (sign | static_cast<uint32_t>(bits));
  }
};

constexpr SmallFloat kHalf{5, 10, false};
constexpr SmallFloat kBfloat16{8, 7, false};
constexpr SmallFloat kFloat8e4m3{4, 3, true};
constexpr SmallFloat kFloat8e5m2{5, 2, false};

const SmallFloat* smallFloat(ElementType type) {
  switch (type) {
    case ElementType::float16:
      return &kHalf;
    case ElementType::bfloat16:
      return &kBfloat16;
    case ElementType::float8e4m3:
      return &kFloat8e4m3;
    case ElementType::float8e5m2:
      return &kFloat8e5m2;
    default:
      return nullptr;
  }
}

// All values of a format: decoding a buffer is a look-up.
std::vector<double> decodeTable(const SmallFloat& format) {
  std::vector<double> table(size_t{2} * format.signBit());
  for (size_t bits = 0; bits < table.size(); bits++) {
    table[bits] = format.decode(static_cast<uint32_t>(bits));
  }
  return table;
}

const std::vector<double>& decodeTable(ElementType type) {
  static const std::vector<double> half = decodeTable(kHalf);
  static const std::vector<double> bfloat16 = decodeTable(kBfloat16);
  static const std::vector<double> e4m3 = decodeTable(kFloat8e4m3);
  static const std::vector<double> e5m2 = decodeTable(kFloat8e5m2);
  switch (type) {
    case ElementType::float16:
      return half;
    case ElementType::bfloat16:
      return bfloat16;
    case ElementType::float8e4m3:
      return e4m3;
    default:
      return e5m2;
  }
}

// Intermediates: fp8 may be added up in half (2^-11), 16-bit floats in float (2^-24).
constexpr std::array<ElementInfo, kElementTypes> kTable = {{
    {ElementType::int8, "int8", "char", 1, NumberKind::signedInteger, 7, 0, 0},
    {ElementType::uint8, "uint8", "byte", 1, NumberKind::unsignedInteger, 8, 0, 0},
    {ElementType::int32, "int32", "int", 4, NumberKind::signedInteger, 31, 0, 0},
    {ElementType::uint32, "uint32", "uint", 4, NumberKind::unsignedInteger, 32, 0, 0},
    {ElementType::int64, "int64", "long", 8, NumberKind::signedInteger, 63, 0, 0},
    {ElementType::uint64, "uint64", "ulong", 8, NumberKind::unsignedInteger, 64, 0, 0},
    {ElementType::float16, "half", "float16", 2, NumberKind::floating, 11, 0x1p-24, 0x1p-24},
    {ElementType::float32, "float", "float32", 4, NumberKind::floating, 24, 0x1p-149, 0},
    {ElementType::float64, "double", "float64", 8, NumberKind::floating, 53, 0x1p-1074, 0},
    {ElementType::bfloat16, "bfloat16", "bf16", 2, NumberKind::floating, 8, 0x1p-133, 0x1p-24},
    {ElementType::float8e4m3, "f8e4m3", "fp8_e4m3", 1, NumberKind::floating, 4, 0x1p-9, 0x1p-11},
    {ElementType::float8e5m2, "f8e5m2", "fp8_e5m2", 1, NumberKind::floating, 3, 0x1p-16, 0x1p-11},
}};

template <typename T>
void decodeAs(const std::byte* source, size_t count, double* out) {
  for (size_t i = 0; i < count; i++) {
    T value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    out[i] = static_cast<double>(value);
  }
}

}  // namespace

double ElementInfo::unitRoundoff() const {
  return std::ldexp(1.0, -valueBits);
}

std::span<const ElementInfo> elementTypes() {
  return kTable;
}

const ElementInfo& elementInfo(ElementType type) {
  return kTable[static_cast<size_t>(type)];
}

const ElementInfo* findElementType(std::string_view name) {
  for (const ElementInfo& info : kTable) {
    if (name == info.name || name == info.otherName) return &info;
  }
  return nullptr;
}

double decodeElement(ElementType type, uint64_t bits) {
  double value = 0;
  std::array<std::byte, 8> bytes = std::bit_cast<std::array<std::byte, 8>>(bits);
  decodeElements(type, bytes.data(), 1, &value);
  return value;
}

uint64_t encodeElement(ElementType type, double value) {
  if (const SmallFloat* format = smallFloat(type)) return format->encode(value);
  switch (type) {
    case ElementType::float32:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
    case ElementType::float64:
      return std::bit_cast<uint64_t>(value);
    case ElementType::uint64:
      return static_cast<uint64_t>(value);
    default:
      break;
  }
  auto bits = static_cast<uint64_t>(static_cast<int64_t>(value));
  size_t width = elementInfo(type).bytes * 8;
  return width == 64 ? bits : bits & ((uint64_t{1} << width) - 1);
}

void decodeElements(ElementType type, const std::byte* source, size_t count, double* out) {
  switch (type) {
    case ElementType::int8:
      return decodeAs<int8_t>(source, count, out);
    case ElementType::uint8:
      return decodeAs<uint8_t>(source, count, out);
    case ElementType::int32:
      return decodeAs<int32_t>(source, count, out);
    case ElementType::uint32:
      return decodeAs<uint32_t>(source, count, out);
    case ElementType::int64:
      return decodeAs<int64_t>(source, count, out);
    case ElementType::uint64:
      return decodeAs<uint64_t>(source, count, out);
    case ElementType::float32:
      return decodeAs<float>(source, count, out);
    case ElementType::float64:
      return decodeAs<double>(source, count, out);
    case ElementType::float16:
    case ElementType::bfloat16: {
      const std::vector<double>& table = decodeTable(type);
      for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        std::memcpy(&bits, source + 2 * i, 2);
        out[i] = table[bits];
      }
      return;
    }
    case ElementType::float8e4m3:
    case ElementType::float8e5m2: {
      const std::vector<double>& table = decodeTable(type);
      for (size_t i = 0; i < count; i++) out[i] = table[static_cast<uint8_t>(source[i])];
      return;
    }
  }
}

}  // namespace unisono::bench
