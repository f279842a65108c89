// SPDX-License-Identifier: Apache-2.0
#include "topo_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "base/settings.h"
#include "detect/detect.h"
#include "topo_view.h"
#include "topology/graph_xml.h"
#include "topology/presets.h"
#include "topology/settings.h"

namespace unisono::topo {

namespace {

constexpr int kExitShown = 0, kExitUsage = 2;
constexpr int kMaxNodes = 65536;

// Detects this machine. All its GPUs get ranks, in the driver's order.
topology::XmlTopology detectThis(const TopoOptions& options, const Settings& settings,
                                 topology::PathSettings& rules) {
  // The driver knows only this machine, not one whose files are in a folder.
  std::string problem = "not loaded, because --root names the files of another machine";
  std::unique_ptr<detect::NvmlSource> nvml;
  if (!std::filesystem::is_directory(options.root)) {
    throw invalidUsage("--root: {} is not a directory", options.root)
        .remedy("Name the directory that has the machine's sys and proc.");
  }
  if (options.root == "/") nvml = detect::loadNvml("libnvidia-ml.so.1", problem);
  detect::DetectRequest request;
  request.root = options.root;
  request.nvml = nvml.get();
  request.topologyFile = settings.topologyFile;
  request.dumpFile = settings.topologyDumpFile;
  if (nvml) {
    int rank = 0;
    for (const topology::BusId id : nvml->gpus()) {
      detect::GpuRequest gpu;
      gpu.busId = id;
      gpu.rank = rank++;
      request.gpus.push_back(gpu);
    }
  }
  detect::Detected detected = detect::detectMachine(request);
  if (topology::gpusOf(detected.topology).empty()) {
    throw invalidUsage("no GPU found on this machine{}",
                       nvml ? std::string() : fmt::format(" (NVML: {})", problem))
        .remedy(fmt::format("Show another machine with --file FILE or --preset NAME ({}).",
                            fmt::join(topology::presetNames(), ", ")));
  }
  if (!nvml) {
    detected.topology.notes.push_back(
        fmt::format("NVLink is unknown because NVML is not available ({})", problem));
  }
  rules.p2pRefused = std::move(detected.p2pRefused);
  return std::move(detected.topology);
}

topology::XmlTopology readMachine(const TopoOptions& options, const Settings& settings,
                                  topology::PathSettings& rules) {
  if (!options.file.empty()) return detect::readTopologyFile(options.file);
  if (!options.preset.empty()) return topology::describeMachine(topology::preset(options.preset));
  return detectThis(options, settings, rules);
}

// Errors quote names and values from files.
std::string printableLines(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    result += printable(text.substr(0, end));
    if (end < text.size()) result += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw systemError(errno, "writing to standard output");
  }
}

// The settings that a communicator with this environment would use.
ViewSettings viewSettings(const Settings& settings, int nodes) {
  ViewSettings result;
  result.nodes = nodes;
  result.paths = topology::pathSettingsOf(settings);
  result.search = topology::searchSettingsOf(settings);
  const auto bounded = [](int64_t channels) {
    return static_cast<int>(std::clamp<int64_t>(channels, 1, topology::kMostChannels));
  };
  const ChannelBounds channels = channelBounds(settings);
  if (channels.min > 0) result.join.minChannels = bounded(channels.min);
  if (channels.max > 0) result.join.maxChannels = bounded(channels.max);
  result.graphFile = settings.graphFile;
  if (!settings.graphFile.empty()) {
    result.graphText = detect::readFile(settings.graphFile, "NCCL_GRAPH_FILE");
  }
  return result;
}

// The graph file of the first group of GPUs that reach each other without the network; nearly
// always that is all of them.
std::string graphFileText(const View& view) {
  const Domain& domain = view.domains.front();
  return topology::writeGraphs(topology::namedGraphs(domain.graphs), domain.machine.topology);
}

void show(const TopoOptions& options) {
  const Settings environment = settingsFromEnvironment();
  ViewSettings settings = viewSettings(environment, options.nodes);
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
  const char* machine = "Which machine (default: this one)";
  // An empty name, as from an unset shell variable, would silently mean this machine.
  const auto notEmpty = [](const std::string& text) {
    return text.empty() ? std::string("the name is empty") : std::string();
  };
  CLI::Option* file =
      topo->add_option("FILE,--file", options.file, "The machine in this topology file")
          ->check(notEmpty)
          ->group(machine);
  CLI::Option* preset =
      topo->add_option("--preset", options.preset,
                       fmt::format("One of {}", fmt::join(topology::presetNames(), ", ")))
          ->check(notEmpty)
          ->excludes(file)
          ->group(machine);
  topo->add_option("--nodes", options.nodes, "Machines of this kind in the communicator (1)")
      ->check(CLI::Range(1, kMaxNodes))
      ->group(machine);
  topo->add_option("--root", options.root, "Directory with the machine's sys and proc (/)")
      ->excludes(file)
      ->excludes(preset)
      ->group(machine);

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
