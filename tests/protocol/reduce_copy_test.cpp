// SPDX-License-Identifier: Apache-2.0
#include "device/reduce/reduce_copy.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "numbers.h"
#include "support/seed.h"

// The innermost loop: every type and operator, from 1 to 4 sources to 1 to 4 destinations, at every
// alignment, at sizes around the vectors that it moves.
namespace unisono::protocol {
namespace {

using device::DataType;
using device::Reduction;
using device::ReductionSpec;
using device::host_target::ReduceCopy;
using device::host_target::ThreadGroup;
using Random = std::mt19937_64;

constexpr size_t kGuard = 32;
constexpr std::byte kPoison{0xa5};

// A buffer that begins `misalignment` bytes after a 16-byte boundary, between guard zones.
class Buffer {
 public:
  Buffer(size_t bytes, size_t misalignment)
      : storage_(bytes + 2 * kGuard + 32, kPoison), bytes_(bytes) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data()) + kGuard;
    begin_ = storage_.data() + kGuard + (16 - address % 16) % 16 + misalignment;
  }
  std::byte* data() { return begin_; }
  bool guardsHold() const {
    const auto whole = [](const std::byte* from, const std::byte* to) {
      return std::all_of(from, to, [](std::byte value) { return value == kPoison; });
    };
    return whole(storage_.data(), begin_) &&
           whole(begin_ + bytes_, storage_.data() + storage_.size());
  }

 private:
  std::vector<std::byte> storage_;
  size_t bytes_;
  std::byte* begin_;
};

struct Case {
  int sources = 1;
  int destinations = 1;
  size_t elements = 0;
  std::vector<size_t> misalignment;  // sources, then destinations; multiples of the element
  uint32_t prepare = 0;
  bool finish = false;
  bool inPlace = false;  // the first destination is the last source
};

uint64_t randomElement(DataType type, Reduction reduction, Random& random) {
  const int bits = 8 * device::elementBytes(type);
  const uint64_t code = random() >> (64 - bits);
  if (!device::isFloatingPoint(type)) return code;
  // Products with a factor must be exact, or contraction with the sum would change them.
  if (reduction == Reduction::preMulSum) {
    return fromDouble(type, static_cast<double>(random() % 17) - 8);
  }
  switch (random() % 16) {
    case 0:
      return fromDouble(type, 0.0);
    case 1:
      return fromDouble(type, std::numeric_limits<double>::infinity());
    case 2:
      return fromDouble(type, std::numeric_limits<double>::quiet_NaN());
    case 3:
      return fromDouble(type, -0.0);
    case 4:
    case 5:
      return code;
    default:
      return fromDouble(type, (static_cast<double>(random() % 20001) - 10000) / 256);
  }
}

// A copy leaves every bit as it is.
bool copies(const Operator& op, const Case& test) {
  return test.sources == 1 && !(op.reduction == Reduction::preMulSum && test.prepare != 0) &&
         !(op.reduction == Reduction::sumPostDivide && test.finish);
}

// Any NaN is a NaN, and which of two equal zeros is the maximum is open.
bool isSameNumber(DataType type, uint64_t a, uint64_t b) {
  return (isNan(type, a) && isNan(type, b)) ||
         (device::isFloatingPoint(type) && toDouble(type, a) == toDouble(type, b));
}

void check(const Case& test, DataType type, Reduction reduction, Random& random) {
  const auto size = device::elementBytes(type);
  const size_t bytes = test.elements * size;
  Operator op{type, reduction, {}, 1 + random() % 7};
  const Operator::Factor factor{random() % 2 == 0 ? 2.0 : -0.5, random()};
  for (int s = 0; s < test.sources; s++) {
    const bool prepared = (test.prepare >> s & 1) != 0;
    op.factors.push_back(prepared ? factor : Operator::Factor{1.0, 1});
  }

  ReductionSpec spec{type, reduction, false, 0};
  uint64_t onDevice =
      device::isFloatingPoint(type) ? fromDouble(type, factor.real) : factor.integer;
  if (reduction == Reduction::sumPostDivide) spec.scalar = op.divisor;
  if (reduction == Reduction::preMulSum) {
    spec.scalarIsPointer = random() % 2 == 0;
    spec.scalar =
        spec.scalarIsPointer ? reinterpret_cast<uint64_t>(&onDevice) : scalarOf(type, factor);
  }

  ReduceCopy work{};
  work.sources = test.sources;
  work.destinations = test.destinations;
  work.elements = test.elements;
  work.prepare = test.prepare;
  work.finish = test.finish;
  std::vector<Buffer> buffers;
  for (size_t misalignment : test.misalignment) buffers.emplace_back(bytes, misalignment);
  std::vector<std::vector<std::byte>> before;
  for (int s = 0; s < test.sources; s++) {
    std::byte* data = buffers[static_cast<size_t>(s)].data();
    for (size_t i = 0; i < test.elements; i++) {
      writeElement(data, i, size, randomElement(type, reduction, random));
    }
    work.source[s] = data;
    before.emplace_back(data, data + bytes);
  }
  for (int d = 0; d < test.destinations; d++) {
    const int buffer = test.inPlace && d == 0 ? test.sources - 1 : test.sources + d;
    work.destination[d] = buffers[static_cast<size_t>(buffer)].data();
  }

  ThreadGroup group;
  reduceCopy(group, spec, work);

  // finish belongs to the last step of a reduction only.
  if (!test.finish) op.divisor = 1;
  std::vector<uint64_t> operands(static_cast<size_t>(test.sources));
  for (size_t i = 0; i < test.elements; i++) {
    for (size_t s = 0; s < operands.size(); s++) {
      operands[s] = readElement(before[s].data(), i, size);
    }
    const uint64_t expected = copies(op, test) ? operands[0] : reduceInOrder(op, operands);
    for (int d = 0; d < test.destinations; d++) {
      const uint64_t actual = readElement(work.destination[d], i, size);
      ASSERT_TRUE(actual == expected || (!copies(op, test) && isSameNumber(type, actual, expected)))
          << "element " << i << " of destination " << d << " is " << std::hex << actual
          << " instead of " << expected;
    }
  }
  for (size_t b = 0; b < buffers.size(); b++) ASSERT_TRUE(buffers[b].guardsHold()) << b;
  for (size_t s = test.inPlace ? operands.size() - 1 : operands.size(); s-- > 0;) {
    ASSERT_TRUE(std::equal(before[s].begin(), before[s].end(), buffers[s].data())) << s;
  }
}

