// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace unisono::topology {

// Bandwidth in MB/s (10^6 bytes). Whole numbers, so that every rank, on whatever processor,
// computes the same channels.
using Bandwidth = int64_t;

constexpr double toGigabytes(Bandwidth bandwidth) {
  return static_cast<double>(bandwidth) / 1000.0;
}
constexpr Bandwidth fromGigabytes(double gigabytes) {
  return static_cast<Bandwidth>(gigabytes * 1000.0 + 0.5);
}

// Compute capabilities, as in GPU nodes, of the first GPU of a generation.
inline constexpr int kAmpere = 80, kHopper = 90, kBlackwell = 100;

enum class NodeType : uint8_t { gpu, pci, nvs, cpu, nic, net };
inline constexpr int kNodeTypes = 6;

enum class LinkType : uint8_t { local, nvlink, c2c, pci, system, network };

// How two nodes are connected, the best first. The numbers and names are NCCL's.
enum class PathType : uint8_t {
  loc = 0,   // the node itself
  nvl = 1,   // NVLink
  nvb = 2,   // NVLink through one GPU between
  c2c = 3,   // the chip-to-chip link of a GPU and its CPU
  pix = 4,   // at most one PCI switch
  pxb = 5,   // several PCI switches, no CPU
  p2c = 6,   // GPU, chip-to-chip link, CPU, PCI, NIC
  pxn = 7,   // GPU to NIC by way of another GPU near that NIC
  phb = 8,   // through a CPU's PCI host bridge
  sys = 9,   // through the link between CPUs
  net = 10,  // only over the network
  dis = 11,  // not at all
};

std::string_view nameOf(NodeType type);  // "GPU"
std::string_view nameOf(LinkType type);  // "NVL"
std::string_view nameOf(PathType type);  // "PIX"
// The path type of a name in capitals; nothing if there is none.
std::optional<PathType> pathTypeOf(std::string_view name);

// The value of NCCL_P2P_LEVEL or NCCL_NET_GDR_LEVEL: a path type's name, or a number as of old
// (0 LOC, 1 PIX, 2 PXB, 3 PHB, 4 and more SYS); nothing if it is neither.
std::optional<PathType> pathLevelOf(std::string_view text);

}  // namespace unisono::topology
