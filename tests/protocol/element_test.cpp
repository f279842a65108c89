// SPDX-License-Identifier: Apache-2.0
#include "device/reduce/element.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "numbers.h"
#include "support/seed.h"

// The conversions of narrow floating-point types, all codes, against the definition of each format.
namespace unisono::protocol {
namespace {

using device::DataType;
using namespace device::host_target;

template <typename Element>
constexpr DataType kTypeOf = DataType::float16;
template <>
constexpr DataType kTypeOf<BFloat16> = DataType::bfloat16;
template <>
constexpr DataType kTypeOf<Float8E4M3> = DataType::float8e4m3;
template <>
constexpr DataType kTypeOf<Float8E5M2> = DataType::float8e5m2;

template <typename Element>
class Elements : public testing::Test {
 protected:
  using Bits = decltype(Element::bits);
  static constexpr uint32_t kCodes = 1u << (8 * sizeof(Element));

  const Format format_ = formatOf(kTypeOf<Element>);

  static float widen(uint32_t code) { return Element{static_cast<Bits>(code)}.toFloat(); }

  // One conversion from float, against the reference.
  void expectConversion(float value) {
    const uint32_t actual = Element::from(value).bits;
    const uint32_t expected = encode(format_, value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(decode(format_, actual))) << std::bit_cast<uint32_t>(value);
      EXPECT_EQ(actual >> (8 * sizeof(Element) - 1), std::signbit(value) ? 1u : 0u);
      return;
    }
    ASSERT_EQ(actual, expected) << "converting " << value << " (bits " << std::hex
                                << std::bit_cast<uint32_t>(value) << ")";
  }

  // `value`, its neighbours in float, and all three negated.
  void expectAround(float value) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (float near : {value, std::nextafter(value, infinity), std::nextafter(value, -infinity)}) {
      expectConversion(near);
      expectConversion(-near);
    }
  }
};

using Types = testing::Types<Float16, BFloat16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(Elements, Types);

TYPED_TEST(Elements, EveryCodeHasTheValueOfItsFormat) {
  for (uint32_t code = 0; code < this->kCodes; code++) {
    const double expected = decode(this->format_, code);
    const float actual = this->widen(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << code;
    } else {
      ASSERT_EQ(static_cast<double>(actual), expected) << code;
      ASSERT_EQ(std::signbit(actual), std::signbit(expected)) << code;
    }
  }
}

TYPED_TEST(Elements, EveryNumberComesBackAsItself) {
  for (uint32_t code = 0; code < this->kCodes; code++) {
    const float value = this->widen(code);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(TypeParam::from(value).toFloat())) << code;
    } else if (std::isinf(value) && this->format_.saturates) {
      EXPECT_EQ(TypeParam::from(value).toFloat(),
                std::copysign(static_cast<float>(largestOf(this->format_)), value));
    } else {
      ASSERT_EQ(TypeParam::from(value).bits, code);
    }
  }
}

// Ties go to the even neighbour and everything else to the nearer one: right at, below and above
// every number and every point halfway between two.
TYPED_TEST(Elements, RoundsToTheNearest) {
  for (uint32_t code = 0; code + 1 < this->kCodes / 2; code++) {
    const double low = decode(this->format_, code), high = decode(this->format_, code + 1);
    if (!std::isfinite(low)) continue;
    this->expectAround(static_cast<float>(low));
    if (std::isfinite(high)) this->expectAround(static_cast<float>((low + high) / 2));
    if (this->HasFatalFailure()) return;
  }
}

TYPED_TEST(Elements, LeavesTheRangeAsItsFormatSays) {
  const double largest = largestOf(this->format_);
  const double step = largest - decode(this->format_, encode(this->format_, largest) - 1);
  for (double part : {0.25, 0.5, 0.75, 1.0, 1.5, 2.0}) {
    const double value = largest + part * step;
    if (value <= std::numeric_limits<float>::max()) this->expectAround(static_cast<float>(value));
  }
  const float float32Largest = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  this->expectAround(float32Largest);
  this->expectConversion(infinity);
  this->expectConversion(-infinity);
  const float beyond = TypeParam::from(infinity).toFloat();
  EXPECT_EQ(static_cast<double>(beyond),
            this->format_.saturates ? largest : static_cast<double>(infinity));
}

TYPED_TEST(Elements, KeepsNan) {
  // Quiet and signalling, with payloads that narrowing cuts off.
  for (uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffc00000u, 0xff800001u}) {
    this->expectConversion(std::bit_cast<float>(bits));
  }
}

TYPED_TEST(Elements, RoundsTheSmallestNumbers) {
  for (float value :
       {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min()}) {
    this->expectAround(value);
  }
  const double smallest = decode(this->format_, 1);
  for (double part : {0.25, 0.5, 0.50001, 0.75, 1.0, 1.25, 1.5, 1.75, 2.5}) {
    this->expectAround(static_cast<float>(part * smallest));
  }
}

TYPED_TEST(Elements, ConvertsAnyFloat) {
  std::mt19937 random(test::seed());
  for (int i = 0; i < 300000 && !this->HasFatalFailure(); i++) {
    uint32_t bits = random();
    // Half of them in the exponents that the format has.
    if (i % 2 == 0) bits = (bits & 0x87ffffffu) + 0x3c000000u - (random() % 16 << 23);
    this->expectConversion(std::bit_cast<float>(bits));
  }
}

}  // namespace
}  // namespace unisono::protocol
