// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "topology/xml_tree.h"

// Topology files in NCCL's format (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE):
//   system > cpu > pci > pci > ... > gpu > nvlink | c2c
//                              ... > nic > net
//            cpu > nic > net   (a NIC that is not a PCI device)
namespace unisono::topology {

// A PCI address as one number: domain << 20 | bus << 12 | device << 4 | function.
using BusId = int64_t;

inline constexpr BusId kNoBusId = -1;
// What stands for "the NVSwitch" where a virtual machine hides its address.
inline constexpr BusId kHiddenBusId = 0xfffffffffff0;

// "0000:65:02.0" (domain of up to 8 hexadecimal digits, which may be left out) to a BusId;
// kNoBusId if it is not one.
BusId parseBusId(std::string_view text);
// Lower case, a domain of at least four digits.
std::string formatBusId(BusId id);

// A topology file that was read and checked: the elements and attributes have the right form and
// do not contradict each other. Attributes that we do not use are kept for writing.
struct XmlTopology {
  XmlNode system;
  std::string source;              // the name that errors give
  std::vector<std::string> notes;  // what was odd, but could be read
};

// Bounds of a topology. NVLink joins at most 576 GPUs; the search must stay fast on what a file
// claims.
inline constexpr int kMaxGpus = 1024, kMaxPorts = 1024, kMaxPciDevices = 4096;
inline constexpr int kMaxNumaNodes = 1024, kMaxNumaNodesOfHost = 256;

// Reads a topology file. Throws Error(invalidArgument) "SOURCE:LINE: cause" for text that is no
// XML, is over the limits, has an element in a wrong place or an attribute of a wrong form, or
// contradicts itself (a bus id, rank, device or NUMA node twice, unequal ends of an NVLink). An
// element of an unknown name is left out, with a note.
XmlTopology parseTopologyXml(std::string_view text, std::string_view source,
                             const XmlLimits& limits = {});

// Checks a tree that a program has built or merged, as parseTopologyXml does.
XmlTopology checkTopologyXml(XmlNode system, std::string_view source);

std::string writeTopologyXml(const XmlTopology& topology);

// A GPU of a topology file.
struct GpuDescription {
  int dev = 0;  // its number on its host (NVML's)
  BusId busId = kNoBusId;
  int sm = 0;             // compute capability, 90 is 9.0; 0: left to detection
  int rank = -1;          // -1: the file gives none
  int numa = -1;          // NUMA node; -1: unknown
  int cpu = 0;            // index of the <cpu> element in the file
  int host = 0;           // index of the host, in the order of first mention
  uint64_t hostHash = 0;  // 0: the file names no hosts
};

// The GPUs of a topology file, by host, then dev.
std::vector<GpuDescription> gpusOf(const XmlTopology& topology);

}  // namespace unisono::topology
