// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

// The shape of messages and FIFOs, from what the ranks told each other. Pure.
namespace unisono::plan {

// Messages below this go through the FIFO: waiting for an offer would cost more than a copy.
inline constexpr uint64_t kOfferedBytes = 256 << 10;

// Of the FIFOs of collectives.
struct SlotDefaults {
  uint32_t simple, ll, ll128;  // bytes
  uint32_t count;              // of a FIFO: a chunk on its way and the next one
};
const SlotDefaults& slotDefaults(bool cuda);

// The bytes of a slot if a FIFO of `count` slots has `bufferBytes` bytes; 0: `automatic`.
uint32_t slotBytesOf(int64_t bufferBytes, uint32_t count, uint32_t automatic);

struct MessageFacts {
  bool cuda = true;                              // else the host backend
  std::vector<uint64_t> hosts;                   // by rank; empty: no network joins hosts
  int64_t fewestChannels = 0, mostChannels = 0;  // set by the user; 0: automatic
  int64_t remoteChannelsPerPeer = 0;             // the same between two ranks of different hosts
  int64_t residentBlocks = 1;                    // that can run at the same time
  int64_t mostBlocks = 1;                        // of them, those that the user allows
  tuning::Allowed allowed;
  int64_t llThreshold = -1;       // NCCL_P2P_LL_THRESHOLD; -1: automatic
  tuning::MessageTable measured;  // of UNISONO_TUNING_FILE
  bool sharesNetBuffers = true;
};

// Sets what `config` says of messages, and `config.wide`; and in `model`, which has the links and
// limits of the communicator, which messages the direct family carries. `config` has the slots of
// collectives.
void setMessages(const MessageFacts& facts, CommConfig& config, tuning::CommFacts& model);

}  // namespace unisono::plan
