// SPDX-License-Identifier: Apache-2.0
#include "tuning/formulas.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace unisono::tuning {
namespace {

using topology::CpuArchitecture;
using topology::CpuVendor;
using topology::GraphFacts;
using topology::MachineFacts;
using topology::PathType;
using topology::toGigabytes;

constexpr size_t kNvlink = 0, kPci = 1, kNetwork = 2;  // of CostConstants::hopLatency

size_t generationOf(int sm) {
  return sm >= 100 ? 3 : sm >= 90 ? 2 : sm >= 80 ? 1 : 0;
}

// The part of its bandwidth that NVLS reaches.
double nvlsEfficiency(int sm) {
  constexpr double kEfficiency[] = {0, 0, 0.85, 0.74};
  return kEfficiency[generationOf(sm)];
}

int log2Floor(uint64_t value) {
  return value == 0 ? -1 : std::bit_width(value) - 1;
}

}  // namespace

const CostConstants& defaultConstants() {
  static const CostConstants constants = {
      // Rows: tree, ring, CollNet direct, CollNet chain, NVLS, NVLS tree, PAT; columns: LL, LL128,
      // Simple.
      .baseLatency = {{{6.8, 14, 8.4}, {6.6, 14, 8.4}, {}, {}, {}, {}, {8, 8, 8}}},
      .hopLatency = {{{{{0.6, 1.25, 4},
                        {0.6, 1.9, 3.4},
                        {0, 0, 3.7},
                        {0, 0, 2.8},
                        {0, 0, 25},
                        {0, 0, 25},
                        {0, 0, 4}}},
                      {{{1, 1.9, 4}, {1, 2.5, 5.7}, {0, 0, 3.7}, {0, 0, 2.8}, {}, {}, {0, 0, 4}}},
                      {{{5, 8.5, 14},
                        {2.7, 4, 14},
                        {0, 0, 31},
                        {0, 0, 30},
                        {0, 0, 18},
                        {0, 0, 20.9},
                        {0, 0, 14}}}}},
      .llMax = {{{39, 39, 20.4}, {87.7, 22.5, 19}, {141, 45, 35}, {282, 90, 70}}},
      .ringLl128PerChannel = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {40, 40, 40}}},
      .treeLl128PerChannel = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 29}, {55.6, 31.67, 20}}},
      .treePerChannel = {{{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 36}, {70, 42.8, 24}}},
      .nvlsTreePerChannel = {{{26.5, 18.5, 10}, {24, 23.6, 17.8}, {0, 57.7, 45.5}, {0, 96, 80}}},
  };
  return constants;
}

const GraphFacts& graphOf(const CommFacts& facts, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::tree:
    case Algorithm::directTree:
    case Algorithm::pat:
      return facts.tree;
    case Algorithm::collNetDirect:
      return facts.collnetDirect;
    case Algorithm::collNetChain:
      return facts.collnetChain;
    case Algorithm::nvls:
    case Algorithm::nvlsTree:
      return facts.nvls;
    default:
      return facts.ring;
  }
}

Formulas::Formulas(const ModelInput& input)
    : facts_(input.facts),
      constants_(input.constants),
      settings_(input.settings),
      generation_(generationOf(input.facts.machine.lowestSm)),
      scale_(static_cast<size_t>(std::clamp(input.facts.nodes, 1, 3)) - 1),
      ranksPerNode_(static_cast<double>(input.facts.ranks) / input.facts.nodes) {
  if (facts_.machine.cpuArchitecture == static_cast<int>(CpuArchitecture::power)) {
    constants_.hopLatency[kPci][at(Algorithm::tree)][at(Protocol::simple)] =
        constants_.hopLatency[kPci][at(Algorithm::ring)][at(Protocol::simple)];
  }
}

void Formulas::estimate(Operation operation, Algorithm algorithm, Protocol protocol,
                        Estimate& result) const {
  result.bandwidth = algorithmBandwidth(operation, algorithm, protocol);
  result.latencyUs = latency(operation, algorithm, protocol);
}

int Formulas::steps(Operation operation) const {
  switch (operation) {
    case Operation::allReduce:
      return 2 * (facts_.ranks - 1);
    case Operation::allGather:
    case Operation::reduceScatter:
      return facts_.ranks - 1;
    default:
      return facts_.ranks;
  }
}

