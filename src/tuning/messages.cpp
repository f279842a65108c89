// SPDX-License-Identifier: Apache-2.0
#include "tuning/messages.h"

#include <algorithm>

#include "tuning/model.h"

namespace unisono::tuning {
namespace {

// Two H200 on NVSwitches, one process per GPU, CUDA graphs:
// docs/results/2026-11-28-wide-kernels.md; over FIFOs 2026-11-23-protocols.md (float). All-to-all,
// gather and scatter over FIFOs take as long as a send and receive of their messages, within 3 %.
// Small messages over FIFOs were not measured: their times are those of a broadcast over a ring of
// two ranks, which is one message (2026-11-23-steps.md).
const MessageTable& builtinMessages() {
  constexpr uint64_t kKilo = 1 << 10, kMega = 1 << 20, kGiga = 1 << 30;
  // Never destroyed: see builtinMeasurements.
  static const MessageTable& table = *new MessageTable{
      {MessageOperation::sendReceive,
       MessagePath::directLl,
       1,
       2,
       {{kKilo, 1.97},
        {4 * kKilo, 2.12},
        {16 * kKilo, 2.26},
        {64 * kKilo, 2.56},
        {128 * kKilo, 2.95},
        {256 * kKilo, 3.7}}},
      {MessageOperation::sendReceive,
       MessagePath::directLl128,
       1,
       2,
       {{64 * kKilo, 3.09},
        {128 * kKilo, 3.31},
        {256 * kKilo, 3.7},
        {512 * kKilo, 4.49},
        {kMega, 6.33},
        {2 * kMega, 9.94},
        {4 * kMega, 16.47},
        {8 * kMega, 28.97}}},
      {MessageOperation::sendReceive,
       MessagePath::fifoLl,
       1,
       2,
       {{8 * kKilo, 3.645}, {64 * kKilo, 3.923}, {512 * kKilo, 5.902}, {kMega, 9.02}}},
      {MessageOperation::sendReceive,
       MessagePath::fifoSimple,
       1,
       2,
       {{8 * kKilo, 5.11},
        {64 * kKilo, 8.247},
        {512 * kKilo, 11},
        {kMega, 12.5},
        {2 * kMega, 15.5},
        {4 * kMega, 20.9},
        {8 * kMega, 33},
        {16 * kMega, 56.13},
        {32 * kMega, 102.4},
        {64 * kMega, 194.8},
        {256 * kMega, 743.8},
        {kGiga, 2959}}},
      {MessageOperation::allToAll,
       MessagePath::directLl,
       1,
       2,
       {{kKilo, 2.02},
        {4 * kKilo, 2.06},
        {16 * kKilo, 2.15},
        {64 * kKilo, 2.39},
        {256 * kKilo, 2.96},
        {512 * kKilo, 3.75}}},
      {MessageOperation::allToAll,
       MessagePath::directLl128,
       1,
       2,
       {{512 * kKilo, 3.64}, {kMega, 4.4}, {4 * kMega, 9.1}, {16 * kMega, 30.46}}},
      {MessageOperation::gather,
       MessagePath::directLl,
       1,
       2,
       {{kKilo, 1.64},
        {4 * kKilo, 1.7},
        {64 * kKilo, 1.91},
        {256 * kKilo, 2.1},
        {512 * kKilo, 2.51}}},
      {MessageOperation::gather,
       MessagePath::directLl128,
       1,
       2,
       {{kMega, 3}, {2 * kMega, 4.53}, {4 * kMega, 7.65}, {8 * kMega, 13.77}, {16 * kMega, 26.13}}},
      {MessageOperation::scatter,
       MessagePath::directLl,
       1,
       2,
       {{kKilo, 1.69},
        {4 * kKilo, 1.74},
        {64 * kKilo, 1.85},
        {256 * kKilo, 1.97},
        {512 * kKilo, 2.5}}},
      {MessageOperation::scatter,
       MessagePath::directLl128,
       1,
       2,
       {{kMega, 3.11},
        {2 * kMega, 4.96},
        {4 * kMega, 8.12},
        {8 * kMega, 15.13},
        {16 * kMega, 27.91}}},
  };
  return table;
}

// Of one node: what each operation moves over the busiest link, as a multiple of the call's bytes.
double trafficOf(MessageOperation operation, int ranks) {
  return operation == MessageOperation::sendReceive ? 1 : (ranks - 1.0) / ranks;
}

double trafficOf(const MessageLoad& load) {
  return static_cast<double>(load.bytes) * messagesOnLink(load);
}

const MessageCurve* find(const MessageTable& table, MessageOperation operation, MessagePath path,
                         int nodes, int ranks) {
  const auto curve = std::ranges::find_if(table, [&](const MessageCurve& other) {
    return other.operation == operation && other.path == path && other.nodes == nodes &&
           other.ranks == ranks;
  });
  return curve == table.end() ? nullptr : &*curve;
}

// The curve of one node whose number of ranks is nearest.
const MessageCurve* findNearest(const MessageTable& table, MessageOperation operation,
                                MessagePath path, int ranks) {
  const MessageCurve* nearest = nullptr;
  for (const MessageCurve& curve : table) {
    if (curve.operation != operation || curve.path != path || curve.nodes != 1) continue;
    const auto distance = [&](const MessageCurve& of) {
      return std::max(of.ranks, ranks) - std::min(of.ranks, ranks);
    };
    if (nearest == nullptr || distance(curve) < distance(*nearest)) nearest = &curve;
  }
  return nearest;
}

// By the table; 0 if it does not say. The same traffic on a link takes another number of ranks, or
// another operation, as long, and a little more for each further peer.
double timeBy(const MessageTable& table, MessagePath path, const MessageLoad& load) {
  constexpr double kPeerUs = 0.17;  // as of direct collectives (measured.cpp)
  const bool exchanges = load.operation == MessageOperation::sendReceive;
  const int blocks = exchanges ? 1 : load.ranks;
  if (const MessageCurve* same = find(table, load.operation, path, load.nodes, load.ranks)) {
    return measuredTime(same->points, load.bytes * static_cast<uint64_t>(blocks));
  }
  if (load.nodes > 1) return 0;
  const MessageCurve* curve = findNearest(table, load.operation, path, load.ranks);
  if (curve == nullptr) {
    curve = findNearest(table, MessageOperation::sendReceive, path, load.ranks);
  }
  if (curve == nullptr) return 0;
  const double bytes = trafficOf(load) / trafficOf(curve->operation, curve->ranks);
  const bool exchanged = curve->operation == MessageOperation::sendReceive;
  const int peers = messagesOnLink(load) - (exchanged ? 1 : curve->ranks - 1);
  return measuredTime(curve->points, static_cast<uint64_t>(bytes)) + kPeerUs * std::max(peers, 0);
}

// What links of GPUs are slower than those of the built-in table, in us. As adaptToLinks of the
// cost model.
double slownessOf(const MessageLink& link, MessagePath path, const MessageLoad& load) {
  constexpr double kMeasuredGigabytes = 360;
  const bool isLl = path == MessagePath::directLl || path == MessagePath::fifoLl;
  const double bytesOnLink = isLl ? 2 : path == MessagePath::directLl128 ? 16.0 / 15 : 1;
  const int messages = messagesOnLink(load);
  const double gigabytes = std::min(link.rankGigabytes, messages * link.gigabytes);
  if (!(gigabytes > 0)) return 0;
  const double perByte = 1 / gigabytes - (link.nvlink ? 1 / kMeasuredGigabytes : 0);
  return (link.nvlink ? 0 : 1) + bytesOnLink * trafficOf(load) / 1000 * std::max(perByte, 0.0);
}

// What a message over FIFOs costs that are not in the memory of GPUs.
struct FifoCost {
  double latencyUs;
  double channelGigabytes;  // GB/s of a channel of a message; 0: only the link limits
  double rankGigabytes;     // of all channels of a rank; 0: the same
};

FifoCost costOf(const MessageLink& link, Protocol protocol) {
  const bool isLines = protocol == Protocol::ll;
  // Both by sends and receives of 2 ranks (docs/results/2026-11-23-clusters.md): the latency is the
  // time of 64 bytes, the rate of channels that from 512 bytes to 4 KB (LL) and from 4 to 32 KB
  // (Simple), which have one. Through sockets a thread of each rank moves all.
  if (link.kind == MessageLink::Kind::hostMemory) {
    return isLines ? FifoCost{7.9, 1.2, 0} : FifoCost{11.8, 10, 0};
  }
  if (link.sockets) return isLines ? FifoCost{19.8, 0, 0.35} : FifoCost{24.5, 0, 2.3};
  // By NCCL's numbers, as rings between nodes with one rank each.
  constexpr size_t kNetworkHop = 2;
  const auto row = static_cast<size_t>(Algorithm::ring), hop = static_cast<size_t>(Algorithm::tree);
  const size_t column = costColumn(protocol);
  const CostConstants& constants = defaultConstants();
  return {constants.baseLatency[row][column] + constants.hopLatency[kNetworkHop][hop][column] +
              link.networkUs * (isLines ? 1 : 2),
          0, 0};
}

// By latency and bandwidth; 0 if there is no formula.
double timeByFormula(const MessageLink& link, MessagePath path, const MessageLoad& load) {
  const bool overFifos = path == MessagePath::fifoLl || path == MessagePath::fifoSimple;
  if (!overFifos || link.kind == MessageLink::Kind::gpuMemory) return 0;
  const Protocol protocol = path == MessagePath::fifoLl ? Protocol::ll : Protocol::simple;
  const FifoCost cost = costOf(link, protocol);
  const int messages = messagesOnLink(load);
  // Lines are twice as long as their data; proxies of sockets take the data out of them.
  const double onLink = protocol == Protocol::ll && !link.sockets ? 0.5 : 1;
  double gigabytes = std::min(link.rankGigabytes, messages * link.gigabytes) * onLink;
  const auto limit = [&](double most) {
    if (most > 0) gigabytes = gigabytes > 0 ? std::min(gigabytes, most) : most;
  };
  limit(cost.channelGigabytes * std::max(load.channels, 1) * messages);
  limit(cost.rankGigabytes);
  return gigabytes > 0 ? cost.latencyUs + trafficOf(load) / gigabytes / 1000 : 0;
}

}  // namespace

int messagesOnLink(const MessageLoad& load) {
  if (load.operation == MessageOperation::sendReceive) return 1;
  return load.nodes == 1 ? load.ranks - 1 : load.ranks - load.ranks / load.nodes;
}

MessageTime messageTime(const MessageTable& measured, const MessageLink& link, MessagePath path,
                        const MessageLoad& load) {
  if (load.bytes == 0 || load.ranks < 2) return {};
  if (const double us = timeBy(measured, path, load); us > 0) return {us, true};
  if (link.kind != MessageLink::Kind::gpuMemory) return {timeByFormula(link, path, load), false};
  const double us = timeBy(builtinMessages(), path, load);
  return us > 0 ? MessageTime{us + slownessOf(link, path, load), true} : MessageTime{};
}

std::optional<MessageBorder> borderOf(const MessageTable& measured, MessagePath path,
                                      MessagePath next, int nodes, int ranks) {
  const MessageCurve* first = find(measured, MessageOperation::sendReceive, path, nodes, ranks);
  const MessageCurve* second = find(measured, MessageOperation::sendReceive, next, nodes, ranks);
  if (first == nullptr || second == nullptr) return std::nullopt;
  const uint64_t lowest = std::max(first->points.front().bytes, second->points.front().bytes);
  const uint64_t highest = std::min(first->points.back().bytes, second->points.back().bytes);
  if (lowest > highest) return std::nullopt;
  // Nothing is known of smaller sizes.
  MessageBorder border{std::max<uint64_t>(lowest, 1) - 1, true};
  for (const MessageCurve* curve : {first, second}) {
    for (const MeasuredPoint& point : curve->points) {
      const uint64_t bytes = point.bytes;
      if (bytes < lowest || bytes > highest || bytes < border.bytes) continue;
      const bool isFaster =
          measuredTime(first->points, bytes) <= measuredTime(second->points, bytes);
      if (isFaster) border.bytes = bytes;
    }
  }
  border.open = border.bytes == highest;
  return border;
}

}  // namespace unisono::tuning
