// SPDX-License-Identifier: Apache-2.0
// topology_table [--before OLD] [FILE...]: the channels of every preset, of the topology files and
// of 300 generated layouts, on one node and on two, as tab-separated lines. With --before, where
// OLD is such a list, the comparison as Markdown: presets and files in full, generated layouts as
// counts and the rows that changed.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/error.h"
#include "topology/presets.h"
#include "topology/search.h"
#include "topology_layouts.h"

namespace unisono::topology {
namespace {

constexpr unsigned kSeed = 20261121;
constexpr size_t kLayouts = 300;
constexpr size_t kGraphs = 3;
constexpr const char* kGraphNames[kGraphs] = {"ring", "tree", "nvls"};

struct Row {
  std::string machine;
  int nodes = 1;
  std::string cells[kGraphs];
};

std::string cellOf(const ChannelGraph& graph) {
  if (graph.channels.empty()) return "-";
  return fmt::format("{} x {:g}/{:g} {}/{}", graph.channels.size(), toGigabytes(graph.speedIntra),
                     toGigabytes(graph.speedInter), nameOf(graph.typeIntra),
                     nameOf(graph.typeInter));
}

// Channels times speed: to the network where there are two nodes.
double totalOf(const std::string& cell, int nodes) {
  double channels = 0, intra = 0, inter = 0;
  if (std::sscanf(cell.c_str(), "%lf x %lf/%lf", &channels, &intra, &inter) != 3) return 0;
  return channels * (nodes > 1 ? inter : intra);
}

void addRows(const XmlTopology& file, const std::string& name, std::vector<Row>& rows) {
  const Topology topology = buildTopology(file);
  const int gpus = static_cast<int>(topology.of(NodeType::gpu).size());
  for (const int nodes : {1, 2}) {
    const GraphSet graphs = searchGraphs(trimMachine(topology, {}, -1, nodes * gpus), {});
    rows.push_back({name, nodes, {cellOf(graphs.ring), cellOf(graphs.tree), cellOf(graphs.nvls)}});
  }
}

std::string readText(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<Row> namedRows(const std::vector<std::string>& files) {
  std::vector<Row> rows;
  for (const std::string& name : presetNames()) {
    addRows(describeMachine(preset(name)), name, rows);
  }
  for (const std::string& file : files) {
    const std::string name = std::filesystem::path(file).filename().string();
    try {
      addRows(parseTopologyXml(readText(file), name), name, rows);
    } catch (const Error& error) {
      std::fprintf(stderr, "left out: %s\n", error.what());
    }
  }
  return rows;
}

std::vector<Row> generatedRows() {
  std::vector<Row> rows;
  for (const testing::Layout& layout : testing::sampleLayouts(kSeed, kLayouts)) {
    addRows(describeMachine(testing::describe(layout)), testing::nameOf(layout), rows);
  }
  return rows;
}

using Before = std::map<std::pair<std::string, int>, Row>;

Before readBefore(const std::string& file) {
  Before before;
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    Row row;
    std::string nodes;
    std::getline(fields, row.machine, '\t');
    std::getline(fields, nodes, '\t');
    for (std::string& cell : row.cells) std::getline(fields, cell, '\t');
    row.nodes = std::stoi(nodes);
    before[{row.machine, row.nodes}] = row;
  }
  return before;
}

void printComparison(const std::vector<Row>& rows, const Before& before, bool onlyChanges) {
  std::printf("| machine | nodes | ring | tree | nvls |\n|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    const Row& old = before.at({row.machine, row.nodes});
    std::string line = fmt::format("| {} | {} |", row.machine, row.nodes);
    bool changed = false;
    for (size_t i = 0; i < kGraphs; i++) {
      if (row.cells[i] == old.cells[i]) {
        line += fmt::format(" {} |", onlyChanges ? "=" : row.cells[i]);
        continue;
      }
      changed = true;
      line += fmt::format(" {} → **{}** |", old.cells[i], row.cells[i]);
    }
    if (changed || !onlyChanges) std::printf("%s\n", line.c_str());
  }
}

void printCounts(const std::vector<Row>& rows, const Before& before) {
  std::printf(
      "| nodes | graph | equal | higher total | lower total | same total, otherwise "
      "different |\n|---|---|---|---|---|---|\n");
  for (const int nodes : {1, 2}) {
    for (size_t i = 0; i < kGraphs; i++) {
      int equal = 0, higher = 0, lower = 0, other = 0;
      for (const Row& row : rows) {
        if (row.nodes != nodes) continue;
        const std::string& old = before.at({row.machine, row.nodes}).cells[i];
        const double now = totalOf(row.cells[i], nodes), then = totalOf(old, nodes);
        int& count = row.cells[i] == old ? equal : now > then ? higher : now < then ? lower : other;
        count++;
      }
      std::printf("| %d | %s | %d | %d | %d | %d |\n", nodes, kGraphNames[i], equal, higher, lower,
                  other);
    }
  }
}

void run(const std::vector<std::string>& arguments) {
  const bool compares = arguments.size() >= 2 && arguments[0] == "--before";
  const std::vector<Row> named =
      namedRows({arguments.begin() + (compares ? 2 : 0), arguments.end()});
  const std::vector<Row> generated = generatedRows();
  if (!compares) {
    for (const auto* rows : {&named, &generated}) {
      for (const Row& row : *rows) {
        std::printf("%s\t%d\t%s\t%s\t%s\n", row.machine.c_str(), row.nodes, row.cells[0].c_str(),
                    row.cells[1].c_str(), row.cells[2].c_str());
      }
    }
    return;
  }
  const Before before = readBefore(arguments[1]);
  std::printf("## Presets and files\n\n");
  printComparison(named, before, false);
  std::printf("\n## %zu generated layouts (seed %u): counts\n\n", kLayouts, kSeed);
  printCounts(generated, before);
  std::printf("\n## Generated layouts that changed\n\n");
  printComparison(generated, before, true);
}

}  // namespace
}  // namespace unisono::topology

int main(int argc, char** argv) {
  unisono::topology::run({argv + 1, argv + argc});
}
