// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <random>
#include <vector>

// Sets of test cases that cover what pairs of parameters do together.
namespace unisono::test {

// A case: the index of a value on each axis.
using Point = std::vector<int>;

struct Space {
  std::vector<int> sizes;  // the number of values of each axis
  // Whether two values make sense together. Value 0 of an axis must fit all values of all others.
  std::function<bool(int axisA, int valueA, int axisB, int valueB)> fits;

  bool contains(const Point& point) const;
};

// Points such that each two values that fit together occur in one of them. Greedy: the number of
// points is somewhat larger than the product of the two largest axes.
std::vector<Point> pairwiseCover(const Space& space, std::mt19937_64& random);

// `base`, and for each axis each other value with the rest of `base`, as far as these fit.
std::vector<Point> axesThrough(const Space& space, const Point& base);

}  // namespace unisono::test
