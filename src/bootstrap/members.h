// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace unisono::bootstrap {

// The ranks of a communicator: which numbers they have in the first one of its family, whose
// connections it uses, and their places in the tree over which they set themselves up. Places are
// in the order of the numbers in the family, whatever the order of the ranks: where a part of the
// family's tree has these ranks, its connections are those of the new tree.
class Members {
 public:
  // Of the first communicator.
  explicit Members(int ranks) : ranks_(ranks) {}
  // By rank.
  explicit Members(std::vector<int> familyRanks)
      : ranks_(static_cast<int>(familyRanks.size())),
        family_(std::move(familyRanks)),
        places_(family_.size()) {
    std::iota(places_.begin(), places_.end(), 0);
    std::ranges::sort(places_, {}, [this](int rank) { return familyRank(rank); });
  }

  int ranks() const { return ranks_; }
  int familyRank(int rank) const {
    return family_.empty() ? rank : family_[static_cast<size_t>(rank)];
  }
  // -1: it is not a member.
  int rankOf(int familyRank) const {
    const int place = lowerBound(familyRank);
    if (place == ranks_ || this->familyRank(rankAt(place)) != familyRank) return -1;
    return rankAt(place);
  }
  int rankAt(int place) const {
    return places_.empty() ? place : places_[static_cast<size_t>(place)];
  }
  int placeOf(int rank) const { return lowerBound(familyRank(rank)); }

 private:
  // The place of the first member that is not below this one.
  int lowerBound(int familyRank) const {
    if (places_.empty()) return std::clamp(familyRank, 0, ranks_);
    const auto found = std::ranges::lower_bound(
        places_, familyRank, {}, [this](int rank) { return this->familyRank(rank); });
    return static_cast<int>(found - places_.begin());
  }

  int ranks_;
  std::vector<int> family_;  // by rank; empty: all, as they are
  std::vector<int> places_;  // ranks by place; empty: as they are
};

}  // namespace unisono::bootstrap
