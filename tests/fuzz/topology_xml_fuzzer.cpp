// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "topology/graph_xml.h"
#include "topology/join.h"
#include "topology/presets.h"
#include "topology/search.h"
#include "topology/validate.h"
#include "topology/xml_merge.h"

// From the text of a topology or graph file to the joined channels of a communicator. Any text must
// end in an Error, or in valid graphs and in rings and trees that reach every rank once.
using namespace unisono;
using namespace unisono::topology;

namespace {

// What a file of some kilobytes may describe is small; the bounds keep one run short.
constexpr int kMostGpus = 24, kMostNodes = 200;

[[noreturn]] void report(std::string_view what, const std::string& detail) {
  std::cerr << what << ": " << detail << "\n";
  std::abort();
}

// An internal error would mean that the reader let through what the rest cannot work with.
void expectFileError(const Error& error) {
  if (error.code() == ErrorCode::internalError) report("internal error", error.what());
}

const Machine& knownMachine() {
  static const Machine machine(buildTopology(describeMachine(preset("rtx3090-x8"))), {});
  return machine;
}

// The ranks of one more node, as they come out of its graphs.
void addNode(std::vector<RankPlace>& places, const Machine& machine, const GraphSet& graphs) {
  const size_t node = places.size();
  std::vector<std::vector<int>> ranksOf(machine.topology.nodes.size());
  int ranks = 0;
  for (const int gpu : machine.topology.of(NodeType::gpu)) {
    ranksOf[static_cast<size_t>(gpu)] = {ranks++};
  }
  for (int rank = 0; rank < ranks; rank++) places.push_back(placeOf(graphs, ranksOf, rank, node));
}

void checkJoined(const Joined& joined) {
  const size_t ranks = static_cast<size_t>(joined.ranks());
  for (int channel = 0; channel < joined.channels(); channel++) {
    std::vector<bool> inRing(ranks, false);
    int rank = 0;
    for (size_t step = 0; step < ranks; step++) {
      inRing[static_cast<size_t>(rank)] = true;
      rank = joined.ringNext(channel, rank);
    }
    if (rank != 0 || std::find(inRing.begin(), inRing.end(), false) != inRing.end()) {
      report("a ring does not visit every rank once", std::to_string(channel));
    }

    std::vector<int> reached;
    for (rank = 0; rank < joined.ranks(); rank++) {
      if (joined.treePlace(channel, rank).up < 0) reached.push_back(rank);
    }
    for (size_t i = 0; i < reached.size() && reached.size() <= ranks; i++) {
      for (const int below : joined.treePlace(channel, reached[i]).down) {
        if (joined.treePlace(channel, below).up != reached[i]) {
          report("a tree has a child of another parent", std::to_string(below));
        }
        reached.push_back(below);
      }
    }
    if (reached.size() != ranks || joined.treePlace(channel, reached.front()).up >= 0) {
      report("a tree does not reach every rank once", std::to_string(channel));
    }
  }
  for (size_t head = 0; head < joined.nvlsHeads().size(); head++) {
    for (const int rank : joined.nvlsHeads()[head]) {
      for (const int below : joined.nvlsTreePlace(static_cast<int>(head), 0, rank).down) {
        if (joined.nvlsTreePlace(static_cast<int>(head), 0, below).up != rank) {
          report("a tree of NVLS heads has a child of another parent", std::to_string(below));
        }
      }
    }
  }
}

// Three nodes with these channels, and one of another kind.
void fuzzJoin(const Machine& machine, const GraphSet& graphs) {
  static const GraphSet knownGraphs = searchGraphs(knownMachine(), {});
  std::vector<RankPlace> places;
  addNode(places, machine, graphs);
  checkJoined(join(places, {}));
  addNode(places, machine, graphs);
  addNode(places, knownMachine(), knownGraphs);
  addNode(places, machine, graphs);
  const Joined joined = join(places, {});
  checkJoined(joined);
  if (!firstDifference(hashOf(joined), hashOf(join(places, {}))).empty()) {
    report("joining twice gives two answers", "");
  }
}

void fuzzTopology(std::string_view text, unsigned choices) {
  const XmlTopology file = parseTopologyXml(text, "fuzz");
  if (writeTopologyXml(parseTopologyXml(writeTopologyXml(file), "again")) !=
      writeTopologyXml(file)) {
    report("a file changes when it is written and read", writeTopologyXml(file));
  }
  XmlNode merged = file.system;
  mergeTopology(merged, file.system);
  XmlNode again = merged;
  mergeTopology(again, file.system);
  if (writeXml(again) != writeXml(merged)) {
    report("merging the same twice changes more than once", writeXml(again));
  }
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
  search.speedSteps = 500;
  const GraphSet graphs = searchGraphs(machine, search);
  const std::vector<NamedGraph> named = namedGraphs(graphs);
  for (const NamedGraph& graph : named) {
    // The plain chain of the last resort promises nothing about links that are not there.
    if (graph.graph.speedIntra == 1) continue;
    const auto violations = validate(graph.graph, machine);
    if (!violations.empty()) {
      report(violations.front(), describeGraph(graph.graph, machine.topology));
    }
  }
  const std::string written = writeGraphs(named, machine.topology);
  if (writeGraphs(parseGraphs(written, "again", machine.topology), machine.topology) != written) {
    report("graphs change when they are written and read", written);
  }
  fuzzJoin(machine, graphs);
}

void fuzzGraph(std::string_view text) {
  const Machine& machine = knownMachine();
  SearchSettings search;
  search.given = parseGraphs(text, "fuzz", machine.topology);
  for (const NamedGraph& graph : search.given) validate(graph.graph, machine);
  search.triesSteps = 500;
  search.sameChannelsSteps = 100;
  search.speedSteps = 500;
  fuzzJoin(machine, searchGraphs(machine, search));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    fuzzTopology(text, data[0]);
  } catch (const Error& error) {
    expectFileError(error);
  }
  try {
    fuzzGraph(text);
  } catch (const Error& error) {
    expectFileError(error);
  }
  return 0;
}
