// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "element_types.h"
#include "support/seed.h"

namespace unisono::bench {
namespace {

uint64_t bitCount(const ElementInfo& info) {
  return uint64_t{1} << (8 * info.bytes);
}

TEST(ElementTypes, KnowTheirNames) {
  for (const ElementInfo& info : elementTypes()) {
    EXPECT_EQ(findElementType(info.name), &info);
    EXPECT_EQ(findElementType(info.otherName), &info);
    EXPECT_EQ(&elementInfo(info.type), &info);
  }
  EXPECT_EQ(findElementType("float128"), nullptr);
  EXPECT_EQ(findElementType(""), nullptr);
}

TEST(ElementTypes, DecodeKnownNumbers) {
  EXPECT_EQ(decodeElement(ElementType::float16, 0x3c00), 1.0);
  EXPECT_EQ(decodeElement(ElementType::float16, 0xc000), -2.0);
  EXPECT_EQ(decodeElement(ElementType::float16, 0x7bff), 65504.0);
  EXPECT_EQ(decodeElement(ElementType::float16, 0x0001), 0x1p-24);
  EXPECT_TRUE(std::isinf(decodeElement(ElementType::float16, 0x7c00)));
  EXPECT_TRUE(std::isnan(decodeElement(ElementType::float16, 0x7e00)));
  EXPECT_EQ(decodeElement(ElementType::bfloat16, 0x3f80), 1.0);
  EXPECT_EQ(decodeElement(ElementType::bfloat16, 0x4049), 3.140625);
  EXPECT_EQ(decodeElement(ElementType::float8e4m3, 0x38), 1.0);
  EXPECT_EQ(decodeElement(ElementType::float8e4m3, 0x7e), 448.0);
  EXPECT_EQ(decodeElement(ElementType::float8e4m3, 0x01), 0x1p-9);
  EXPECT_TRUE(std::isnan(decodeElement(ElementType::float8e4m3, 0x7f)));
  EXPECT_EQ(decodeElement(ElementType::float8e5m2, 0x3c), 1.0);
  EXPECT_EQ(decodeElement(ElementType::float8e5m2, 0x7b), 57344.0);
  EXPECT_TRUE(std::isinf(decodeElement(ElementType::float8e5m2, 0xfc)));
  EXPECT_EQ(decodeElement(ElementType::int8, 0xff), -1.0);
  EXPECT_EQ(decodeElement(ElementType::uint8, 0xff), 255.0);
  EXPECT_EQ(decodeElement(ElementType::int64, ~uint64_t{0}), -1.0);
}

TEST(ElementTypes, EncodeIsTheInverseOfDecodeForEveryPattern) {
  for (const ElementInfo& info : elementTypes()) {
    if (info.bytes > 2) continue;
    for (uint64_t bits = 0; bits < bitCount(info); bits++) {
      double value = decodeElement(info.type, bits);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(decodeElement(info.type, encodeElement(info.type, value))));
      } else {
        ASSERT_EQ(encodeElement(info.type, value), bits) << info.name;
      }
    }
  }
}

// Against all values of the type: none is nearer, and a tie goes to the even one.
TEST(ElementTypes, EncodeRoundsToTheNearest) {
  std::mt19937_64 random(test::seed());
  for (ElementType type : {ElementType::float8e4m3, ElementType::float8e5m2, ElementType::float16,
                           ElementType::bfloat16}) {
    const ElementInfo& info = elementInfo(type);
    const uint64_t positive = bitCount(info) / 2;
    uint64_t finite = positive;
    while (!std::isfinite(decodeElement(type, finite - 1))) finite--;
    for (int trial = 0; trial < 2000; trial++) {
      uint64_t low = random() % (finite - 1);
      double below = decodeElement(type, low);
      double above = decodeElement(type, low + 1);
      double part = static_cast<double>(random() >> 11) * 0x1p-53;
      double value = below + (above - below) * part;
      uint64_t nearest = part < 0.5 ? low : low + 1;
      if (part != 0.5) {
        EXPECT_EQ(encodeElement(type, value), nearest) << info.name;
        EXPECT_EQ(encodeElement(type, -value), nearest | positive) << info.name;
      }
      EXPECT_EQ(encodeElement(type, (below + above) / 2), low + low % 2) << info.name;
    }
  }
}

TEST(ElementTypes, EncodeOverflows) {
  EXPECT_EQ(encodeElement(ElementType::float16, 1e6), 0x7c00u);
  EXPECT_EQ(encodeElement(ElementType::bfloat16, -1e60), 0xff80u);
  EXPECT_EQ(encodeElement(ElementType::float8e5m2, 61440.0), 0x7cu);
  EXPECT_EQ(encodeElement(ElementType::float8e4m3, 464.1), 0x7fu);
  EXPECT_EQ(encodeElement(ElementType::float8e4m3, 463.9), 0x7eu);
}

TEST(ElementTypes, LimitsFitTheFormats) {
  for (const ElementInfo& info : elementTypes()) {
    if (info.kind != NumberKind::floating) continue;
    uint64_t one = encodeElement(info.type, 1.0);
    EXPECT_EQ(decodeElement(info.type, one + 1) - 1.0, 2 * info.unitRoundoff()) << info.name;
    EXPECT_EQ(decodeElement(info.type, 1), info.smallest) << info.name;
  }
}

TEST(ElementTypes, DecodeBuffersAtAnyAlignment) {
  for (const ElementInfo& info : elementTypes()) {
    std::vector<std::byte> storage(1 + 5 * info.bytes);
    for (int i = 0; i < 5; i++) {
      uint64_t bits = encodeElement(info.type, i);
      std::memcpy(storage.data() + 1 + static_cast<size_t>(i) * info.bytes, &bits, info.bytes);
    }
    double values[5];
    decodeElements(info.type, storage.data() + 1, 5, values);
    for (int i = 0; i < 5; i++) EXPECT_EQ(values[i], i) << info.name;
  }
}

}  // namespace
}  // namespace unisono::bench
