// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/math.h"

namespace unisono::bench {
namespace {

// Elements are handled in blocks so that intermediate results stay in the cache. A multiple of 4:
// one hash gives the palette entries of 4 elements.
constexpr size_t kBlock = 1024;

// Whether a float element belongs to the half with exact results; the same on all ranks.
bool exactElement(size_t index) {
  return ((index * 0x9e3779b97f4a7c15u) >> 63) != 0;
}

uint64_t widthMask(size_t bytes) {
  return bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * bytes)) - 1;
}

// The element's bits as a 64-bit integer with its sign extended.
uint64_t extend(uint64_t bits, const ElementInfo& info) {
  if (info.kind != NumberKind::signedInteger || info.bytes == 8) return bits;
  int shift = static_cast<int>(64 - 8 * info.bytes);
  return static_cast<uint64_t>(static_cast<int64_t>(bits << shift) >> shift);
}

class PaletteRandom {
 public:
  explicit PaletteRandom(uint64_t seed) : seed_(seed) {}
  uint64_t bits() { return mixBits(seed_, 0x70616c65, position_++); }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  bool coin() { return (bits() >> 63) != 0; }
  // Uniform in [-limit, limit], or [0, limit] without a sign. `limit` < 2^62.
  int64_t whole(int64_t limit, bool withSign) {
    if (!withSign) return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit + 1));
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(2 * limit + 1)) - limit;
  }

 private:
  uint64_t seed_;
  uint64_t position_ = 0;
};

}  // namespace

uint64_t mixBits(uint64_t seed, uint64_t stream, uint64_t position) {
  return mix64(mix64(seed ^ (stream + 1) * 0x9e3779b97f4a7c15u) ^
               (position + 1) * 0xd1b54a32d192ed03u);
}

Reference::Reference(uint64_t seed, ElementType type, int ranks)
    : seed_(seed), info_(elementInfo(type)), ranks_(ranks) {}

Reference::Reference(uint64_t seed, ElementType type, BenchReduction reduction, int ranks)
    : seed_(seed), info_(elementInfo(type)), reduction_(reduction), ranks_(ranks), reduces_(true) {
  for (int rank = 0; rank < ranks; rank++) {
    // Small factors that the type represents exactly; for floats powers of two, so that exact
    // elements stay exact.
    constexpr std::array<int, 4> kFactors = {1, 2, -1, -2};
    constexpr std::array<int, 4> kUnsignedFactors = {1, 2, 3, 5};
    bool withSign = info_.kind != NumberKind::unsignedInteger;
    int factor = (withSign ? kFactors : kUnsignedFactors)[static_cast<size_t>(rank) % 4];
    scalarValues_.push_back(factor);
    scalars_.push_back(encodeElement(type, factor));
  }
  if (info_.kind == NumberKind::floating) {
    makeFloatPalette();
  } else {
    makeIntegerPalette();
  }
}

void Reference::makeIntegerPalette() {
  PaletteRandom random(seed_);
  const bool withSign = info_.kind == NumberKind::signedInteger;
  // 2^62 suffices for the 64-bit types and avoids overflow in the arithmetic here.
  const int64_t largest = (int64_t{1} << std::min(info_.valueBits, 62)) - 1;
  int64_t limit = 0;  // 0: any bits
  if (reduction_ == BenchReduction::avg) {
    limit = std::max<int64_t>(largest / ranks_, 1);
    stride_[0] = static_cast<int>(ceilDivide<int64_t>(ranks_, largest));
  } else if (reduction_ == BenchReduction::prod) {
    int terms = std::min(ranks_, kMaxProductTerms);
    stride_[0] = static_cast<int>(ceilDivide<int64_t>(ranks_, terms));
    limit = static_cast<int64_t>(std::pow(static_cast<double>(largest), 1.0 / terms));
    limit = std::clamp<int64_t>(limit, 1, int64_t{1} << 30);
    neutral_ = {1, 1};
  }
  for (size_t i = 0; i < kPaletteSize; i++) {
    uint64_t bits = random.bits();
    if (limit > 0) {
      int64_t value = random.whole(limit, withSign);
      // A zero factor would hide all the others.
      if (reduction_ == BenchReduction::prod && value == 0) value = 1;
      bits = static_cast<uint64_t>(value);
    }
    bits &= widthMask(info_.bytes);
    palette_.push_back({bits, decodeElement(info_.type, bits)});
  }
}

