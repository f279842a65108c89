// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string>

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

}  // namespace unisono::bootstrap
