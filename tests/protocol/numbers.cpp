// SPDX-License-Identifier: Apache-2.0
#include "numbers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace unisono::protocol {
namespace {

using device::DataType;
using device::Reduction;

int biasOf(const Format& format) {
  return (1 << (format.exponentBits - 1)) - 1;
}

uint32_t signBitOf(const Format& format) {
  return 1u << (format.exponentBits + format.mantissaBits);
}

bool isSigned(DataType type) {
  return type == DataType::int8 || type == DataType::int32 || type == DataType::int64;
}

uint64_t cut(DataType type, uint64_t value) {
  const int bits = 8 * device::elementBytes(type);
  return bits == 64 ? value : value & ((uint64_t{1} << bits) - 1);
}

int64_t signedValue(DataType type, uint64_t bits) {
  const int unused = 64 - 8 * device::elementBytes(type);
  return static_cast<int64_t>(bits << unused) >> unused;
}

uint64_t reduceIntegers(const Operator& op, std::span<const uint64_t> elements) {
  uint64_t result = 0;
  for (size_t i = 0; i < elements.size(); i++) {
    uint64_t operand = elements[i];
    if (op.reduction == Reduction::preMulSum) operand *= op.factors[i].integer;
    operand = cut(op.type, operand);
    if (i == 0) {
      result = operand;
      continue;
    }
    const bool less = isSigned(op.type)
                          ? signedValue(op.type, operand) < signedValue(op.type, result)
                          : operand < result;
    switch (op.reduction) {
      case Reduction::prod:
        result *= operand;
        break;
      case Reduction::max:
        if (!less) result = operand;
        break;
      case Reduction::min:
        if (less) result = operand;
        break;
      default:
        result += operand;
        break;
    }
    result = cut(op.type, result);
  }
  if (op.reduction == Reduction::sumPostDivide) {
    result =
        isSigned(op.type)
            ? static_cast<uint64_t>(signedValue(op.type, result) / static_cast<int64_t>(op.divisor))
            : result / op.divisor;
  }
  return cut(op.type, result);
}

// `Real` is what the type accumulates in. Volatile: no contraction of a product with a sum.
template <typename Real>
Real reduceReals(const Operator& op, std::span<const uint64_t> elements) {
  volatile Real result = 0;
  for (size_t i = 0; i < elements.size(); i++) {
    volatile Real operand = static_cast<Real>(toDouble(op.type, elements[i]));
    if (op.reduction == Reduction::preMulSum) {
      operand = operand * static_cast<Real>(op.factors[i].real);
    }
    if (i == 0) {
      result = operand;
    } else if (op.reduction == Reduction::prod) {
      result = result * operand;
    } else if (op.reduction == Reduction::max || op.reduction == Reduction::min) {
      const bool takes = op.reduction == Reduction::max ? operand > result : operand < result;
      if (!std::isnan(result) && (std::isnan(operand) || takes)) result = operand;
    } else {
      result = result + operand;
    }
  }
  return result;
}

}  // namespace

bool isNarrow(DataType type) {
  return device::isFloatingPoint(type) && type != DataType::float32 && type != DataType::float64;
}

Format formatOf(DataType type) {
  switch (type) {
    case DataType::float16:
      return {5, 10, true, false};
    case DataType::bfloat16:
      return {8, 7, true, false};
    case DataType::float8e4m3:
      return {4, 3, false, true};
    default:
      return {5, 2, true, true};
  }
}

double decode(const Format& format, uint32_t code) {
  const uint32_t exponentOnes = (1u << format.exponentBits) - 1;
  const uint32_t mantissaOnes = (1u << format.mantissaBits) - 1;
  const uint32_t exponent = code >> format.mantissaBits & exponentOnes;
  const uint32_t mantissa = code & mantissaOnes;
  const double sign = (code & signBitOf(format)) != 0 ? -1.0 : 1.0;
  if (exponent == exponentOnes) {
    if (format.hasInfinity) {
      return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
    }
    if (mantissa == mantissaOnes) return std::numeric_limits<double>::quiet_NaN();
  }
  const uint32_t hidden = exponent != 0 ? mantissaOnes + 1 : 0;
  const int power = static_cast<int>(exponent != 0 ? exponent : 1) - biasOf(format);
  return sign * std::ldexp(static_cast<double>(hidden + mantissa), power - format.mantissaBits);
}

