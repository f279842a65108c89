// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "base/math.h"
#include "plan/plan.h"
#include "tuning/model.h"

// The cost model for tests of plans and protocols: a node of GPUs on an NVSwitch.
namespace unisono::testing {

struct ModelOptions {
  uint64_t minBytesPerChannel = 4096;  // of every algorithm and protocol
  // Rings carry everything that is not forced: with LL up to as much traffic of a connection, with
  // Simple beyond. Without a value the cost model chooses.
  std::optional<uint64_t> lowLatencyTraffic = 0;
  int nodes = 1, ranksPerNode = 0;  // of the largest node; 0: as many on each
  bool collnet = false;
  bool network = false;  // between the nodes
  const char* algorithms = "";
  const char* protocols = "";
};

// Times by which rings carry everything, with LL as far as ModelOptions say.
inline tuning::MeasuredTable ringTimes(int nodes, int ranks, uint64_t lowLatencyTraffic) {
  constexpr uint64_t kLargest = uint64_t{1} << 50;
  constexpr double kFast = 1e3, kUsual = 2e3, kSlow = 4e3;
  tuning::MeasuredTable table;
  for (int o = 0; o < tuning::kCollectives; o++) {
    const auto operation = static_cast<tuning::Operation>(o);
    const auto add = [&](tuning::Algorithm algorithm, tuning::Protocol protocol,
                         std::vector<tuning::MeasuredPoint> points) {
      table.push_back({operation, algorithm, protocol, nodes, ranks, std::move(points)});
    };
    for (int p = 0; p < device::kProtocols; p++) {
      const auto protocol = static_cast<tuning::Protocol>(p);
      add(tuning::Algorithm::tree, protocol, {{0, kSlow}, {kLargest, kSlow}});
    }
    const uint64_t bytes = lowLatencyTraffic / (operation == tuning::Operation::allReduce ? 2 : 1);
    add(tuning::Algorithm::ring, tuning::Protocol::ll,
        {{bytes, kFast}, {bytes + 1, kSlow}, {kLargest, kSlow}});
    add(tuning::Algorithm::ring, tuning::Protocol::ll128, {{0, kSlow}, {kLargest, kSlow}});
    add(tuning::Algorithm::ring, tuning::Protocol::simple, {{0, kUsual}, {kLargest, kUsual}});
  }
  return table;
}

inline tuning::ModelInput modelInputOf(const plan::CommConfig& config,
                                       const ModelOptions& options = {}) {
  tuning::ModelInput input;
  tuning::CommFacts& facts = input.facts;
  facts.ranks = config.ranks;
  facts.nodes = options.nodes;
  facts.maxRanksPerNode =
      options.ranksPerNode > 0 ? options.ranksPerNode : ceilDivide(config.ranks, options.nodes);
  facts.channels = config.channels;
  facts.ring.channels = facts.tree.channels = config.channels;
  facts.ring.typeIntra = facts.tree.typeIntra = static_cast<int>(topology::PathType::nvl);
  facts.ring.typeInter = facts.tree.typeInter = static_cast<int>(topology::PathType::pix);
  facts.ring.speedIntra = facts.tree.speedIntra = 30'000;
  facts.machine.lowestSm = facts.machine.highestSm = 90;
  facts.machine.switches = 1;
  facts.chunkBytes = plan::chunkBytesOf(config);
  facts.collnet = options.collnet;
  facts.network = options.network;
  if (options.network) facts.ring.speedInter = facts.tree.speedInter = 20'000;
  facts.collnetChain = facts.collnetDirect = facts.ring;
  facts.multicast = config.multicast.channels > 0;
  facts.nvlsChannels = config.multicast.channels;
  facts.nvlsHeads = config.multicast.heads;
  facts.collnetHeads = config.collnetDirect.heads;
  facts.collnetDirect.speedInter = facts.collnetDirect.speedIntra;
  facts.nvls = facts.ring;
  facts.nvls.channels = config.ranks;
  facts.nvls.speedInter = facts.nvls.speedIntra;
  facts.reachNode = config.directLineBits > 0;
  facts.reachAll = facts.reachNode && options.nodes == 1;
  if (facts.reachNode) facts.direct = tuning::directLimits(config.directLineBits);
  facts.wide = config.wide;
  if (config.wide.blocks == 0) {
    facts.direct.shareBytes[static_cast<size_t>(device::Protocol::ll128)] = 0;
  }
  if (options.lowLatencyTraffic) {
    input.measured = tuning::replaceCurves(
        input.measured, ringTimes(options.nodes, config.ranks, *options.lowLatencyTraffic));
  }
  input.allowed = tuning::parseAllowed(options.algorithms, options.protocols);
  input.settings.thresholds.fill(
      static_cast<int64_t>(options.minBytesPerChannel / device::kWorkerThreads));
  return input;
}

// Sets the model of a config whose other fields are complete.
inline void setModel(plan::CommConfig& config, const ModelOptions& options = {}) {
  config.model =
      std::make_shared<tuning::CostModel>(tuning::makeModel(modelInputOf(config, options)));
}

}  // namespace unisono::testing
