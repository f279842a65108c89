// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <span>

#include "bootstrap/interfaces.h"
#include "bootstrap/unique_id.h"

namespace unisono::bootstrap {

// What a rank knows once every rank has joined.
struct Membership {
  int ranks = 0;
  std::map<int, Address> neighbours;  // in RankTree: where they listen
  Secret session = {};                // for connections between the ranks
  Listener listener;                  // where this rank listens
  // Returns the address of a rank as this machine must write it; may be empty.
  std::function<Address(const Address&)> localize;
};

// Announces this rank to the root of its block of `ids` (see RankTree), the head of a block also to
// the root of the block above, and waits until every rank has. Without NCCL_SOCKET_IFNAME
// a rank listens at the address from which it reaches the root, which is one that the others can
// reach too. Throws Error(timeout) that names the missing ranks, Error(remoteError) when the root
// is gone, or what the root found wrong.
Membership joinRendezvous(std::span<const UniqueId> ids, int rank, int ranks,
                          const Settings& settings, const std::function<bool()>& aborted);

}  // namespace unisono::bootstrap
