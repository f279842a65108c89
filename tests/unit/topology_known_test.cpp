// SPDX-License-Identifier: Apache-2.0
// What NCCL 2.28.9 chose on machines that this repository has.
#include <gtest/gtest.h>

#include "topology/presets.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

// Channels times speed in MB/s, inside the machine on one node and to the network on two.
struct Known {
  const char* machine;
  int nodes;
  Bandwidth ring, tree, nvls;
};

// docs/results/topology_2026-11-21.md says where NCCL's values come from.
TEST(KnownMachines, CarryAtLeastWhatNcclFinds) {
  for (const Known& known : {
           Known{"dgx-h100", 1, 360'000, 360'000, 320'000},
           Known{"dgx-h100", 2, 384'000, 384'000, 384'000},
           Known{"hgx-h200x4", 1, 360'000, 360'000, 240'000},
           Known{"hgx-h200x8", 1, 360'000, 360'000, 320'000},
           Known{"hgx-b200x8", 1, 720'000, 640'000, 640'000},
           Known{"dgx-a100", 1, 240'000, 240'000, 0},
           Known{"dgx-a100", 2, 192'000, 192'000, 0},
           Known{"dgx1-v100", 1, 120'000, 120'000, 0},
           Known{"dgx1-v100", 2, 48'000, 48'000, 0},
           Known{"rtx3090-x8", 1, 10'000, 10'000, 0},
           Known{"rtx3090-x8", 2, 7'000, 7'000, 0},
           Known{"gh200-x4", 1, 360'000, 360'000, 0},
           Known{"scale-16x16", 1, 360'000, 360'000, 320'000},
           Known{"scale-16x16", 2, 384'000, 384'000, 640'000},
           Known{"h800x8-vm", 2, 160'000, 176'000, 140'000},
       }) {
    SCOPED_TRACE(::testing::Message() << known.machine << ", " << known.nodes << " nodes");
    const XmlTopology file =
        std::string_view(known.machine) == "h800x8-vm"
            ? parseTopologyXml(testing::ownTopology("h800x8-vm.detected.xml"), known.machine)
            : describeMachine(preset(known.machine));
    const int gpus = static_cast<int>(gpusOf(file).size());
    const GraphSet graphs = searchGraphs(testing::machineOf(file, known.nodes * gpus), {});
    const auto total = [&](const ChannelGraph& graph) {
      return known.nodes > 1 ? graph.totalInter() : graph.totalIntra();
    };
    EXPECT_GE(total(graphs.ring), known.ring);
    EXPECT_GE(total(graphs.tree), known.tree);
    EXPECT_GE(total(graphs.nvls), known.nvls);
  }
}

}  // namespace
}  // namespace unisono::topology
