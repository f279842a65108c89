// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "topology/presets.h"
#include "tuning/choice.h"

namespace unisono::tuning::testing {

// Fails unless `call` throws an error of wrong usage whose text has `part`.
template <typename Call>
void expectRefused(Call call, const std::string& input, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << input << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// The channels of a communicator of all GPUs of `nodes` machines.
inline topology::Joined joinMachines(const topology::XmlTopology& file, int nodes) {
  const topology::Topology whole = topology::buildTopology(file);
  const int gpus = static_cast<int>(whole.of(topology::NodeType::gpu).size());
  const topology::Machine machine = topology::trimMachine(whole, {}, -1, nodes * gpus);
  const topology::GraphSet graphs = topology::searchGraphs(machine, {});
  const topology::Topology& topology = machine.topology;
  std::vector<std::vector<int>> ranksOf(topology.nodes.size());
  for (const int gpu : topology.of(topology::NodeType::gpu)) {
    ranksOf[static_cast<size_t>(gpu)] = {topology.node(gpu).gpu.rank};
  }
  std::vector<topology::RankPlace> places;
  for (int node = 0; node < nodes; node++) {
    for (int rank = 0; rank < gpus; rank++) {
      places.push_back(topology::placeOf(graphs, ranksOf, rank, static_cast<uint64_t>(node)));
      places.back().machine = topology::machineFactsOf(topology);
    }
  }
  return topology::join(places, {});
}

// The model of `nodes` preset machines whose GPUs all reach each other.
inline ModelInput inputOf(const std::string& preset, int nodes) {
  ModelInput input;
  input.facts = factsOf(joinMachines(topology::describeMachine(topology::preset(preset)), nodes));
  setLimits(true, input.facts);
  return input;
}

}  // namespace unisono::tuning::testing
