// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace unisono::bootstrap {

// How many calls a rank had completed when it left its communicator: kUnlimited where nobody can
// say.
struct DepartureCounts {
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
  uint64_t collectives = kUnlimited;
  uint64_t sends = kUnlimited, receives = kUnlimited;  // to and from the rank that is told
};

// A rank that has left in an orderly manner, with nothing in progress.
struct Departure {
  int rank = 0;
  DepartureCounts counts = {};
  std::string text;  // "Rank 3 (process 17 on host n1) was destroyed"
};

// Hears what becomes of the other ranks, from the connections between them. Its functions are
// called by any thread and must not call the bootstrap.
class PeerWatcher {
 public:
  virtual ~PeerWatcher() = default;
  // A rank has failed or has ended without leaving. Called once: for the first one.
  virtual void peerFailed(const Error& error) = 0;
  virtual void peerLeft(const Departure& departure) = 0;
};

// How a rank answers questions of others, and hears the answers to its own. Called by the reactor's
// thread with a lock held: they must neither wait, call the bootstrap nor throw.
struct QuestionHandlers {
  // Returns the answer, of at most kLongestMessage bytes; an empty one is not sent.
  std::function<std::vector<std::byte>(int peer, std::span<const std::byte> question)> answer;
  std::function<void(int peer, std::vector<std::byte> answer)> hear;
};

}  // namespace unisono::bootstrap