double largestOf(const Format& format) {
  const uint32_t ones = signBitOf(format) - 1;
  return decode(format, format.hasInfinity
                            ? (ones >> format.mantissaBits << format.mantissaBits) - 1
                            : ones - 1);
}

uint32_t encode(const Format& format, double value) {
  const uint32_t sign = std::signbit(value) ? signBitOf(format) : 0;
  if (std::isnan(value)) return sign | (signBitOf(format) - 1);
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  const int smallestPower = 1 - biasOf(format);
  const double largest = largestOf(format);
  double rounded = magnitude;
  if (!std::isinf(magnitude)) {
    // Steps between neighbours at this magnitude; scaling by a power of two is exact.
    const int power = std::max(std::ilogb(magnitude), smallestPower);
    const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissaBits - power));
    rounded = std::ldexp(steps, power - format.mantissaBits);
  }
  if (rounded > largest) {
    if (format.saturates) {
      rounded = largest;
    } else {
      return sign | ((1u << format.exponentBits) - 1) << format.mantissaBits;
    }
  }
  if (rounded < std::ldexp(1.0, smallestPower)) {
    return sign | static_cast<uint32_t>(std::ldexp(rounded, format.mantissaBits - smallestPower));
  }
  const int power = std::ilogb(rounded);
  const auto significand = static_cast<uint32_t>(std::ldexp(rounded, format.mantissaBits - power));
  const auto exponent = static_cast<uint32_t>(power + biasOf(format));
  return sign | exponent << format.mantissaBits | (significand - (1u << format.mantissaBits));
}

double toDouble(DataType type, uint64_t bits) {
  if (type == DataType::float32) return std::bit_cast<float>(static_cast<uint32_t>(bits));
  if (type == DataType::float64) return std::bit_cast<double>(bits);
  // Decoding is what most of a test's time would go into.
  static const auto kTables = [] {
    std::array<std::vector<double>, device::kDataTypes> tables;
    for (int t = 0; t < device::kDataTypes; t++) {
      if (!isNarrow(static_cast<DataType>(t))) continue;
      const Format format = formatOf(static_cast<DataType>(t));
      for (uint32_t code = 0; code < 2 * signBitOf(format); code++) {
        tables[static_cast<size_t>(t)].push_back(decode(format, code));
      }
    }
    return tables;
  }();
  return kTables[static_cast<size_t>(type)][static_cast<size_t>(bits)];
}

uint64_t fromDouble(DataType type, double value) {
  if (type == DataType::float32) return std::bit_cast<uint32_t>(static_cast<float>(value));
  if (type == DataType::float64) return std::bit_cast<uint64_t>(value);
  return encode(formatOf(type), value);
}

bool isNan(DataType type, uint64_t bits) {
  return device::isFloatingPoint(type) && std::isnan(toDouble(type, bits));
}

uint64_t reduceInOrder(const Operator& op, std::span<const uint64_t> elements) {
  if (!device::isFloatingPoint(op.type)) return reduceIntegers(op, elements);
  return op.type == DataType::float64 ? fromDouble(op.type, reduceReals<double>(op, elements))
                                      : fromDouble(op.type, reduceReals<float>(op, elements));
}

uint64_t scalarOf(DataType type, const Operator::Factor& factor) {
  if (!device::isFloatingPoint(type)) return cut(type, factor.integer);
  if (type == DataType::float64) return std::bit_cast<uint64_t>(factor.real);
  return std::bit_cast<uint32_t>(static_cast<float>(factor.real));
}

}  // namespace unisono::protocol
