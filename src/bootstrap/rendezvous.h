// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "bootstrap/interfaces.h"
#include "bootstrap/unique_id.h"

namespace unisono::bootstrap {

// What a rank knows once every rank has joined.
struct Membership {
  std::vector<Address> addresses;  // where each rank listens
  Secret session = {};             // for connections between the ranks
  Listener listener;               // where this rank listens
};

// Announces this rank to the root of `id` and waits until every rank has. Without
// NCCL_SOCKET_IFNAME a rank listens at the address from which it reaches the root, which is one
// that the others can reach too. Throws Error(timeout) that names the missing ranks,
// Error(remoteError) when the root is gone, or what the root found wrong.
Membership joinRendezvous(const UniqueId& id, int rank, int ranks, const Settings& settings,
                          const std::function<bool()>& aborted);

}  // namespace unisono::bootstrap
