// SPDX-License-Identifier: Apache-2.0
#include "support/pairwise.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace unisono::test {
namespace {

// Values 2 of axis 0 and 3 of axis 2 do not fit.
Space smallSpace() {
  Space space;
  space.sizes = {3, 5, 4, 2};
  space.fits = [](int a, int x, int b, int y) {
    if (a > b) {
      std::swap(a, b);
      std::swap(x, y);
    }
    return a != 0 || b != 2 || x != 2 || y != 3;
  };
  return space;
}

TEST(Pairwise, CoversEachPairThatFitsAndNoOther) {
  const Space space = smallSpace();
  for (uint64_t seed = 0; seed < 20; seed++) {
    std::mt19937_64 random(seed);
    const std::vector<Point> points = pairwiseCover(space, random);
    EXPECT_LE(points.size(), 32u);  // 20 are needed
    for (const Point& point : points) EXPECT_TRUE(space.contains(point));
    for (size_t a = 0; a < 4; a++) {
      for (size_t b = a + 1; b < 4; b++) {
        for (int x = 0; x < space.sizes[a]; x++) {
          for (int y = 0; y < space.sizes[b]; y++) {
            const bool covered = std::any_of(points.begin(), points.end(), [&](const Point& point) {
              return point[a] == x && point[b] == y;
            });
            EXPECT_EQ(covered, space.fits(static_cast<int>(a), x, static_cast<int>(b), y))
                << a << "=" << x << ", " << b << "=" << y;
          }
        }
      }
    }
  }
}

TEST(Pairwise, AxesThroughAPointHaveEachValueThatFits) {
  const std::vector<Point> points = axesThrough(smallSpace(), {2, 1, 0, 1});
  EXPECT_EQ(points.size(), 1u + 2 + 4 + 2 + 1);
  EXPECT_EQ(std::count(points.begin(), points.end(), Point{2, 1, 3, 1}), 0);
  EXPECT_EQ(std::count(points.begin(), points.end(), Point{2, 4, 0, 1}), 1);
}

}  // namespace
}  // namespace unisono::test
