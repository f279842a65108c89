// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "reference.h"
#include "support/seed.h"

namespace unisono::bench {
namespace {

constexpr size_t kCount = 3000;  // more than one block, no multiple of 4

using Inputs = std::vector<std::vector<std::byte>>;

uint64_t bitsAt(const std::vector<std::byte>& data, size_t index, size_t width) {
  uint64_t bits = 0;
  std::memcpy(&bits, data.data() + index * width, width);
  return bits;
}

void setBits(std::vector<std::byte>& data, size_t index, size_t width, uint64_t bits) {
  std::memcpy(data.data() + index * width, &bits, width);
}

Inputs makeInputs(const Reference& reference, int ranks, size_t count) {
  Inputs inputs;
  size_t width = elementInfo(reference.type()).bytes;
  for (int rank = 0; rank < ranks; rank++) {
    inputs.emplace_back(count * width);
    reference.input(rank, 0, count * width, inputs.back().data());
  }
  return inputs;
}

// Brute force, independent of Reference: integers as __int128 modulo the width, floats one rank
// after the other with a rounding to the type after each step, as a plain library would.
uint64_t reduceElement(const Reference& reference, BenchReduction reduction, const Inputs& inputs,
                       size_t index) {
  const ElementInfo& info = elementInfo(reference.type());
  const size_t width = info.bytes;
  const auto ranks = static_cast<int>(inputs.size());
  if (info.kind != NumberKind::floating) {
    const uint64_t mask = width == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * width)) - 1;
    auto number = [&](uint64_t bits) {
      __int128 value = bits;
      if (info.kind == NumberKind::signedInteger && (bits >> (8 * width - 1)) != 0) {
        value -= static_cast<__int128>(1) << (8 * width);
      }
      return value;
    };
    __int128 result = 0;
    for (int rank = 0; rank < ranks; rank++) {
      __int128 value = number(bitsAt(inputs[static_cast<size_t>(rank)], index, width));
      if (reduction == BenchReduction::preMulSum) {
        value = number(static_cast<uint64_t>(value * number(reference.scalarBits(rank))) & mask);
      }
      if (rank == 0) {
        result = value;
      } else if (reduction == BenchReduction::prod) {
        result = number(static_cast<uint64_t>(result * value) & mask);
      } else if (reduction == BenchReduction::min) {
        result = std::min(result, value);
      } else if (reduction == BenchReduction::max) {
        result = std::max(result, value);
      } else {
        result = number(static_cast<uint64_t>(result + value) & mask);
      }
    }
    if (reduction == BenchReduction::avg && ranks > 1) result /= ranks;
    return static_cast<uint64_t>(result) & mask;
  }
  auto rounded = [&](double value) {
    return decodeElement(info.type, encodeElement(info.type, value));
  };
  double result = 0;
  for (int rank = 0; rank < ranks; rank++) {
    double value =
        decodeElement(info.type, bitsAt(inputs[static_cast<size_t>(rank)], index, width));
    if (reduction == BenchReduction::preMulSum) {
      value = rounded(value * decodeElement(info.type, reference.scalarBits(rank)));
    }
    if (reduction == BenchReduction::avg) value = rounded(value * rounded(1.0 / ranks));
    if (rank == 0) {
      result = value;
    } else if (reduction == BenchReduction::prod) {
      result = rounded(result * value);
    } else if (reduction == BenchReduction::min) {
      result = std::min(result, value);
    } else if (reduction == BenchReduction::max) {
      result = std::max(result, value);
    } else {
      result = rounded(result + value);
    }
  }
  return encodeElement(info.type, result);
}

struct Case {
  ElementType type;
  BenchReduction reduction;
  int ranks;
};

std::vector<Case> allCases() {
  std::vector<Case> cases;
  for (const ElementInfo& info : elementTypes()) {
    for (int reduction = 0; reduction < kReductions; reduction++) {
      for (int ranks : {1, 2, 3, 8, 17, 200}) {
        cases.push_back({info.type, BenchReduction{reduction}, ranks});
      }
    }
  }
  return cases;
}

class ReferenceTest : public testing::TestWithParam<Case> {
 protected:
  const uint64_t seed_ = test::seed();
  const ElementInfo& info_ = elementInfo(GetParam().type);
  const Reference reference_{seed_, GetParam().type, GetParam().reduction, GetParam().ranks};
  // Fewer elements with many ranks keep the test short.
  const size_t count_ = GetParam().ranks > 20 ? 300 : kCount;

  std::vector<std::byte> result() const {
    Inputs inputs = makeInputs(reference_, GetParam().ranks, count_);
    std::vector<std::byte> data(count_ * info_.bytes);
    for (size_t i = 0; i < count_; i++) {
      setBits(data, i, info_.bytes, reduceElement(reference_, GetParam().reduction, inputs, i));
    }
    return data;
  }
};