void Reference::makeFloatPalette() {
  PaletteRandom random(seed_);
  const bool exactAlways = reduction_ == BenchReduction::min || reduction_ == BenchReduction::max;
  const bool product = reduction_ == BenchReduction::prod;
  const bool average = reduction_ == BenchReduction::avg;
  // Dividing by n keeps whole numbers exact when n is a power of two, and, in the smallest of the
  // types, not too large a one: 1/64 is the smallest normal number of fp8 e4m3.
  const bool exactAverage = (ranks_ & (ranks_ - 1)) == 0 && ranks_ <= 64;
  hasExact_ = !exactAlways && (!average || exactAverage);

  const bool coarse = info_.valueBits <= kCoarseBits;
  const int terms =
      std::min(ranks_, product ? kMaxProductTerms : (coarse ? kMaxCoarseTerms : ranks_));
  if (!exactAlways) stride_[0] = static_cast<int>(ceilDivide<int64_t>(ranks_, terms));
  // Whole numbers up to 2^p are exact; factors of mulsum are at most 2.
  const int64_t wholeLimit =
      (int64_t{1} << info_.valueBits) / (reduction_ == BenchReduction::preMulSum ? 2 : 1);
  const int64_t wholeEach = std::max<int64_t>(wholeLimit / ranks_, 1);
  if (product) {
    neutral_ = {encodeElement(info_.type, 1), 1};
    stride_[1] = stride_[0];
  } else if (!exactAlways) {
    stride_[1] = static_cast<int>(ceilDivide<int64_t>(ranks_, wholeLimit));
  }
  // Keeps sums of fp8 e4m3 (largest number 448) finite.
  const double amplitude = exactAlways ? 100 : std::min(1.0, 200.0 / ranks_);

  auto add = [&](double wish) {
    uint64_t bits = encodeElement(info_.type, wish);
    palette_.push_back({bits, decodeElement(info_.type, bits)});
  };
  for (size_t i = 0; i < kPaletteSize; i++) {
    double sign = random.coin() ? -1 : 1;
    add(sign * (product ? 0.75 + 0.75 * random.unit() : amplitude * random.unit()));
  }
  if (hasExact_) {
    for (size_t i = 0; i < kPaletteSize; i++) {
      double sign = random.coin() ? -1 : 1;
      add(product ? sign * std::ldexp(1.0, static_cast<int>(random.whole(1, true)))
                  : static_cast<double>(random.whole(wholeEach, true)));
    }
  }

  if (exactAlways) return;
  const double step = info_.unitRoundoff() * (1 + info_.intermediate) + info_.intermediate;
  int roundings = terms;
  if (average) roundings += 2;
  if (reduction_ == BenchReduction::preMulSum) roundings += 1;
  if (info_.type == ElementType::float64) roundings *= 2;
  relativeTolerance_ = std::expm1(roundings * std::log1p(step));
  absoluteTolerance_ = info_.smallest * (product ? 1 : terms);
}

const Reference::Entry& Reference::paletteEntry(uint64_t hash, int rank, size_t index) const {
  size_t exact = hasExact_ && exactElement(index) ? 1 : 0;
  int stride = stride_[exact];
  if (stride > 1 && (static_cast<size_t>(rank) + index) % static_cast<size_t>(stride) != 0) {
    return neutral_;
  }
  return palette_[exact * kPaletteSize + ((hash >> (16 * (index % 4))) & (kPaletteSize - 1))];
}

uint64_t Reference::scalarBits(int rank) const {
  return scalars_[static_cast<size_t>(rank)];
}

void Reference::input(int rank, size_t offset, size_t bytes, std::byte* out) const {
  const auto stream = static_cast<uint64_t>(rank);
  if (!reduces_) {
    size_t done = 0;
    while (done < bytes) {
      size_t position = offset + done;
      uint64_t word = mixBits(seed_, stream, position / 8);
      size_t skip = position % 8;
      size_t take = std::min<size_t>(8 - skip, bytes - done);
      std::memcpy(out + done, reinterpret_cast<const std::byte*>(&word) + skip, take);
      done += take;
    }
    return;
  }
  const size_t width = info_.bytes;
  const size_t first = offset / width;
  const size_t count = bytes / width;
  uint64_t hash = 0;
  for (size_t i = 0; i < count; i++) {
    size_t index = first + i;
    if (i == 0 || index % 4 == 0) hash = mixBits(seed_, stream, index / 4);
    uint64_t bits = paletteEntry(hash, rank, index).bits;
    std::memcpy(out + i * width, &bits, width);
  }
}

