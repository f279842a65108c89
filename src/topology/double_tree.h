// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

namespace unisono::topology {

// Neighbours in a binary tree, -1 where there is none.
struct TreeLinks {
  int up = -1;
  std::array<int, 2> down{-1, -1};
};

// The neighbours of member `index` in one of two binary trees (`tree` 0 or 1) over `count`
// members: depth at most 1 + log2(count), and whoever has children in one tree is a leaf in the
// other, so that together they use what every member sends and receives. Of an odd number, one
// member has children in both. After P. Sanders, J. Speck, J. Traeff, "Two-tree algorithms for full
// bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).
TreeLinks doubleTree(int count, int index, int tree);

}  // namespace unisono::topology
