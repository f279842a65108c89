// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "detect/sysfs.h"
#include "topology/xml.h"

namespace unisono::detect {

// Builds <system>: CPUs, and below them the PCI devices that are asked for with the switches
// above them.
//
// In sysfs each PCI switch is two bridges on the way up, its downstream and its upstream port, and
// the root complex shows one, the root port. In the topology a switch is one element, its upstream
// port, and a root port is none.
class PciTree {
 public:
  PciTree(const Sysfs& sysfs, uint64_t hostHash);

  // The <pci> of a device, with everything above it; made if it is not there yet. A device that
  // sysfs does not show is put below the CPU of unknown NUMA node, with a note. The reference
  // holds until the next call.
  topology::XmlNode& device(topology::BusId busId);

  // The class that sysfs gives for a device ("0x068000"); empty if it does not show it.
  std::string classOf(topology::BusId busId) const;

  // For a machine where nothing else brings a CPU.
  void addUnknownCpu() { cpu(-1); }

  topology::XmlNode& system() { return system_; }
  std::vector<std::string>& notes() { return notes_; }

 private:
  topology::XmlNode& cpu(int numa);
  void describeCpu(topology::XmlNode& cpu, int numa);
  void describeDevice(topology::XmlNode& pci, const std::filesystem::path& folder);
  std::filesystem::path folderOf(topology::BusId busId) const;

  const Sysfs& sysfs_;
  const uint64_t hostHash_;
  topology::XmlNode system_;
  std::vector<std::string> notes_;
};

// The bus id of a device's folder in sysfs if it is a PCI device (by its subsystem, or where that
// is not shown by the form of its name), kNoBusId if not.
topology::BusId pciDeviceOf(const std::filesystem::path& folder);

}  // namespace unisono::detect
