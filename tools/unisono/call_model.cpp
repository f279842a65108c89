// SPDX-License-Identifier: Apache-2.0
#include "call_model.h"

#include <algorithm>
#include <vector>

#include "detect/detect.h"
#include "plan/message_settings.h"
#include "runtime/runtime.h"
#include "topology/checks.h"
#include "tuning/settings.h"

namespace unisono::explain {
namespace {

// How many blocks a rank may launch at a time: one per multiprocessor of the weakest GPU, unless
// the user wants fewer.
int mostBlocksOf(const Settings& settings, const tuning::ModelInput& input) {
  const int resident = runtime::multiprocessorsOf(input.facts.machine.lowestSm);
  const int64_t most = channelBounds(settings).max;
  return most > 0 ? static_cast<int>(std::min<int64_t>(most, resident)) : resident;
}

plan::MessageFacts messageFactsOf(const Settings& settings, const tuning::ModelInput& input) {
  plan::MessageFacts facts;
  const int resident = runtime::multiprocessorsOf(input.facts.machine.lowestSm);
  facts.fewestChannels = settings.minPeerChannels;
  facts.mostChannels = settings.maxPeerChannels;
  facts.remoteChannelsPerPeer = settings.netPeerChannels;
  facts.residentBlocks = resident;
  facts.mostBlocks = std::min<int64_t>(mostBlocksOf(settings, input), facts.residentBlocks);
  facts.allowed = input.allowed;
  facts.llThreshold = input.settings.p2pLlThreshold;
  facts.measured = measurementsOf(settings).messages;
  facts.sharesNetBuffers = settings.netSharedBuffers;
  return facts;
}

// What messages and calls of the direct family depend on.
plan::CommConfig configOf(const Settings& settings, const plan::MessageFacts& facts,
                          tuning::CommFacts& model) {
  const plan::SlotDefaults& slots = plan::slotDefaults(facts.cuda);
  plan::CommConfig config;
  config.ranks = model.ranks;
  config.slotBytes = {plan::slotBytesOf(settings.llBufferBytes, slots.count, slots.ll),
                      plan::slotBytesOf(settings.ll128BufferBytes, slots.count, slots.ll128),
                      plan::slotBytesOf(settings.bufferBytes, slots.count, slots.simple)};
  static_assert(plan::indexOf(device::Protocol::ll) == 0 &&
                plan::indexOf(device::Protocol::ll128) == 1 &&
                plan::indexOf(device::Protocol::simple) == 2);
  config.directBlocks = model.direct.blocks;
  config.directLineBits = model.reachNode ? tuning::directLineBits(model.maxRanksPerNode) : 0;
  plan::setMessages(facts, config, model);
  return config;
}

// The GPUs of ranks, in their order.
std::vector<int> gpusByRank(const topology::Topology& topology) {
  std::vector<int> gpus = topology.of(topology::NodeType::gpu);
  std::ranges::sort(gpus, {}, [&](int gpu) { return topology.node(gpu).gpu.rank; });
  return gpus;
}

}  // namespace

GpuReach reachOf(const topo::View& view) {
  GpuReach reach;
  for (const auto& domain : view.domains) {
    const topology::Machine& machine = domain.machine;
    const std::vector<int>& gpus = machine.topology.of(topology::NodeType::gpu);
    for (const int a : gpus) {
      for (const int b : gpus) {
        if (a >= b) continue;
        const topology::PeerVerdict verdict =
            topology::checkPeer(machine.topology, machine.paths, machine.settings, a, b);
        if (!verdict.allowed || verdict.through >= 0) reach.node = false;
        if (!verdict.allowed) reach.hostMemory = true;
      }
    }
  }
  return reach;
}

tuning::Measurements measurementsOf(const Settings& settings) {
  if (settings.tuningFile.empty()) return {};
  return tuning::parseMeasurements(detect::readFile(settings.tuningFile, "UNISONO_TUNING_FILE"),
                                   settings.tuningFile);
}

tuning::ModelInput modelInputOf(const Settings& settings, const topo::View& view,
                                const Assumptions& assumptions) {
  tuning::ModelInput input;
  input.facts = tuning::factsOf(view.joined);
  input.facts.multicast = assumptions.multicast;
  input.facts.collnet = assumptions.collnet;
  input.facts.collnetReductions = assumptions.collnetReductions;
  input.facts.collnetAllGather = assumptions.collnetAllGather;
  input.facts.collnetReduceScatter = assumptions.collnetReduceScatter;
  input.allowed = tuning::parseAllowed(settings.algorithm, settings.protocol);
  input.settings = tuning::tuningSettingsOf(settings);
  if (assumptions.asNccl) {
    input.registry = &tuning::ncclRegistry();
    input.measured.clear();
  } else {
    const GpuReach reach = reachOf(view);
    const plan::MessageFacts messages = messageFactsOf(settings, input);
    tuning::setLimits(reach.node, input.facts, mostBlocksOf(settings, input));
    input.facts.slotsOfHost = reach.hostMemory;
    input.facts.network = input.facts.nodes > 1 && assumptions.network;
    input.facts.sockets = assumptions.sockets;
    configOf(settings, messages, input.facts);
  }
  input.measured = tuning::replaceCurves(input.measured, measurementsOf(settings).collectives);
  return input;
}

plan::CommConfig messageConfigOf(const Settings& settings, const topo::View& view,
                                 tuning::ModelInput input) {
  plan::MessageFacts facts = messageFactsOf(settings, input);
  if (input.facts.network) {
    for (int rank = 0; rank < input.facts.ranks; rank++) {
      facts.hosts.push_back(static_cast<uint64_t>(view.joined.nodeOf(rank)));
    }
  }
  plan::CommConfig config = configOf(settings, facts, input.facts);
  config.nodes = plan::nodeRanksOf(view.joined);
  config.model = std::make_shared<tuning::CostModel>(tuning::makeModel(input));
  return config;
}

tuning::MessageLink linkInside(const topo::View& view) {
  tuning::MessageLink link;
  const topology::Machine& machine = view.domains.front().machine;
  const std::vector<int> gpus = gpusByRank(machine.topology);
  if (gpus.size() < 2) return link;
  const bool ofHost = reachOf(view).hostMemory;
  link.kind = ofHost ? tuning::MessageLink::Kind::hostMemory : tuning::MessageLink::Kind::gpuMemory;
  // The slowest of the pairs that send and receive: each rank and the next.
  const topology::Path* slowest = nullptr;
  for (size_t i = 0; i < gpus.size(); i++) {
    const topology::Path& path = machine.path(gpus[i], gpus[(i + 1) % gpus.size()]);
    if (slowest == nullptr || path.bandwidth < slowest->bandwidth) slowest = &path;
  }
  link.nvlink = slowest->type <= topology::PathType::nvb;
  link.gigabytes = topology::toGigabytes(slowest->bandwidth);
  link.rankGigabytes =
      std::max(link.gigabytes, topology::toGigabytes(topology::bandwidthBounds(machine).widestGpu));
  return link;
}

tuning::MessageLink linkBetween(const topo::View& view, const tuning::CommFacts& facts,
                                tuning::MessageOperation operation) {
  tuning::MessageLink link;
  const topology::Machine& machine = view.domains.front().machine;
  const std::vector<int> gpus = gpusByRank(machine.topology);
  if (!facts.network) {
    link.kind = tuning::MessageLink::Kind::hostMemory;
    const int cpu = topology::localCpu(machine.topology, machine.paths, gpus.front());
    if (cpu >= 0) link.gigabytes = topology::toGigabytes(machine.path(gpus.front(), cpu).bandwidth);
    link.rankGigabytes = link.gigabytes;
    return link;
  }
  link.kind = tuning::MessageLink::Kind::network;
  link.sockets = facts.sockets;
  const std::vector<int>& ports = machine.paths.nearest(gpus.front());
  if (ports.empty()) return link;
  link.gigabytes = topology::toGigabytes(machine.path(gpus.front(), ports.front()).bandwidth);
  link.networkUs = machine.topology.node(ports.front()).net.latencyUs;
  link.rankGigabytes = link.gigabytes;
  if (operation == tuning::MessageOperation::allToAll) {
    // All ranks of the node send at the same time, over all ports.
    const auto all = static_cast<double>(machine.topology.of(topology::NodeType::net).size());
    link.rankGigabytes *= std::min(1.0, all / static_cast<double>(gpus.size()));
  }
  return link;
}

}  // namespace unisono::explain
