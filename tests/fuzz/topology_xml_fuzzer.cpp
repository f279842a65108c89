#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "base/error.h"
#include "topology/graph_xml.h"
#include "topology/presets.h"
#include "topology/search.h"
#include "topology/validate.h"
#include "topology/xml_merge.h"

// From the text of a topology file to channels. Any text must end in an Error or in valid graphs.
using namespace unisono;
using namespace unisono::topology;

namespace {

// What a file of some kilobytes may describe is small; the bounds keep one run short.
constexpr int kMostGpus = 24, kMostNodes = 200;

[[noreturn]] void report(std::string_view what, const std::string& detail) {
  std::cerr << what << ": " << detail << "\n";
  std::abort();
}

void fuzzTopology(std::string_view text, unsigned choices) {
  const XmlTopology file = parseTopologyXml(text, "fuzz");
  if (writeTopologyXml(parseTopologyXml(writeTopologyXml(file), "again")) != writeTopologyXml(file))
    report("a file changes when it is written and read", writeTopologyXml(file));
  XmlNode merged = file.system;
  mergeTopology(merged, file.system);
  XmlNode again = merged;
  mergeTopology(again, file.system);
  if (writeXml(again) != writeXml(merged))
    report("merging the same twice changes more than once", writeXml(again));
  const Topology topology = buildTopology(file);
  if (topology.of(NodeType::gpu).size() > kMostGpus || topology.nodes.size() > kMostNodes) return;

  PathSettings settings;
  settings.p2pDisable = choices & 1;
  settings.pxnDisable = choices & 2;
  if (choices & 4) settings.p2pLevel = PathType::sys;
  const Machine machine = trimMachine(topology, settings, -1, choices & 8 ? 1 << 20 : 0);
  describeTopology(machine);
  describePaths(machine);
  SearchSettings search;
  search.collnet = choices & 16;
  search.triesSteps = 500;
  search.sameChannelsSteps = 100;
  search.allSteps = 5000;
  const GraphSet graphs = searchGraphs(machine, search);
  std::vector<NamedGraph> named{{GraphId::ring, graphs.ring},
                                {GraphId::tree, graphs.tree},
                                {GraphId::collnetChain, graphs.collnetChain},
                                {GraphId::nvls, graphs.nvls},
                                {GraphId::collnetDirect, graphs.collnetDirect}};
  for (const NamedGraph& graph : named) {
    // The plain chain of the last resort promises nothing about links that are not there.
    if (graph.graph.speedIntra == 100) continue;
    const auto violations = validate(graph.graph, machine);
    if (!violations.empty())
      report(violations.front(), describeGraph(graph.graph, machine.topology));
  }
  const std::string written = writeGraphs(named, machine.topology);
  if (writeGraphs(parseGraphs(written, "again", machine.topology), machine.topology) != written)
    report("graphs change when they are written and read", written);
}

void fuzzGraph(std::string_view text) {
  static const Machine machine(buildTopology(describeMachine(preset("rtx3090-x8"))), {});
  for (const NamedGraph& graph : parseGraphs(text, "fuzz", machine.topology))
    validate(graph.graph, machine);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    fuzzTopology(text, data[0]);
  } catch (const Error&) {
  }
  try {
    fuzzGraph(text);
  } catch (const Error&) {
  }
  return 0;
}
