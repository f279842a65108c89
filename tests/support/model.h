// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/math.h"
#include "plan/plan.h"
#include "tuning/model.h"

// The cost model for tests of plans and protocols: a node of GPUs on an NVSwitch.
namespace unisono::testing {

struct ModelOptions {
  uint64_t minBytesPerChannel = 4096;  // of every algorithm and protocol
  uint64_t lowLatencyTraffic = 0;      // LL is only forced
  int nodes = 1, ranksPerNode = 0;     // of the largest node; 0: as many on each
  bool collnet = false;
  bool network = false;  // between the nodes
  const char* algorithms = "";
  const char* protocols = "";
};

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
  facts.lowLatencyTraffic = options.lowLatencyTraffic;
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
  facts.reachAll = config.directLineBits > 0;
  if (facts.reachAll) facts.direct = tuning::directLimits(config.directLineBits);
  facts.wide = config.wide;
  if (config.wide.blocks == 0) {
    facts.direct.shareBytes[static_cast<size_t>(device::Protocol::ll128)] = 0;
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
