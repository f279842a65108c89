// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "diagnose/rank_view.h"

namespace unisono::diagnose {

// Who waits for whom among the ranks of a communicator.
class Waits {
 public:
  // The views of all ranks, in their order, which must live longer.
  explicit Waits(const std::vector<RankView>& views) : views_(views) {}

  // The call of `rank` that belongs to `call`, which `of` has made.
  const Call* counterpart(const Call& call, int of, int rank) const;
  // Whether `rank` has made it; also if its table no longer holds it.
  bool hasArrived(const Call& call, int of, int rank) const;

  // The messages of `of` to or from `rank` that this one has not begun.
  struct LateMessages {
    bool sends;  // `of`
    uint64_t begun, needed;
  };
  std::vector<LateMessages> lateMessages(int of, int rank) const;
  // Whom a message waits for; in a replay the first message stands for all of its group.
  std::vector<int> peersOfMessage(const Call& call, int of) const;

  // The ranks that `rank` waits for in the call that it is in.
  std::vector<int> waitedFor(int rank) const;
  // The heads of a network that reduces, as far as it is known: those with links to it.
  std::vector<int> headsOf(const Link& link) const;
  // Those that hold up the next result of `link`: they have not sent what it is made of, or their
  // process does not run.
  std::vector<int> lateHeads(const Link& link) const;
  // "rank 0 waits for rank 1 at channel 3, step 17".
  std::string placeOf(int waiter, int peer) const;

 private:
  const RankView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }
  // A FIFO of the direct family from `sender`, of which only the receiver knows how far it is.
  static const Link* isFullFor(const RankView& receiver, int sender);
  // Whether a rank waits for what a peer offers, of which it needs all before it takes any, or for
  // the end of the peer's use of its buffers.
  bool waitsForBuffers(const RankView& waiter, const Link& link) const;
  // A peer that is not yet at the end itself has its answer.
  bool hasUsedBuffers(int rank) const;
  bool mayStillSend(int peer) const;

  const std::vector<RankView>& views_;
};

}  // namespace unisono::diagnose