TEST_P(ReferenceTest, AcceptsWhatBruteForceGives) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  std::vector<std::byte> data = result();
  size_t first = 0;
  size_t wrong = reference_.countWrong(0, count_, data.data(), &first);
  Reference::Expectation expected = reference_.expectation(first);
  EXPECT_EQ(wrong, 0u) << "element " << first << ": "
                       << decodeElement(info_.type, bitsAt(data, first, info_.bytes))
                       << ", expected " << expected.value << " within " << expected.tolerance;
}

TEST_P(ReferenceTest, CatchesOneWrongBitAndAnErrorAboveTheTolerance) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  std::vector<std::byte> data = result();
  std::mt19937_64 random(seed_);
  for (int trial = 0; trial < 20; trial++) {
    size_t index = random() % count_;
    uint64_t right = bitsAt(data, index, info_.bytes);
    uint64_t bad = right ^ (uint64_t{1} << random() % (8 * info_.bytes));
    if (info_.kind == NumberKind::floating) {
      Reference::Expectation expected = reference_.expectation(index);
      // The first number above that is more than the tolerance away.
      bad = encodeElement(info_.type, expected.value + expected.tolerance);
      while (!(std::fabs(decodeElement(info_.type, bad) - expected.value) > expected.tolerance)) {
        double value = decodeElement(info_.type, bad);
        if (!std::isfinite(value)) break;
        uint64_t sign = uint64_t{1} << (8 * info_.bytes - 1);
        bad = value == 0 ? 1 : ((bad & sign) != 0 ? bad - 1 : bad + 1);
      }
    }
    setBits(data, index, info_.bytes, bad);
    size_t first = 0;
    ASSERT_EQ(reference_.countWrong(0, count_, data.data(), &first), 1u);
    EXPECT_EQ(first, index);
    setBits(data, index, info_.bytes, right);
  }
}

// The half of the elements that must be exact is what makes the check of small floats strong.
TEST_P(ReferenceTest, ToleratesNothingInHalfOfTheElements) {
  size_t exact = 0;
  for (size_t i = 0; i < count_; i++) exact += reference_.expectation(i).tolerance == 0;
  const int ranks = GetParam().ranks;
  const bool rounds = info_.kind == NumberKind::floating &&
                      GetParam().reduction == BenchReduction::avg &&
                      ((ranks & (ranks - 1)) != 0 || ranks > 64);
  if (rounds) {
    EXPECT_EQ(exact, 0u);
  } else {
    EXPECT_GE(exact, count_ * 2 / 5);
  }
}

TEST_P(ReferenceTest, DoesNotHideARankThatIsMissing) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  // With very many ranks an element has few that take part, and the average of one rank's change
  // can round away.
  if (GetParam().ranks < 2 || GetParam().ranks > 20) return;
  Inputs inputs = makeInputs(reference_, GetParam().ranks, count_);
  // Rank 1 contributes what rank 0 does.
  inputs[1] = inputs[0];
  std::vector<std::byte> data(count_ * info_.bytes);
  for (size_t i = 0; i < count_; i++) {
    setBits(data, i, info_.bytes, reduceElement(reference_, GetParam().reduction, inputs, i));
  }
  size_t first = 0;
  EXPECT_GT(reference_.countWrong(0, count_, data.data(), &first), count_ / 100);
}

TEST_P(ReferenceTest, GivesTheSameInputInPieces) {
  const size_t width = info_.bytes;
  std::vector<std::byte> whole(64 * width), pieces(64 * width);
  reference_.input(0, 5 * width, 64 * width, whole.data());
  for (size_t i = 0; i < 64; i++) reference_.input(0, (5 + i) * width, width, &pieces[i * width]);
  EXPECT_EQ(whole, pieces);
}

std::string caseName(const testing::TestParamInfo<Case>& info) {
  return std::string(elementInfo(info.param.type).name) + "_" +
         reductionName(info.param.reduction) + "_" + std::to_string(info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(All, ReferenceTest, testing::ValuesIn(allCases()), caseName);

TEST(RawReference, DependsOnRankPositionAndSeedOnly) {
  Reference reference(7, ElementType::int8, 4);
  std::vector<std::byte> whole(1000), part(100), other(1000);
  reference.input(2, 0, whole.size(), whole.data());
  reference.input(2, 333, part.size(), part.data());
  EXPECT_EQ(0, std::memcmp(whole.data() + 333, part.data(), part.size()));
  reference.input(3, 0, other.size(), other.data());
  EXPECT_NE(whole, other);
  Reference(8, ElementType::int8, 4).input(2, 0, other.size(), other.data());
  EXPECT_NE(whole, other);
}

}  // namespace
}  // namespace unisono::bench
