// SPDX-License-Identifier: Apache-2.0
#include "support/pairwise.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <tuple>

namespace unisono::test {
namespace {

// The pairs that no point covers yet, by axis and value of both.
class OpenPairs {
 public:
  explicit OpenPairs(const Space& space) {
    const int axes = static_cast<int>(space.sizes.size());
    for (int a = 0; a < axes; a++) {
      for (int b = a + 1; b < axes; b++) {
        for (int x = 0; x < space.sizes[static_cast<size_t>(a)]; x++) {
          for (int y = 0; y < space.sizes[static_cast<size_t>(b)]; y++) {
            if (space.fits(a, x, b, y)) pairs_.insert({a, x, b, y});
          }
        }
      }
    }
  }

  bool empty() const { return pairs_.empty(); }
  bool has(int a, int x, int b, int y) const {
    return pairs_.contains(a < b ? Pair{a, x, b, y} : Pair{b, y, a, x});
  }
  std::pair<std::pair<int, int>, std::pair<int, int>> pick(std::mt19937_64& random) const {
    const auto [a, x, b, y] = *std::next(
        pairs_.begin(), static_cast<ptrdiff_t>(std::min<size_t>(random() % 64, pairs_.size() - 1)));
    return {{a, x}, {b, y}};
  }
  void remove(const Point& point) {
    const int axes = static_cast<int>(point.size());
    for (int a = 0; a < axes; a++) {
      for (int b = a + 1; b < axes; b++) {
        pairs_.erase({a, point[static_cast<size_t>(a)], b, point[static_cast<size_t>(b)]});
      }
    }
  }

 private:
  using Pair = std::tuple<int, int, int, int>;
  std::set<Pair> pairs_;
};

constexpr int kUnset = -1;

bool fitsAll(const Space& space, const Point& point, int axis, int value) {
  for (int other = 0; other < static_cast<int>(point.size()); other++) {
    const int at = point[static_cast<size_t>(other)];
    if (other != axis && at != kUnset && !space.fits(axis, value, other, at)) return false;
  }
  return true;
}

// Chooses the value of `axis` that fits and covers most open pairs with those already set.
int bestValue(const Space& space, const OpenPairs& open, const Point& point, int axis,
              std::mt19937_64& random) {
  const int values = space.sizes[static_cast<size_t>(axis)];
  const int start = static_cast<int>(random() % static_cast<uint64_t>(values));
  int best = 0, mostCovered = -1;
  for (int i = 0; i < values; i++) {
    const int value = (start + i) % values;
    if (!fitsAll(space, point, axis, value)) continue;
    int covered = 0;
    for (int other = 0; other < static_cast<int>(point.size()); other++) {
      const int at = point[static_cast<size_t>(other)];
      covered += at != kUnset && open.has(axis, value, other, at) ? 1 : 0;
    }
    if (covered > mostCovered) {
      mostCovered = covered;
      best = value;
    }
  }
  return best;
}

}  // namespace

bool Space::contains(const Point& point) const {
  for (int axis = 0; axis < static_cast<int>(point.size()); axis++) {
    if (!fitsAll(*this, point, axis, point[static_cast<size_t>(axis)])) return false;
  }
  return true;
}

std::vector<Point> pairwiseCover(const Space& space, std::mt19937_64& random) {
  std::vector<Point> points;
  OpenPairs open(space);
  std::vector<int> order(space.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  while (!open.empty()) {
    Point point(space.sizes.size(), kUnset);
    const auto [first, second] = open.pick(random);
    point[static_cast<size_t>(first.first)] = first.second;
    point[static_cast<size_t>(second.first)] = second.second;
    std::shuffle(order.begin(), order.end(), random);
    for (const int axis : order) {
      int& value = point[static_cast<size_t>(axis)];
      if (value == kUnset) value = bestValue(space, open, point, axis, random);
    }
    open.remove(point);
    points.push_back(std::move(point));
  }
  return points;
}

std::vector<Point> axesThrough(const Space& space, const Point& base) {
  std::vector<Point> points{base};
  for (size_t axis = 0; axis < base.size(); axis++) {
    for (int value = 0; value < space.sizes[axis]; value++) {
      Point point = base;
      point[axis] = value;
      if (value != base[axis] && space.contains(point)) points.push_back(std::move(point));
    }
  }
  return points;
}

}  // namespace unisono::test
