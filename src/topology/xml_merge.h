// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "topology/xml.h"

namespace unisono::topology {

// The <pci> of a bus id on a host (0: whichever), anywhere below a <system>; null if there is none.
XmlNode* findDevice(XmlNode& system, uint64_t hostHash, BusId busId);

// Completes a tree with what another one knows of the same machine: a platform's file with what was
// detected, or what one rank sees with what the next sees. Elements that both have (a CPU by host
// and NUMA node, a device by bus id wherever it stands, a port by name, an NVLink by target) stay
// where `into` has them, with its attributes; attributes that it lacks or leaves empty and elements
// that it lacks come from `from`. A <cpu> without host_hash is of any host.
void mergeTopology(XmlNode& into, const XmlNode& from);

// Keeps the GPUs and ports marked keep="1", with their links and everything above them, and removes
// the marks.
void trimToKept(XmlNode& system);

}  // namespace unisono::topology
