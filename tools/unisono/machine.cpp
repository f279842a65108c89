// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/settings.h"

namespace unisono::bench {
namespace {

std::string chooseBackend(const BenchOptions& options) {
  if (!options.backend.empty()) return options.backend;
  if (!options.topologyFile.empty() || options.nodes > 1) return "host";
  if (std::string backend = settingsFromEnvironment().backend; !backend.empty()) {
    return backend;
  }
  try {
    if (createCudaDeviceApi()->deviceCount() > 0) return "cuda";
  } catch (const Error&) {
    // No CUDA in this program, no driver or no GPU: use simulated ones.
  }
  return "host";
}

}  // namespace

void setEnvironment(const BenchOptions& options, int node) {
  if (!options.topologyFile.empty()) {
    std::string path = std::filesystem::absolute(options.topologyFile).string();
    if (!std::filesystem::exists(path)) {
      throw UsageError(fmt::format("--topo: file not found: {}", path));
    }
    ::setenv("UNISONO_HOST_TOPOLOGY", path.c_str(), 1);
  }
  if (options.nodes > 1) {
    ::setenv("NCCL_HOSTID", fmt::format("unisono-bench-node-{}", node).c_str(), 1);
  }
}

std::vector<Side> loadSides(const BenchOptions& options, std::string* backend) {
  *backend = chooseBackend(options);
  if (*backend != "cuda" && options.graphLaunches > 0) {
    throw UsageError("-G: graphs need --backend cuda");
  }
  ::setenv("UNISONO_BACKEND", backend->c_str(), 1);
  std::vector<Side> sides;
  for (const std::string& path : {options.library, options.against}) {
    if (path.empty()) continue;
    Side side;
    side.library = std::make_unique<Library>(path);
    side.device = *backend == "cuda" ? createCudaDeviceApi() : createHostDeviceApi(*side.library);
    sides.push_back(std::move(side));
  }
  return sides;
}

BenchMachine describe(const std::vector<Side>& sides, const std::string& backend) {
  BenchMachine machine;
  machine.backend = backend;
  machine.libraryPath = sides[0].library->path();
  machine.libraryVersion = sides[0].library->versionText();
  if (sides.size() > 1) {
    machine.otherPath = sides[1].library->path();
    machine.otherVersion = sides[1].library->versionText();
  }
  int devices = sides[0].device->deviceCount();
  for (int device = 0; device < devices; device++) {
    machine.deviceNames.push_back(sides[0].device->deviceName(device));
  }
  if (devices == 0) {
    throw invalidUsage("the backend {} has no devices", backend)
        .remedy("Use --backend host to simulate GPUs");
  }
  return machine;
}

std::string toText(const BenchMachine& machine) {
  return nlohmann::json{machine.backend,        machine.deviceNames, machine.libraryPath,
                        machine.libraryVersion, machine.otherPath,   machine.otherVersion}
      .dump();
}

BenchMachine machineFromText(const std::string& text) {
  nlohmann::json json = nlohmann::json::parse(text);
  BenchMachine machine;
  json.at(0).get_to(machine.backend);
  json.at(1).get_to(machine.deviceNames);
  json.at(2).get_to(machine.libraryPath);
  json.at(3).get_to(machine.libraryVersion);
  json.at(4).get_to(machine.otherPath);
  json.at(5).get_to(machine.otherVersion);
  return machine;
}

std::vector<LocalRank> Placement::ranksOf(int worker) const {
  const int process = worker / threads;
  const int thread = worker % threads;
  int firstDevice = processPerGpu ? process % processesPerNode : thread * gpus;
  if (oneMachine) firstDevice += nodeOf(process) * processesPerNode * threads * gpus;
  std::vector<LocalRank> result;
  for (int gpu = 0; gpu < gpus; gpu++) {
    result.push_back({worker * gpus + gpu, (firstDevice + gpu) % devices});
  }
  return result;
}

Placement place(const BenchOptions& options, const BenchMachine& machine, bool shareDevices) {
  Placement placement;
  placement.nodes = options.nodes;
  placement.threads = options.threads;
  placement.devices = static_cast<int>(machine.deviceNames.size());
  placement.processPerGpu = options.processPerGpu;
  placement.oneMachine = machine.backend == "cuda";
  const int devices = placement.devices / (placement.oneMachine ? options.nodes : 1);  // of a node
  int gpus = options.gpusPerThread;
  if (gpus == 0) gpus = std::max(devices / options.threads, 1);
  const int64_t perNode = int64_t{gpus} * options.threads;
  if (perNode > devices && !shareDevices) {
    throw UsageError(
        fmt::format("-t {} and -g {} need {} GPUs per node, but there are {}; use fewer, or set "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 to let ranks share a GPU",
                    options.threads, gpus, perNode, devices));
  }
  if (perNode * options.nodes > 65536) {
    throw UsageError(
        fmt::format("{} ranks are too many; the limit is 65536", perNode * options.nodes));
  }
  placement.gpus = options.processPerGpu ? 1 : gpus;
  placement.processesPerNode = options.processPerGpu ? gpus : 1;
  if (options.root >= placement.ranks()) {
    throw UsageError(
        fmt::format("-r: no rank {}; it must be from 0 to {}, or -1 for each rank in turn",
                    options.root, placement.ranks() - 1));
  }
  return placement;
}

}  // namespace unisono::bench