double Formulas::channelSpeed(Operation operation, Algorithm algorithm,
                              const GraphFacts& graph) const {
  const double intra = toGigabytes(graph.speedIntra), inter = toGigabytes(graph.speedInter);
  const bool collnet =
      algorithm == Algorithm::collNetDirect || algorithm == Algorithm::collNetChain;
  if (algorithm != Algorithm::nvls && algorithm != Algorithm::nvlsTree) {
    return facts_.nodes <= 2 || collnet ? intra : inter;
  }
  if (graph.channels < 2) return 0;
  double inside =
      intra * nvlsEfficiency(facts_.machine.lowestSm) * (graph.channels - 1) / graph.channels;
  // An all-reduce moves data up and down at once.
  inside *= operation == Operation::allReduce ? 2 : (ranksPerNode_ - 1) / ranksPerNode_;
  const bool tree = algorithm == Algorithm::nvlsTree;
  const double outside = inter * (facts_.nodes <= 2 && tree ? 2 : 1);
  const double cap = tree ? constants_.nvlsTreePerChannel[generation_][scale_]
                          : std::numeric_limits<double>::max();
  return std::min({inside, outside, cap});
}

double Formulas::busBandwidth(Operation operation, Algorithm algorithm, Protocol protocol) const {
  const GraphFacts& graph = graphOf(facts_, algorithm);
  const bool limited = algorithm == Algorithm::ring || algorithm == Algorithm::tree;
  const double channels = limited ? std::min(graph.channels, facts_.channels) : graph.channels;
  const double speed = channelSpeed(operation, algorithm, graph);
  double bus = channels * speed;
  const bool allReduce = operation == Operation::allReduce;
  switch (algorithm) {
    case Algorithm::ring:
      if (protocol == Protocol::ll) return std::min({llMax(), bus * 0.5, proxyLines(graph)});
      if (protocol == Protocol::ll128) {
        return std::min(bus * 0.92, channels * constants_.ringLl128PerChannel[generation_][scale_]);
      }
      return bus;
    case Algorithm::tree:
      if (allReduce) {
        bus = std::min(bus * 0.92, channels * constants_.treePerChannel[generation_][scale_]);
      }
      if (protocol == Protocol::ll) bus = std::min({bus / 3.8, llMax(), proxyLines(graph)});
      if (protocol == Protocol::ll128) {
        bus = std::min(bus * (facts_.nodes == 1 ? 7.0 / 9.0 : 120.0 / 128.0),
                       channels * constants_.treeLl128PerChannel[generation_][scale_]);
      }
      return facts_.plainTrees ? bus * 0.85 : bus;
    case Algorithm::pat:
      return bus * 0.75;
    case Algorithm::collNetDirect: {
      if (!allReduce) {
        return ranksPerNode_ *
               std::min(toGigabytes(graph.speedIntra), toGigabytes(graph.speedInter) * 0.9);
      }
      // Slower where GPUs share a port.
      double share = ranksPerNode_ / channels;
      share -= (share - 1) / 2;
      return bus / share * (facts_.machine.lowestSm >= 90 ? 0.85 : 1);
    }
    default:
      return bus;
  }
}

double Formulas::algorithmBandwidth(Operation operation, Algorithm algorithm,
                                    Protocol protocol) const {
  if (algorithm == Algorithm::directTree) {
    // Inside nodes first, then between them. Each rank sends all shares but its own twice.
    const double links = toGigabytes(facts_.ring.speedIntra) * facts_.ring.channels;
    const double inside = links * ranksPerNode_ / (2 * (ranksPerNode_ - 1));
    const double outside = algorithmBandwidth(operation, Algorithm::tree, protocol);
    return inside > 0 && outside > 0 ? 1 / (1 / inside + 1 / outside) : 0;
  }
  const double bus = busBandwidth(operation, algorithm, protocol);
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  if (algorithm != Algorithm::ring && scatters) return bus;
  if (algorithm == Algorithm::ring || algorithm == Algorithm::nvls ||
      algorithm == Algorithm::nvlsTree) {
    return bus * facts_.ranks / steps(operation);
  }
  return bus * 0.5;
}

