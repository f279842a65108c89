// SPDX-License-Identifier: Apache-2.0
#include "topology/double_tree.h"

#include <bit>

namespace unisono::topology {

namespace {

// The tree whose leaves are the odd positions: a position with k zeros at its end is k levels above
// the leaves, in the middle between its children. Position 0 is the root, with one child.
TreeLinks oddLeaves(int count, int position) {
  TreeLinks links;
  if (position == 0) {
    if (count > 1) {
      links.down[1] = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
    }
    return links;
  }
  const int step = position & -position;
  const int above = (position - step) | (step << 1);
  // Where the tree is cut off on the right, the next lower position takes the place of the parent.
  links.up = above < count ? above : position - step;
  if (step > 1) links.down[0] = position - step / 2;
  int right = step / 2;
  while (right > 0 && position + right >= count) right /= 2;
  if (right > 0) links.down[1] = position + right;
  return links;
}

}  // namespace

TreeLinks doubleTree(int count, int index, int tree) {
  if (tree == 0) return oddLeaves(count, index);
  // The second tree has its leaves at the even indices: the first one mirrored, or, as mirroring an
  // odd number keeps parity, moved on by one.
  const bool mirror = count % 2 == 0;
  const auto turn = [&](int position) {
    if (position < 0) return -1;
    return mirror ? count - 1 - position : (position + 1) % count;
  };
  const TreeLinks links =
      oddLeaves(count, mirror ? count - 1 - index : (index + count - 1) % count);
  return {turn(links.up), {turn(links.down[0]), turn(links.down[1])}};
}

}  // namespace unisono::topology
