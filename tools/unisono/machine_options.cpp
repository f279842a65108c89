// SPDX-License-Identifier: Apache-2.0
#include "machine_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "detect/detect.h"
#include "topology/presets.h"
#include "topology/settings.h"

namespace unisono::topo {

namespace {

constexpr int kMaxNodes = 65536;

// Detects this machine. All its GPUs get ranks, in the driver's order.
topology::XmlTopology detectThis(const MachineOptions& options, const Settings& settings,
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

}  // namespace

void addMachineOptions(CLI::App& command, MachineOptions& options, const std::string& fileNames) {
  const char* machine = "Which machine (default: this one)";
  // An empty name, as from an unset shell variable, would silently mean this machine.
  const auto notEmpty = [](const std::string& text) {
    return text.empty() ? std::string("the name is empty") : std::string();
  };
  CLI::Option* file =
      command.add_option(fileNames, options.file, "The machine in this topology file")
          ->check(notEmpty)
          ->group(machine);
  CLI::Option* preset =
      command
          .add_option("--preset", options.preset,
                      fmt::format("One of {}", fmt::join(topology::presetNames(), ", ")))
          ->check(notEmpty)
          ->excludes(file)
          ->group(machine);
  command.add_option("--nodes", options.nodes, "Machines of this kind in the communicator (1)")
      ->check(CLI::Range(1, kMaxNodes))
      ->group(machine);
  command.add_option("--root", options.root, "Directory with the machine's sys and proc (/)")
      ->excludes(file)
      ->excludes(preset)
      ->group(machine);
}

topology::XmlTopology readMachine(const MachineOptions& options, const Settings& settings,
                                  topology::PathSettings& rules) {
  if (!options.file.empty()) return detect::readTopologyFile(options.file);
  if (!options.preset.empty()) return topology::describeMachine(topology::preset(options.preset));
  return detectThis(options, settings, rules);
}

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

ViewSettings viewSettings(const Settings& settings, const MachineOptions& options) {
  ViewSettings result;
  result.nodes = options.nodes;
  result.ranksPerNode = options.ranksPerNode;
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

}  // namespace unisono::topo
