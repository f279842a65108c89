// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "topology/xml.h"

namespace unisono::topology {

// A machine by its counts and speeds, for tests, for simulated nodes and to look at ("unisono
// topo"). GPUs and NICs are spread evenly over PCI switches, switches over sockets.
struct MachineDescription {
  std::string name;
  int gpus = 8;
  int nics = 0;
  int sockets = 2;
  int switches = 0;  // PCI switches in all; 0: devices hang at their CPU
  int sm = 90;
  int switchNvlinks = 0;  // NVLinks of each GPU to the NVSwitches
  // NVLinks from GPU to GPU: gpus x gpus counts, or empty.
  std::vector<std::vector<int>> peerNvlinks;
  double chipLinkMegabytes = 0;  // chip-to-chip link of GPU and CPU, MB/s; 0: none
  std::string cpuArchitecture = "x86_64";
  std::string cpuVendor = "GenuineIntel";
  int cpuFamily = 6, cpuModel = 143;
  std::string pciSpeed = "32.0 GT/s PCIe";
  long long nicMegabits = 400'000;
  bool gdr = true;
};

XmlTopology describeMachine(const MachineDescription& description);

// Machines that are common or hard: "dgx-h100", "hgx-h200x4", "hgx-h200x8", "hgx-b200x8",
// "dgx-a100", "dgx1-v100", "a100-pcie-x4", "rtx3090-x8", "gh200-x4", "scale-16x16".
std::vector<std::string> presetNames();
// The description of a preset. Throws Error(invalidArgument) that lists the names.
MachineDescription preset(std::string_view name);

}  // namespace unisono::topology
