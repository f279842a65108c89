// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

namespace unisono::bootstrap {

// A binomial tree. The children of place p are p + 1, p + 2, p + 4 ... below the lowest set bit of
// p, and the subtree of a child p + m is the m places from there on: whole ranges, so that parts of
// an all-gather travel without reordering, in log2(size) steps.
struct BinomialTree {
  int place;
  int size;

  int reach() const {
    return place == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(size)))
                      : place & -place;
  }
  int parent() const { return place == 0 ? -1 : place - reach(); }
  std::vector<int> children() const {
    std::vector<int> result;
    for (int step = 1; step < reach() && place + step < size; step *= 2) {
      result.push_back(place + step);
    }
    return result;
  }
  int end() const { return std::min(place + reach(), size); }
};

// The tree over which the ranks of a communicator set themselves up. Each of its unique ids, so
// each root, serves a block of consecutive ranks. The first rank of a block is its head: there is a
// tree over the heads, and one over the ranks of each block. Subtrees are ranges of ranks.
struct RankTree {
  int rank;
  int ranks;
  int roots = 1;

  int block() const {
    const int larger = ranks % roots, size = ranks / roots;
    const int ranksOfLarger = larger * (size + 1);
    return rank < ranksOfLarger ? rank / (size + 1) : larger + (rank - ranksOfLarger) / size;
  }
  int headOf(int block) const { return block * (ranks / roots) + std::min(block, ranks % roots); }
  bool isHead() const { return rank == headOf(block()); }
  // The block whose head is the parent of this block's head; -1 for the first one.
  int parentBlock() const { return overHeads().parent(); }

  // -1 for rank 0.
  int parent() const {
    if (isHead()) return parentBlock() < 0 ? -1 : headOf(parentBlock());
    return headOf(block()) + inBlock().parent();
  }
  // Those with larger subtrees come later.
  std::vector<int> children() const {
    std::vector<int> result;
    for (const int place : inBlock().children()) result.push_back(headOf(block()) + place);
    for (const int head : headsOfChildren()) result.push_back(head);
    return result;
  }
  // The children in other blocks.
  std::vector<int> headsOfChildren() const {
    std::vector<int> result;
    if (!isHead()) return result;
    for (const int child : overHeads().children()) result.push_back(headOf(child));
    return result;
  }
  std::vector<int> neighbours() const {
    std::vector<int> result = children();
    if (parent() >= 0) result.push_back(parent());
    return result;
  }
  // The end of the range of ranks that is the subtree of this one.
  int end() const {
    return isHead() ? headOf(overHeads().end()) : headOf(block()) + inBlock().end();
  }
  RankTree of(int other) const { return {other, ranks, roots}; }

 private:
  BinomialTree overHeads() const { return {block(), roots}; }
  BinomialTree inBlock() const {
    return {rank - headOf(block()), headOf(block() + 1) - headOf(block())};
  }
};

}  // namespace unisono::bootstrap
