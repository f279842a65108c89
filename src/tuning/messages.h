// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "tuning/measured.h"

// What messages cost. They have predicted times where those were measured, and else a latency and a
// bandwidth of the path (docs/decisions/0023-cost-of-messages.md). Pure.
namespace unisono::tuning {

// What joins two ranks that exchange messages.
struct MessageLink {
  enum class Kind : uint8_t { gpuMemory, hostMemory, network };
  Kind kind = Kind::gpuMemory;
  double gigabytes = 0;      // GB/s from one rank to another, in one direction; 0: unknown
  double rankGigabytes = 0;  // to or from all other ranks together
  bool nvlink = false;       // of gpuMemory; else PCI
  bool sockets = false;      // of network
  double networkUs = 0;      // latency of the port
};

// The messages of a call between ranks of one kind: inside a node, or between nodes.
struct MessageLoad {
  MessageOperation operation = MessageOperation::sendReceive;
  int ranks = 2, nodes = 1;  // of the communicator; of a node, one, for messages inside nodes
  uint64_t bytes = 0;        // of a message
  int channels = 1;          // of a message over FIFOs
};

struct MessageTime {
  double us = 0;          // 0: unknown
  bool measured = false;  // or derived from what was measured
};

// How many messages pass the busiest link in one direction.
int messagesOnLink(const MessageLoad& load);

// The time of the messages if `path` carries them. `measured` is what the user has measured, which
// comes before what was measured for this library and before formulas.
MessageTime messageTime(const MessageTable& measured, const MessageLink& link, MessagePath path,
                        const MessageLoad& load);

// The size up to which `path` takes at most as long as `next`.
struct MessageBorder {
  uint64_t bytes = 0;
  bool open = false;  // no larger size was measured with both
};
// By the sends and receives that were measured with just these nodes and ranks; nothing if they
// were not measured with both paths.
std::optional<MessageBorder> borderOf(const MessageTable& measured, MessagePath path,
                                      MessagePath next, int nodes, int ranks);

}  // namespace unisono::tuning
