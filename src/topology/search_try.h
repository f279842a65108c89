// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unordered_map>
#include <vector>

#include "topology/search_space.h"

namespace unisono::topology {

// What one try of the search asks for.
struct Attempt {
  Pattern pattern = Pattern::ring;
  Bandwidth speedIntra = 0, speedInter = 0;
  PathType typeIntra = PathType::loc, typeInter = PathType::pix;  // the farthest paths allowed
  bool sameChannels = true;
  int crossNic = 0;
  bool collnet = false;  // only ports whose network reduces
  int minChannels = 1, maxChannels = 32;
};

// The best channels so far, with the attempt that found them. Channels hold positions of GPUs and
// ports (see SearchSpace), not node indices.
struct Solution {
  Attempt attempt;
  std::vector<Channel> channels;
  int hops = 0;

  Bandwidth totalIntra() const {
    return attempt.speedIntra * static_cast<Bandwidth>(channels.size());
  }
  Bandwidth totalInter() const {
    return attempt.speedInter * static_cast<Bandwidth>(channels.size());
  }
};

// A depth-first search for as many channels as possible that satisfy one attempt. Each channel
// reserves its bandwidth on every link it passes; a channel that fits is followed by the next, and
// what leads nowhere is taken back. The stack is a list of its own, so that many channels over
// many GPUs need no deep recursion.
class SearchTry {
 public:
  explicit SearchTry(const SearchSpace& space) : space_(space) {}

  struct Outcome {
    long long steps = 0;  // taken of the budget
    bool best = false;    // nothing can be better: all channels that were asked for
  };
  // Replaces `solution` by anything better, in at most `budget` steps. Stops at `reachable`
  // channels, where the caller knows that links allow no more.
  Outcome run(const Attempt& attempt, Solution& solution, long long budget, int reachable);

 private:
  // Where a channel's GPUs come from: tried one by one, the order of the topology, the channel
  // before, or the first channel begun at another GPU.
  enum class Order : uint8_t { free, listed, replay, rotated };
  enum class Kind : uint8_t { start, next, leave, close, head, finish };
  struct Move {
    Kind kind = Kind::start;
    Order order = Order::free;
    int gpu = -1;
    int net = -1;
  };
  struct SearchStep {
    size_t begin = 0, cursor = 0;  // of its moves
    bool applied = false;          // the move before the cursor is in force
  };

  bool hasNets() const { return space_.netCount() > 0; }
  bool isTree() const { return topology::isTree(attempt_.pattern); }
  bool hasHead() const { return topology::hasHead(attempt_.pattern); }
  // The step (position in the channel) at which the channel sends to the network next; -1: never.
  int leaveStep() const;

  void pushMoves();
  void addStarts();
  void addStartsFrom(int net);
  int rotated(size_t step) const;
  void addNexts();
  void addLeaves();

  bool apply(const Move& move);
  void undo(const Move& move);
  bool reserve(const PathUse& use);
  void release(const PathUse& use);
  bool reserveNet(const PathUse& use, std::vector<Bandwidth>& ports);
  void releaseNet(const PathUse& use, std::vector<Bandwidth>& ports);
  bool consider();
  const std::vector<int>& nextGpus(int gpu, int net, int towardsNet);

  const SearchSpace& space_;
  Attempt attempt_;
  Solution* solution_ = nullptr;
  ChannelTraffic traffic_{Pattern::ring, 0, 0, {}};  // of channels of the attempt
  std::vector<int> leavePlaces_;                     // places of GPUs that send to the network
  LinkBudget free_;
  std::vector<Bandwidth> portIn_, portOut_;
  std::vector<Channel> channels_;  // complete ones, then the one in work
  std::vector<Order> orders_;
  std::vector<bool> used_;  // GPUs of the channel in work
  int leaves_ = 0;          // times that the channel in work has sent to the network
  bool closed_ = false;     // a ring is closed, a head's reservations are made
  bool working_ = false;    // the last of channels_ is in work
  int hops_ = 0;
  std::vector<SearchStep> frames_;
  std::vector<Move> moves_;
  std::vector<int> startNets_;
  std::vector<std::vector<int>> leaveNets_;  // by GPU, filled when first asked for
  std::unordered_map<uint64_t, std::vector<int>> nextCache_;
};

}  // namespace unisono::topology
