// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "topology/presets.h"
#include "topology/search.h"
#include "topology_testing.h"

// What the layer says of each preset machine, compared with the text that was checked in. After an
// intended change run with UNISONO_UPDATE_GOLDEN=1 and read the difference.
namespace unisono::topology {
namespace {

std::string wholeText(const XmlTopology& file) {
  const Machine machine = trimMachine(buildTopology(file), {}, -1, 0);
  const GraphSet graphs = searchGraphs(machine, {});
  std::string text = describeTopology(machine) + "\n" + describePaths(machine) + "\n";
  for (const ChannelGraph* graph : {&graphs.ring, &graphs.tree, &graphs.nvls}) {
    text += describeGraph(*graph, machine.topology);
  }
  return text;
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, IsAsCheckedIn) {
  const std::string name = GetParam();
  const bool own = name == "h800x8-vm";
  const std::string text =
      wholeText(own ? parseTopologyXml(testing::ownTopology("h800x8-vm.detected.xml"), name)
                    : describeMachine(preset(name)));
  const std::filesystem::path path =
      std::filesystem::path(UNISONO_TEST_DATA) / "topologies" / "golden" / (name + ".txt");
  if (std::getenv("UNISONO_UPDATE_GOLDEN")) {
    std::ofstream(path) << text;
    GTEST_SKIP() << "wrote " << path;
  }
  EXPECT_EQ(text, testing::readFile(path));
}

std::vector<std::string> machines() {
  std::vector<std::string> names = presetNames();
  names.emplace_back("h800x8-vm");
  return names;
}

std::string testName(const ::testing::TestParamInfo<std::string>& machine) {
  std::string name = machine.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Machines, Golden, ::testing::ValuesIn(machines()), testName);

}  // namespace
}  // namespace unisono::topology