double Formulas::llMax() const {
  // Inside a node by GPU, between nodes by processor.
  const bool amd = facts_.machine.cpuVendor == static_cast<int>(CpuVendor::amd) ||
                   facts_.machine.cpuVendor == MachineFacts::kMixed;
  const size_t row = facts_.nodes == 1 ? generation_ : amd ? 1 : 0;
  return constants_.llMax[row][scale_];
}

double Formulas::proxyLines(const GraphFacts& graph) const {
  constexpr double kOfOneRank = 0.9;
  if (!facts_.network || !facts_.sockets) return std::numeric_limits<double>::max();
  const double ranks = facts_.nodes == 1 ? 1 : std::min<double>(ranksPerNode_, graph.channels);
  return kOfOneRank * ranks;
}

double Formulas::networkOverhead() const {
  if (settings_.netOverheadNs >= 0) return static_cast<double>(settings_.netOverheadNs) * 0.001;
  const bool amd = facts_.machine.cpuArchitecture == static_cast<int>(CpuArchitecture::x86) &&
                   facts_.machine.cpuVendor == static_cast<int>(CpuVendor::amd);
  return amd ? 2.0 : 1.0;
}

double Formulas::latency(Operation operation, Algorithm algorithm, Protocol protocol) const {
  const GraphFacts& graph = graphOf(facts_, algorithm);
  const size_t p = costColumn(protocol);
  const auto hop = [&](size_t hardware, Algorithm of) {
    return constants_.hopLatency[hardware][at(of)][p];
  };
  const size_t inside = graph.typeIntra == static_cast<int>(PathType::nvl) ? kNvlink : kPci;
  const Algorithm row = algorithm == Algorithm::directTree ? Algorithm::tree : algorithm;
  const double base = constants_.baseLatency[at(row)][p];
  double intra = hop(inside, row);
  // With one rank per node nothing hides the network.
  double inter = hop(kNetwork, ranksPerNode_ == 1 ? Algorithm::tree : row);
  const double network = static_cast<double>(graph.latencyInterNs) * 0.001;
  // Simple also flushes, and so does LL128 here: its slots pass by their tails.
  const bool flushes =
      protocol == Protocol::simple || (protocol == Protocol::ll128 && facts_.network);
  inter += flushes ? 2 * network : network;
  const int others = facts_.ranks / facts_.nodes - 1;
  const int levels = log2Floor(static_cast<uint64_t>(facts_.nodes));
  switch (algorithm) {
    case Algorithm::tree:
      return base + 2 * (others * intra + levels * inter);
    case Algorithm::directTree: {
      // A direct launch before the tree and one after it, of small calls inside a node
      // (docs/results/2026-11-22-direct.md).
      constexpr double kDirectUs = 2.5;
      return base + 2 * (kDirectUs + levels * inter);
    }
    case Algorithm::ring: {
      const size_t hardware = facts_.nodes == 1 ? inside : kNetwork;
      if (operation == Operation::broadcast || operation == Operation::reduce) {
        if (graph.sameChannels != 0) return base + hop(hardware, Algorithm::ring);
        const bool simple = protocol == Protocol::simple;
        return base + steps(operation) * hop(hardware, simple ? Algorithm::tree : algorithm);
      }
      double overhead = 0;
      if (facts_.nodes > 1) overhead = networkOverhead() * (protocol == Protocol::simple ? 3 : 1);
      intra = std::max(intra, overhead);
      const int crossings = facts_.nodes == 1                   ? 0
                            : operation == Operation::allReduce ? 2 * (facts_.nodes - 1)
                                                                : facts_.nodes - 1;
      return base + (steps(operation) - crossings) * intra + crossings * inter;
    }
    case Algorithm::collNetDirect:
      return base + 2 * (std::min(1, others) * intra + others * 0.4) + inter;
    case Algorithm::collNetChain:
      return base + 2 * others * intra + inter;
    case Algorithm::nvls:
      return intra + (facts_.nodes > 1 ? inter : 0);
    case Algorithm::nvlsTree:
      return base + intra + 2 * levels * inter;
    case Algorithm::pat:
      return base + levels * (inter / 3.5) + facts_.ranks * 2.8;
    default:
      return 0;
  }
}

}  // namespace unisono::tuning