std::string describe(const Case& test) {
  return fmt::format("{} to {}, {} elements, prepare {:#x}{}{}, misaligned by {}", test.sources,
                     test.destinations, test.elements, test.prepare, test.finish ? " finish" : "",
                     test.inPlace ? " in place" : "", fmt::join(test.misalignment, " "));
}

class ReduceCopyTest : public testing::TestWithParam<std::tuple<DataType, Reduction>> {
 protected:
  DataType type() const { return std::get<0>(GetParam()); }
  Reduction reduction() const { return std::get<1>(GetParam()); }
  size_t elementSize() const { return device::elementBytes(type()); }

  void run(const Case& test) {
    SCOPED_TRACE(describe(test));
    check(test, type(), reduction(), random_);
  }

  Random random_{test::seed()};
};

TEST_P(ReduceCopyTest, EverySizeAndCommonAlignment) {
  // Beyond the vectors that a lane keeps in flight, and a rest.
  const size_t most = (device::host_target::kUnroll * 16 + 40) / elementSize();
  for (size_t misalignment = 0; misalignment < 16; misalignment += elementSize()) {
    for (size_t elements = 0; elements <= most; elements++) {
      for (int sources : {1, 2}) {
        Case test;
        test.sources = sources;
        test.elements = elements;
        test.misalignment.assign(static_cast<size_t>(sources) + 1, misalignment);
        test.prepare = 1u << (sources - 1);
        test.finish = true;
        run(test);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ReduceCopyTest, AnySourcesDestinationsAndAlignments) {
  for (int round = 0; round < 400; round++) {
    Case test;
    test.sources = 1 + static_cast<int>(random_() % device::host_target::kMaxSources);
    test.destinations = 1 + static_cast<int>(random_() % device::host_target::kMaxDestinations);
    test.elements = random_() % (random_() % 4 == 0 ? 2000 : 200);
    const size_t buffers =
        static_cast<size_t>(test.sources) + static_cast<size_t>(test.destinations);
    const size_t common = random_() % (16 / elementSize()) * elementSize();
    const bool differ = random_() % 2 == 0;
    for (size_t b = 0; b < buffers; b++) {
      test.misalignment.push_back(differ ? random_() % (16 / elementSize()) * elementSize()
                                         : common);
    }
    test.prepare = static_cast<uint32_t>(random_() % (1u << test.sources));
    test.finish = random_() % 2 == 0;
    test.inPlace = random_() % 4 == 0;
    run(test);
    if (HasFatalFailure()) return;
  }
}

// Every combination that exists.
std::vector<std::tuple<DataType, Reduction>> combinations() {
  std::vector<std::tuple<DataType, Reduction>> result;
  for (int t = 0; t < device::kDataTypes; t++) {
    for (int r = 0; r < device::kReductions; r++) {
      const auto type = static_cast<DataType>(t);
      const auto reduction = static_cast<Reduction>(r);
      if (device::isReduction(type, reduction)) result.emplace_back(type, reduction);
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, ReduceCopyTest, testing::ValuesIn(combinations()),
                         [](const auto& tested) {
                           return fmt::format("Type{}Operator{}",
                                              static_cast<int>(std::get<0>(tested.param)),
                                              static_cast<int>(std::get<1>(tested.param)));
                         });

}  // namespace
}  // namespace unisono::protocol
