// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "topology/presets.h"

// Machines generated from a grid of ordinary layouts, for property tests and for the table of
// docs/results.
namespace unisono::topology::testing {

enum class GpuFabric { pcie, nvlinkPairs, nvswitch };

// One point of the grid.
struct Layout {
  int sm = 90;
  GpuFabric fabric = GpuFabric::nvswitch;
  int gpus = 8;
  int nics = 8;
  bool nicsAtSwitch = true;  // GPUs and NICs are below PCI switches; otherwise at their CPU
  bool amd = false;
};

inline std::string nameOf(const Layout& layout) {
  const char* fabric = layout.fabric == GpuFabric::nvswitch      ? "NVSwitch"
                       : layout.fabric == GpuFabric::nvlinkPairs ? "NVLink pairs"
                                                                 : "PCIe";
  return fmt::format("{} GPUs sm{} {}, {} NICs at the {}, {}", layout.gpus, layout.sm, fabric,
                     layout.nics, layout.nicsAtSwitch ? "switch" : "CPU",
                     layout.amd ? "AMD" : "Intel");
}

inline MachineDescription describe(const Layout& layout) {
  // What machines of each generation have: NVLinks per GPU, PCI and NIC speed.
  struct Generation {
    int sm, nvlinks;
    const char* pci;
    long long megabits;
    int intelModel;
  };
  static constexpr Generation kGenerations[] = {{70, 6, "8.0 GT/s PCIe", 100'000, 85},
                                                {80, 12, "16.0 GT/s PCIe", 200'000, 106},
                                                {90, 18, "32.0 GT/s PCIe", 400'000, 143},
                                                {100, 18, "32.0 GT/s PCIe", 400'000, 207}};
  const Generation& generation =
      *std::find_if(std::begin(kGenerations), std::end(kGenerations),
                    [&](const Generation& candidate) { return candidate.sm == layout.sm; });
  MachineDescription machine;
  machine.name = nameOf(layout);
  machine.gpus = layout.gpus;
  machine.nics = layout.nics;
  machine.sockets = 2;
  machine.switches = layout.nicsAtSwitch ? std::max(layout.nics, 2) : 0;
  machine.sm = layout.sm;
  machine.pciSpeed = generation.pci;
  machine.nicMegabits = generation.megabits;
  machine.cpuModel = generation.intelModel;
  if (layout.amd) {
    machine.cpuVendor = "AuthenticAMD";
    machine.cpuFamily = 175;
    machine.cpuModel = 1;
  }
  if (layout.fabric == GpuFabric::nvswitch) machine.switchNvlinks = generation.nvlinks;
  if (layout.fabric == GpuFabric::nvlinkPairs) {
    const size_t gpus = static_cast<size_t>(layout.gpus);
    machine.peerNvlinks.assign(gpus, std::vector<int>(gpus, 0));
    for (size_t gpu = 0; gpu < gpus; gpu++) {
      if ((gpu ^ 1) < gpus) machine.peerNvlinks[gpu][gpu ^ 1] = generation.nvlinks;
    }
  }
  return machine;
}

inline std::vector<Layout> allLayouts() {
  std::vector<Layout> layouts;
  for (const int sm : {70, 80, 90, 100}) {
    for (const auto fabric : {GpuFabric::pcie, GpuFabric::nvlinkPairs, GpuFabric::nvswitch}) {
      for (const int gpus : {2, 3, 4, 6, 8, 10, 12, 16}) {
        for (const int nics : {1, 2, 4, 8, 16}) {
          for (const bool atSwitch : {false, true}) {
            for (const bool amd : {false, true}) {
              layouts.push_back({sm, fabric, gpus, nics, atSwitch, amd});
            }
          }
        }
      }
    }
  }
  return layouts;
}

// `count` different layouts, the same for the same seed on every machine.
inline std::vector<Layout> sampleLayouts(unsigned seed, size_t count) {
  std::vector<Layout> layouts = allLayouts();
  std::mt19937 random(seed);
  // std::shuffle differs between standard libraries.
  for (size_t i = 0; i < count; i++) {
    std::swap(layouts[i], layouts[i + random() % (layouts.size() - i)]);
  }
  layouts.resize(count);
  return layouts;
}

}  // namespace unisono::topology::testing
