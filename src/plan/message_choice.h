// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "plan/plan.h"

// What carries a message: the one place that decides it, for plans and for `unisono explain`.
// Sizes, settings and the links of the communicator decide; of times, only those that the user has
// measured, so that both ends of a message choose alike. Pure.
namespace unisono::plan {

using tuning::MessagePath;

enum class MessageExclusion : uint8_t {
  none,
  operation,  // does not carry it
  otherNode,  // only inside a node
  window,     // a buffer is in no window that all ranks have registered
  empty,      // there is nothing to send
  model,      // what the cost model excludes
  settings,   // NCCL_ALGO or NCCL_PROTO
  threshold,  // NCCL_P2P_LL_THRESHOLD
  slower,     // UNISONO_TUNING_FILE says that the next path is faster
  tooSmall,
  tooLarge,
  fasterByLl128,
  noLines,  // the connection has no FIFO over LL
};

// A message of a call between two ranks.
struct MessageQuestion {
  Call call = Call::send;
  int from = 0, to = 0;
  uint64_t bytes = 0;
  bool symmetric = false;  // the buffers are in windows that all ranks have registered
};

// Why a path cannot carry a message, whatever the others can do. The same at both ends.
MessageExclusion exclusionOf(const CommConfig& config, MessagePath path,
                             const MessageQuestion& question);
// For the user.
std::string reasonOf(const CommConfig& config, MessagePath path, const MessageQuestion& question);

struct MessageChoice {
  MessagePath path = MessagePath::fifoSimple;
  int channels = 0;         // or blocks of the direct family; copy engines have none
  uint64_t partBytes = 0;   // of FIFOs: what a channel carries
  uint64_t sliceBytes = 0;  // of FIFOs: the payload of a slot
  bool offered = false;     // the sender stores into the receiver's buffer, if it can reach it

  bool operator==(const MessageChoice&) const = default;
};
// The first path that is not excluded.
MessageChoice messageChoice(const CommConfig& config, const MessageQuestion& question);
// Of a message that no other path than FIFOs carries, or of one to oneself.
MessageChoice fifoChoice(const CommConfig& config, int from, int to, uint64_t bytes);

// Whether the messages of a call have a launch of their own, where LL128 carries them.
bool hasOwnLaunch(const CommConfig& config, Call call);

// Whether the direct family carries a message of `bytes` bytes inside a node by `path`.
bool carries(const CommConfig& config, MessagePath path, uint64_t bytes, Call call = Call::send);

// The shape of a message over LL128 in a launch with others.
tuning::WideShape wideMessageShape(const CommConfig& config, uint64_t bytes);

}  // namespace unisono::plan
