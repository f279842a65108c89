// SPDX-License-Identifier: Apache-2.0
#include "call_model.h"

#include <vector>

#include "detect/detect.h"
#include "topology/checks.h"
#include "tuning/settings.h"

namespace unisono::explain {
namespace {

// Whether the GPUs of a machine all map each other's memory.
bool allReach(const topo::View& view) {
  if (view.domains.size() != 1) return false;
  const topology::Machine& machine = view.domains.front().machine;
  const std::vector<int>& gpus = machine.topology.of(topology::NodeType::gpu);
  for (const int a : gpus) {
    for (const int b : gpus) {
      if (a >= b) continue;
      const topology::PeerVerdict verdict =
          topology::checkPeer(machine.topology, machine.paths, machine.settings, a, b);
      if (!verdict.allowed || verdict.through >= 0) return false;
    }
  }
  return true;
}

}  // namespace

tuning::ModelInput modelInputOf(const Settings& settings, const topo::View& view,
                                const Assumptions& assumptions) {
  tuning::ModelInput input;
  input.facts = tuning::factsOf(view.joined);
  input.facts.multicast = assumptions.multicast;
  input.facts.collnet = assumptions.collnet;
  input.allowed = tuning::parseAllowed(settings.algorithm, settings.protocol);
  input.settings = tuning::tuningSettingsOf(settings);
  if (assumptions.asNccl) {
    input.registry = &tuning::ncclRegistry();
    input.measured.clear();
  } else {
    tuning::setLimits(allReach(view), input.facts);
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
