// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "topology/types.h"

// What links carry in one direction. The numbers are NCCL 2.30's, so that our channels can be
// compared with its.
namespace unisono::topology {

enum class CpuArchitecture : uint8_t { unknown, x86, power, arm };
enum class CpuVendor : uint8_t { unknown, intel, amd, zhaoxin };

// Between parts of one device: no limit in practice.
inline constexpr Bandwidth kLocalBandwidth = 5'000'000;

// One NVLink of a GPU of compute capability `sm` (90 is 9.0).
Bandwidth nvlinkBandwidth(int sm);

// A PCI link: lanes times the lane's speed as sysfs words it ("16.0 GT/s PCIe", "8 GT/s").
// Where the platform hides them (no width, or one over 32; an unknown speed) 16 lanes and the
// speed of the third generation are assumed, 12 GB/s.
Bandwidth pciBandwidth(std::string_view speed, int width);

// The link between two CPUs of one machine. `model` is the model id of the processor family.
Bandwidth cpuLinkBandwidth(CpuArchitecture architecture, CpuVendor vendor, int model);

// A network port of `megabits` per second. Ports that do not know their speed (0, -1) are taken
// for 10 Gb/s.
Bandwidth netBandwidth(long long megabits);

// Two GPUs that talk through an Intel CPU's PCI host bridge lose a sixth of the PCI bandwidth.
constexpr Bandwidth intelPeerLoad(Bandwidth bandwidth) {
  return bandwidth * 6 / 5;
}

}  // namespace unisono::topology
