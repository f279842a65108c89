// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "detect/nics.h"
#include "detect/nvml.h"
#include "topology/xml.h"

// Finds out what the machine is made of: sysfs for PCI, CPUs and network ports, NVML for NVLink,
// files for what a virtual machine hides.
namespace unisono::detect {

// A GPU that shall be in the topology.
struct GpuRequest {
  topology::BusId busId = topology::kNoBusId;
  int dev = -1;             // the driver's number for it; -1: NVML's
  int sm = 0;               // compute capability, 90 is 9.0; 0: ask NVML
  int rank = -1;            // of a communicator; -1: none
  std::optional<bool> gdr;  // whether adapters may reach its memory; unset: judged by its class
};

struct DetectRequest {
  std::filesystem::path root = "/";  // of the machine's files
  NvmlSource* nvml = nullptr;        // null: no NVLink and no compute capability is found
  std::vector<GpuRequest> gpus;      // empty: all of NVML's, or all of NVIDIA's that sysfs shows
  std::optional<std::vector<NicPort>> ports;  // unset: findPorts
  std::string topologyFile;  // NCCL_TOPO_FILE; empty: the platform's own below `root`, if any
  std::string dumpFile;      // NCCL_TOPO_DUMP_FILE; empty: no file is written
  uint64_t hostHash = 0;     // 0: the topology names no host
};

struct Detected {
  // Elements and attributes as NCCL writes them, with all oddities in its notes. Only GPUs and
  // ports that were asked for or found, with what is above them.
  topology::XmlTopology topology;
  // By rank (where no ranks were given, by place in the list of GPUs), for PathSettings.
  std::set<std::pair<int, int>> p2pRefused;
};

// Detects the machine. Missing or broken attributes are left out. Throws Error(invalidArgument)
// for a file that is not a topology file or that contradicts the machine, and
// Error(systemError) for a file that cannot be read or written.
Detected detectMachine(const DetectRequest& request);

// Replaces the ports of a machine that is not this one. A port whose adapter it lacks is attached
// to its first CPU.
void replacePorts(topology::XmlNode& system, const std::vector<NicPort>& ports);

// The folder's files that a platform provides, relative to the root.
inline constexpr const char* kPlatformFile = "var/run/nvidia-topologyd/virtualTopology.xml";

// Reads a topology file. Throws Error(systemError) if it cannot be read, and
// Error(invalidArgument) "FILE:LINE: cause" for a bad one.
topology::XmlTopology readTopologyFile(const std::filesystem::path& file);
// Reads a regular file, but at most one byte more than a topology file may have. `what` precedes
// its name in errors: Error(systemError) if it cannot be read, Error(invalidArgument) for a FIFO, a
// device or a socket.
std::string readFile(const std::filesystem::path& file, const std::string& what);
// Throws Error(systemError) if it cannot be written.
void writeFile(const std::filesystem::path& file, const std::string& text);

}  // namespace unisono::detect
