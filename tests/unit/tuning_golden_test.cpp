// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "topology/xml.h"
#include "tuning_testing.h"

// The choices on each preset machine and each file of tests/data/topologies, for 1, 2, 8 and 64
// nodes, compared with the text that was checked in. After an intended change run with
// UNISONO_UPDATE_GOLDEN=1 and read the difference.
namespace unisono::tuning {
namespace {

constexpr uint64_t kSmallest = 8, kLargest = uint64_t{16} << 30;
const std::filesystem::path kData(UNISONO_TEST_DATA);

std::string readText(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string sizeText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  while (bytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    unit++;
  }
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

// Why `ours` does not choose what a range has, at the end of the range where it does not; empty if
// it does at both ends.
std::string reasonOf(const CostModel& ours, Operation operation, const ChoiceRange& range) {
  for (const uint64_t bytes : {range.firstBytes, range.lastBytes}) {
    for (const CandidateReport& row : explain(ours, {operation, bytes}).candidates) {
      const bool same = row.algorithm == range.algorithm && row.protocol == range.protocol;
      if (same && !row.chosen) return row.reason;
    }
  }
  return "";
}

// The choices of `model`, and why another model does not make them.
std::string rangesOf(const CostModel& model, const CostModel* ours = nullptr) {
  std::string text;
  for (int o = 0; o < kCollectives; o++) {
    const auto operation = static_cast<Operation>(o);
    for (const ChoiceRange& range : choicesBySize(model, {operation}, kSmallest, kLargest)) {
      text += fmt::format("  {:<14}{:>14} to {:<14} {:<14}{:<8}{:>2} to {:>2} channels",
                          nameOf(operation), sizeText(range.firstBytes), sizeText(range.lastBytes),
                          nameOf(range.algorithm), nameOf(range.protocol), range.firstChannels,
                          range.lastChannels);
      const std::string reason = ours == nullptr ? "" : reasonOf(*ours, operation, range);
      text += reason.empty() ? "\n" : "; here: " + reason + "\n";
    }
  }
  return text;
}

std::string choicesOf(const topology::XmlTopology& file) {
  std::string text =
      "Sizes are the larger of a rank's input and output; float32, sum. \"NCCL\" is the choice "
      "among "
      "NCCL's\nalgorithms by its formulas, with NVLink multicast where Hopper and later GPUs are "
      "on "
      "NVSwitches.\n\"here\" is why this library does not choose the same.\n";
  for (const int nodes : {1, 2, 8, 64}) {
    const topology::Joined joined = testing::joinMachines(file, nodes);
    text += fmt::format("\n{} node{}, {} ranks, {} channels\n", nodes, nodes == 1 ? "" : "s",
                        joined.ranks(), joined.channels());
    if (nodes > 1 && joined.ring().speedInter < 1000) {
      text += "  no network between nodes\n";
      continue;
    }
    ModelInput input;
    input.facts = factsOf(joined);
    setLimits(true, input.facts);
    input.facts.network = nodes > 1;
    const CostModel ours = makeModel(input);
    text += " this library\n" + rangesOf(ours);
    input.registry = &ncclRegistry();
    input.facts = factsOf(joined);
    input.facts.multicast = input.facts.machine.lowestSm >= 90 && input.facts.machine.switches != 0;
    text += " NCCL\n" + rangesOf(makeModel(input), &ours);
  }
  return text;
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, ChoicesAreAsCheckedIn) {
  const std::string name = GetParam();
  const std::filesystem::path file = kData / "topologies" / name;
  const bool isFile = std::filesystem::exists(file);
  const std::string text = choicesOf(isFile ? topology::parseTopologyXml(readText(file), name)
                                            : topology::describeMachine(topology::preset(name)));
  const std::filesystem::path golden = kData / "choices" / (name + ".txt");
  if (std::getenv("UNISONO_UPDATE_GOLDEN")) {
    std::ofstream(golden) << text;
    GTEST_SKIP() << "wrote " << golden;
  }
  EXPECT_EQ(text, readText(golden))
      << "If the change is intended, run this test with UNISONO_UPDATE_GOLDEN=1 and read the "
         "difference";
}

std::vector<std::string> machines() {
  std::vector<std::string> names = topology::presetNames();
  for (const auto& entry : std::filesystem::directory_iterator(kData / "topologies")) {
    if (entry.path().extension() == ".xml") names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string testName(const ::testing::TestParamInfo<std::string>& machine) {
  std::string name = machine.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Machines, Golden, ::testing::ValuesIn(machines()), testName);

}  // namespace
}  // namespace unisono::tuning
