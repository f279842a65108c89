// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "topology/bandwidth.h"
#include "topology/types.h"
#include "topology/xml.h"

namespace unisono::topology {

struct Link {
  LinkType type = LinkType::local;
  Bandwidth bandwidth = 0;  // in this direction; the other direction is a link of the other node
  int to = -1;              // index of the node it leads to
};

struct GpuInfo {
  int dev = -1;      // number on its host
  int rank = -1;     // -1: no rank of this communicator
  int sm = 0;        // compute capability, 90 is 9.0
  bool gdr = false;  // the driver offers GPUDirect RDMA
};

struct PciInfo {
  uint64_t device = 0;  // vendor << 48 | device << 32 | subsystem vendor << 16 | device
};

struct CpuInfo {
  int numa = -1;
  CpuArchitecture architecture = CpuArchitecture::unknown;
  CpuVendor vendor = CpuVendor::unknown;
  int family = -1;
  int model = -1;
  std::string affinity;  // hexadecimal words separated by commas, the last holds core 0
};

struct NetInfo {
  int dev = -1;
  std::string name;
  uint64_t guid = 0;  // of the adapter; ports of one adapter share it. 0 in the file: its dev
  int port = 0;
  Bandwidth bandwidth = 0;
  double latencyUs = 0;
  bool gdr = false;
  bool collective = false;  // the network reduces (CollNet)
  int maxConnections = 0;
};

// A vertex of the machine. Only the part of its own type is meaningful.
struct Node {
  NodeType type = NodeType::gpu;
  int host = 0;    // index into Topology::hosts
  int64_t id = 0;  // bus id; NUMA node of a CPU; dev of a NET; 0 for the NVSwitches
  GpuInfo gpu;
  PciInfo pci;
  CpuInfo cpu;
  NetInfo net;
  std::vector<Link> links;  // the widest first, then by node
};

// A machine, or several that share NVLink, as a graph. All NVSwitches are one node. Nodes are in
// a fixed order (type, host, id) that does not depend on the order of the file.
struct Topology {
  std::vector<uint64_t> hosts;  // host hashes; one 0 if the file names none
  std::vector<Node> nodes;
  std::array<std::vector<int>, kNodeTypes> byType;  // indices of the nodes of each type, in order
  std::vector<std::string> notes;                   // oddities met on the way

  const std::vector<int>& of(NodeType type) const { return byType[static_cast<int>(type)]; }
  const Node& node(int index) const { return nodes[static_cast<size_t>(index)]; }
  int gpuOfRank(int rank) const;  // node index, -1 if there is none
  // The weakest compute capability; 0 without GPUs.
  int lowestSm() const;
  // "GPU/3", "NET/0-mlx5_1", "PCI/0000:65:00.0", with a host number where there are several hosts.
  std::string nameOf(int index) const;
  // The node of such a name, a NET's also without what follows its number; -1 if there is none.
  int find(std::string_view name) const;
};

// Builds the graph of a topology file: GPUs and NICs below their PCI switches and CPUs, NVLinks,
// chip-to-chip links, CPU links, network ports. GPUs get ranks in order if the file gives none.
// Functions of one PCI adapter are one NIC. Two levels of Broadcom PCI switches become one.
// Throws Error(invalidArgument) for a machine without CPU or GPU.
Topology buildTopology(const XmlTopology& file);

// The topology with only the nodes that `keep` marks, indices renewed, order kept.
Topology subTopology(const Topology& topology, const std::vector<bool>& keep);

}  // namespace unisono::topology
