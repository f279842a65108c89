// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "element_types.h"
#include "operations.h"

// The inputs of a check and their expected results. Every byte of every rank's input is a pure
// function of (seed, rank, position), so that any process can compute what any rank sent.
namespace unisono::bench {

// The choice of inputs and the tolerance of results.
//
// Operations that only move data use random bytes and must preserve every bit.
//
// Reductions draw each element from a palette of kPaletteSize values chosen for the type, the
// operation and the number of ranks n:
//   integers: compared exactly. sum, mulsum: any value, modulo 2^w. min, max: any value. prod and
//     avg: magnitudes small enough that nothing overflows; avg rounds towards zero.
//   floats: min, max exact. Otherwise half of the elements (exactElement) hold numbers whose
//     partial results are all representable in any order, so that the result must be exact:
//     whole numbers for sums, powers of two for products. The other half hold random numbers, and
//     with p = valueBits of the type, u = 2^-p, w = `intermediate` of the type (computing in a
//     wider type and rounding to this one errs by at most v = u + w + u*w a step) the result may
//     differ from the one computed in double by
//       sum, avg, mulsum:  ((1+v)^k - 1) * (sum over ranks of |term|) + m * smallest
//       prod:              ((1+v)^k - 1) * |product| + smallest
//     of m terms, the others being neutral (m = n, but at most kMaxProductTerms for prod, which
//     keeps it in range, and else kMaxCoarseTerms for fp8, which keeps the bound useful), where k
//     roundings touch any one term: m - 1 additions or products and one conversion at the end for
//     sum and prod, one product with the scalar more for avg and mulsum, and one rounding of the
//     scalar 1/n for avg. This is the bound for any order of evaluation (Higham, Accuracy and
//     Stability of Numerical Algorithms, 2nd ed., section 4.2); `smallest` covers what underflows.
//     For double the reference itself is computed in double, and errs as much again.
class Reference {
 public:
  static constexpr size_t kPaletteSize = 4096;
  static constexpr int kMaxProductTerms = 6;
  static constexpr int kMaxCoarseTerms = 2;
  static constexpr int kCoarseBits = 4;  // valueBits up to which a float counts as coarse

  Reference(uint64_t seed, ElementType type, int ranks);
  Reference(uint64_t seed, ElementType type, BenchReduction reduction, int ranks);

  bool reduces() const { return reduces_; }
  ElementType type() const { return info_.type; }

  // Bytes [offset, offset + bytes) of the input of `rank`; both multiples of the element size for
  // reductions.
  void input(int rank, size_t offset, size_t bytes, std::byte* out) const;

  // The scalar of `rank` for mulsum, as stored bits.
  uint64_t scalarBits(int rank) const;

  // Counts the wrong elements among the `count` of `actual`, which begin at element `first` of the
  // reduction. *firstWrong becomes the position in `actual` of the first one.
  size_t countWrong(size_t first, size_t count, const std::byte* actual, size_t* firstWrong) const;

  // The inputs and the result of one element, for a message.
  struct Expectation {
    double value;
    double tolerance;
  };
  Expectation expectation(size_t index) const;

 private:
  struct Entry {
    uint64_t bits;
    double value;
  };
  const Entry& paletteEntry(uint64_t hash, int rank, size_t index) const;
  void makeIntegerPalette();
  void makeFloatPalette();
  size_t countWrongIntegers(size_t first, size_t count, const std::byte* actual,
                            size_t* firstWrong) const;
  size_t countWrongFloats(size_t first, size_t count, const std::byte* actual,
                          size_t* firstWrong) const;
  void integerResults(size_t first, size_t count, uint64_t* out) const;
  void floatResults(size_t first, size_t count, double* values, double* tolerances) const;

  uint64_t seed_;
  const ElementInfo& info_;
  BenchReduction reduction_ = BenchReduction::sum;
  int ranks_;
  bool reduces_ = false;
  // Of `stride_` neighbouring ranks one contributes to an element; the others have neutral_.
  // Index 0: rounded elements, 1: exact ones. Integers only use index 0.
  int stride_[2] = {1, 1};
  Entry neutral_{};
  bool hasExact_ = false;
  double relativeTolerance_ = 0;
  double absoluteTolerance_ = 0;
  std::vector<Entry> palette_;     // kPaletteSize rounded entries, then as many exact ones
  std::vector<uint64_t> scalars_;  // mulsum: bits by rank
  std::vector<double> scalarValues_;
};

// A hash of three numbers with every output bit depending on every input bit (the finaliser of
// SplitMix64, applied twice).
uint64_t mixBits(uint64_t seed, uint64_t stream, uint64_t position);

}  // namespace unisono::bench
