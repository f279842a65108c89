// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "operations.h"
#include "plan/message_choice.h"
#include "tuning/messages.h"

// What `unisono explain` shows of calls that are messages: send and receive, all-to-all, gather and
// scatter. As plain data.
namespace unisono::explain {

struct MessageCandidate {
  plan::MessagePath path;
  bool chosen, possible;
  tuning::MessageTime time;
  std::string reason;  // why it lost or is excluded; empty for the choice
};

// Sizes of the call with one path. The channels and times are those at both ends.
struct MessageRange {
  uint64_t firstBytes, lastBytes;
  plan::MessagePath path;
  int firstChannels, lastChannels;
  double firstTimeUs, lastTimeUs;
};

// Messages between ranks of one kind: inside a node, or between nodes.
struct MessagePair {
  std::string name;
  int from, to;       // an example
  std::string links;  // what joins such ranks
  tuning::MessageLink link;
  int ranks, nodes;  // that exchange such messages, as tuning::MessageLoad has them
};
struct MessageRoute {
  MessagePair pair;
  plan::MessageChoice choice;
  std::vector<MessageCandidate> candidates;
  std::vector<MessageRange> ranges;
};

struct MessageRow {
  uint64_t bytes;
  std::vector<plan::MessagePath> paths;  // by route
  double predictedUs, measuredUs;
  uint64_t wrong;  // elements that differ from the expected result
};

struct MessageReport {
  plan::CommConfig config;
  tuning::MessageTable measured;  // by the user
  std::string source;             // file, preset or "this machine"
  int nodes = 1, ranks = 1;
  std::string network;  // that joins the nodes; empty: none, or shared memory
  bench::BenchOperation operation{};
  std::string typeName;
  uint64_t typeBytes = 1;
  uint64_t count = 0;         // of the call, in elements
  uint64_t bytes = 0;         // of the call, as nccl-tests counts
  uint64_t messageBytes = 0;  // of a message
  uint64_t minBytes = 0, maxBytes = 0;
  std::vector<MessageRoute> routes;
  std::vector<std::string> warnings;
  std::string backend;  // of the run; empty: there was none
  std::vector<MessageRow> run;

  bool simulated() const { return backend == "host"; }
};

constexpr bool isMessages(bench::BenchOperation operation) {
  return operation >= bench::BenchOperation::sendReceive;
}
constexpr tuning::MessageOperation messageOperation(bench::BenchOperation operation) {
  return static_cast<tuning::MessageOperation>(
      static_cast<int>(operation) - static_cast<int>(bench::BenchOperation::sendReceive));
}

// Adds what `pair` exchanges as a route.
void addRoute(MessagePair pair, MessageReport& report);
// How a call of `bytes` bytes travels and, with the slowest of its routes, how long it takes (0:
// not known), as a row without a measurement.
MessageRow predict(const MessageReport& report, uint64_t bytes);

std::string textOf(const MessageReport& report);
std::string jsonOf(const MessageReport& report);
// Draws the predicted time of every path and route over the sizes.
std::string svgOf(const MessageReport& report);

}  // namespace unisono::explain
