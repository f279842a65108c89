// SPDX-License-Identifier: Apache-2.0
#include "call_model.h"

#include <vector>

#include "detect/detect.h"
#include "topology/checks.h"
#include "tuning/settings.h"

namespace unisono::explain {
namespace {

// How the GPUs of a machine reach each other.
struct GpuReach {
  bool all = true;          // all map each other's memory
  bool hostMemory = false;  // some exchange data through memory of the host
};

GpuReach reachOf(const topo::View& view) {
  GpuReach reach;
  reach.all = view.domains.size() == 1;
  for (const auto& domain : view.domains) {
    const topology::Machine& machine = domain.machine;
    const std::vector<int>& gpus = machine.topology.of(topology::NodeType::gpu);
    for (const int a : gpus) {
      for (const int b : gpus) {
        if (a >= b) continue;
        const topology::PeerVerdict verdict =
            topology::checkPeer(machine.topology, machine.paths, machine.settings, a, b);
        if (!verdict.allowed || verdict.through >= 0) reach.all = false;
        if (!verdict.allowed) reach.hostMemory = true;
      }
    }
  }
  return reach;
}

}  // namespace

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
    tuning::setLimits(reach.all, input.facts);
    input.facts.slotsOfHost = reach.hostMemory;
    input.facts.network = input.facts.nodes > 1 && assumptions.network;
    input.facts.sockets = assumptions.sockets;
  }
  if (!settings.tuningFile.empty()) {
    input.measured = tuning::replaceCurves(
        input.measured,
        tuning::parseMeasurements(detect::readFile(settings.tuningFile, "UNISONO_TUNING_FILE"),
                                  settings.tuningFile));
  }
  return input;
}

}  // namespace unisono::explain
