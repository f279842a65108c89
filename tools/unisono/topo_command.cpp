// SPDX-License-Identifier: Apache-2.0
#include "topo_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/error.h"
#include "base/settings.h"
#include "detect/detect.h"
#include "topo_view.h"
#include "topology/graph_xml.h"

namespace unisono::topo {

namespace {

constexpr int kExitShown = 0, kExitUsage = 2;

// The graph file of the first group of GPUs that reach each other without the network; nearly
// always that is all of them.
std::string graphFileText(const View& view) {
  const Domain& domain = view.domains.front();
  return topology::writeGraphs(topology::namedGraphs(domain.graphs), domain.machine.topology);
}

void show(const TopoOptions& options) {
  const Settings environment = settingsFromEnvironment();
  ViewSettings settings = viewSettings(environment, options);
  const topology::XmlTopology file = readMachine(options, environment, settings.paths);
  // Written before the search, so that a machine that the search refuses can be inspected.
  if (!options.dumpFile.empty()) {
    detect::writeFile(options.dumpFile, topology::writeTopologyXml(file));
  }
  const View view = makeView(file, settings);
  const JoinedPart joined = options.noJoined ? JoinedPart::hide : JoinedPart::show;
  if (!options.svgFile.empty()) {
    detect::writeFile(options.svgFile, svgText(view, options.svgPattern));
  }
  if (!options.graphFile.empty()) detect::writeFile(options.graphFile, graphFileText(view));
  if (!options.jsonFile.empty() && options.jsonFile != "-") {
    detect::writeFile(options.jsonFile, jsonText(view, joined));
  }
  if (options.why.size() == 2) {
    print(whyText(view, options.why[0], options.why[1]));
  } else {
    print(options.jsonFile == "-" ? jsonText(view, joined) : treeText(view, joined));
  }
}

}  // namespace

CLI::App* addTopoCommand(CLI::App& app, TopoOptions& options) {
  CLI::App* topo = app.add_subcommand("topo",
                                      "Show the topology of a machine: its tree, its paths and its "
                                      "channels, as a communicator with "
                                      "the NCCL_* variables of this environment sees them. Exit "
                                      "status: 0 shown, 2 wrong options or "
                                      "an unusable file");
  addMachineOptions(*topo, options, "FILE,--file");

  const char* output = "Output (default: text)";
  topo->add_option("--why", options.why,
                   "Explain the path from A to B, for example: --why GPU/0 NET/1")
      ->expected(2)
      ->type_name("A B")
      ->group(output);
  topo->add_option("--json", options.jsonFile, "Write JSON to this file or to standard output")
      ->expected(0, 1)
      ->default_str("-")
      ->group(output);
  topo->add_flag("--no-joined", options.noJoined,
                 "Leave out the channels of the whole communicator, which are long for many nodes")
      ->group(output);
  CLI::Option* svg =
      topo->add_option("--svg", options.svgFile, "Draw the machine and its channels to this file")
          ->group(output);
  topo->add_option("--pattern", options.svgPattern,
                   "Channels to draw: ring, tree, collnet_chain, collnet_direct, nvls (ring)")
      ->needs(svg)
      ->group(output);
  topo->add_option("--dump", options.dumpFile, "Write the topology file (NCCL's format)")
      ->group(output);
  topo->add_option("--graphs", options.graphFile, "Write the graph file (NCCL's format)")
      ->group(output);
  return topo;
}

int runTopo(const TopoOptions& options) {
  try {
    show(options);
    return kExitShown;
  } catch (const Error& error) {
    fmt::print(stderr, "unisono topo: {}\n", printableLines(error.what()));
    return kExitUsage;
  }
}

}  // namespace unisono::topo