void Reference::integerResults(size_t first, size_t count, uint64_t* out) const {
  const bool withSign = info_.kind == NumberKind::signedInteger;
  for (int rank = 0; rank < ranks_; rank++) {
    const uint64_t scalar = extend(scalars_[static_cast<size_t>(rank)], info_);
    uint64_t hash = 0;
    for (size_t i = 0; i < count; i++) {
      size_t index = first + i;
      if (i == 0 || index % 4 == 0) hash = mixBits(seed_, static_cast<uint64_t>(rank), index / 4);
      uint64_t value = extend(paletteEntry(hash, rank, index).bits, info_);
      if (reduction_ == BenchReduction::preMulSum) value *= scalar;
      if (rank == 0) {
        out[i] = value;
        continue;
      }
      bool less =
          withSign ? static_cast<int64_t>(value) < static_cast<int64_t>(out[i]) : value < out[i];
      switch (reduction_) {
        case BenchReduction::prod:
          out[i] *= value;
          break;
        case BenchReduction::min:
          out[i] = less ? value : out[i];
          break;
        case BenchReduction::max:
          out[i] = less ? out[i] : value;
          break;
        default:
          out[i] += value;
          break;
      }
    }
  }
  if (reduction_ != BenchReduction::avg) return;
  for (size_t i = 0; i < count; i++) {
    auto divisor = static_cast<uint64_t>(ranks_);
    out[i] =
        withSign
            ? static_cast<uint64_t>(static_cast<int64_t>(out[i]) / static_cast<int64_t>(divisor))
            : out[i] / divisor;
  }
}

void Reference::floatResults(size_t first, size_t count, double* values, double* tolerances) const {
  // `tolerances` holds the sum of the terms' magnitudes until the end.
  for (int rank = 0; rank < ranks_; rank++) {
    const double scalar = reduction_ == BenchReduction::preMulSum
                              ? scalarValues_[static_cast<size_t>(rank)]
                              : (reduction_ == BenchReduction::avg ? 1.0 / ranks_ : 1.0);
    uint64_t hash = 0;
    for (size_t i = 0; i < count; i++) {
      size_t index = first + i;
      if (i == 0 || index % 4 == 0) hash = mixBits(seed_, static_cast<uint64_t>(rank), index / 4);
      double value = paletteEntry(hash, rank, index).value * scalar;
      if (rank == 0) {
        values[i] = value;
        tolerances[i] = std::fabs(value);
        continue;
      }
      switch (reduction_) {
        case BenchReduction::prod:
          values[i] *= value;
          break;
        case BenchReduction::min:
          values[i] = std::min(values[i], value);
          break;
        case BenchReduction::max:
          values[i] = std::max(values[i], value);
          break;
        default:
          values[i] += value;
          tolerances[i] += std::fabs(value);
          break;
      }
    }
  }
  const bool exactAlways = reduction_ == BenchReduction::min || reduction_ == BenchReduction::max;
  for (size_t i = 0; i < count; i++) {
    if (exactAlways || (hasExact_ && exactElement(first + i))) {
      tolerances[i] = 0;
    } else {
      double magnitude = reduction_ == BenchReduction::prod ? std::fabs(values[i]) : tolerances[i];
      tolerances[i] = relativeTolerance_ * magnitude + absoluteTolerance_;
    }
  }
}

size_t Reference::countWrongIntegers(size_t first, size_t count, const std::byte* actual,
                                     size_t* firstWrong) const {
  std::array<uint64_t, kBlock> expected;
  const size_t width = info_.bytes;
  size_t wrong = 0;
  for (size_t done = 0; done < count; done += kBlock) {
    size_t part = std::min(kBlock, count - done);
    integerResults(first + done, part, expected.data());
    for (size_t i = 0; i < part; i++) {
      uint64_t bits = 0;
      std::memcpy(&bits, actual + (done + i) * width, width);
      if (bits == (expected[i] & widthMask(width))) continue;
      if (wrong++ == 0) *firstWrong = done + i;
    }
  }
  return wrong;
}

size_t Reference::countWrongFloats(size_t first, size_t count, const std::byte* actual,
                                   size_t* firstWrong) const {
  std::array<double, kBlock> expected;
  std::array<double, kBlock> tolerances;
  std::array<double, kBlock> values;
  size_t wrong = 0;
  for (size_t done = 0; done < count; done += kBlock) {
    size_t part = std::min(kBlock, count - done);
    floatResults(first + done, part, expected.data(), tolerances.data());
    decodeElements(info_.type, actual + done * info_.bytes, part, values.data());
    for (size_t i = 0; i < part; i++) {
      // Written so that NaN counts as wrong.
      if (std::fabs(values[i] - expected[i]) <= tolerances[i]) continue;
      if (wrong++ == 0) *firstWrong = done + i;
    }
  }
  return wrong;
}

size_t Reference::countWrong(size_t first, size_t count, const std::byte* actual,
                             size_t* firstWrong) const {
  return info_.kind == NumberKind::floating ? countWrongFloats(first, count, actual, firstWrong)
                                            : countWrongIntegers(first, count, actual, firstWrong);
}

Reference::Expectation Reference::expectation(size_t index) const {
  Expectation result{0, 0};
  if (info_.kind == NumberKind::floating) {
    floatResults(index, 1, &result.value, &result.tolerance);
  } else {
    uint64_t bits = 0;
    integerResults(index, 1, &bits);
    result.value = decodeElement(info_.type, bits & widthMask(info_.bytes));
  }
  return result;
}

}  // namespace unisono::bench
