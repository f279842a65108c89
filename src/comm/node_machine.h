// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/agreement.h"
#include "detect/nics.h"
#include "topology/paths.h"
#include "topology/xml.h"

// The machine that the ranks of a node are in.
namespace unisono::comm {

// A GPU of this node that the communicator uses.
struct NodeDevice {
  topology::BusId busId;
  int computeCapability;
  bool reachesPeers;              // all others of the communicator directly
  bool reachIsCertain;            // the runtime has said so of all others of the node
  uint64_t sharedMemory, fabric;  // see RankFacts
  LinkFacts links;
  std::vector<int> ranks;
};

// The ports of a network plug-in, if there is one.
using Ports = std::optional<std::vector<detect::NicPort>>;

// The NVLink fabric across hosts that a GPU has joined, as RankFacts tells it.
uint64_t fabricOf(const std::string& busId);

// The NVLinks of a GPU, as RankFacts tells them. The driver is asked at the first call for a GPU.
LinkFacts linksOf(const std::string& busId);

// The number of a GPU in the driver's management library, or `otherwise` without that.
int driverDeviceOf(const std::string& busId, int otherwise);

// The GPUs of the node of `rank`, by bus id.
std::vector<NodeDevice> devicesOfNode(const std::vector<RankFacts>& ranks, const Hosts& hosts,
                                      int rank);

// Calls `visit` for each <pci> that holds a <gpu>.
void visitGpus(topology::XmlNode& node,
               const std::function<void(topology::XmlNode& pci, topology::XmlNode& gpu)>& visit);

struct NodeMachine {
  topology::XmlTopology topology;  // its GPUs name the first of their ranks
  // The user's settings with what was found out; "ranks" are places in the list of devices.
  topology::PathSettings rules;
};

// The machine that `devices` are in. On CUDA what is detected, completed by the file of
// NCCL_TOPO_FILE; where the driver's management library is missing, and on the host backend without
// UNISONO_HOST_TOPOLOGY, GPUs with NVLink to NVSwitches (PCI alone if they do not reach each
// other). Throws Error(invalidArgument) or Error(systemError) for settings and files that cannot be
// used, Error(invalidUsage) for a device that the file lacks.
// `ports`: those of the network plug-in; unset: those that the machine has.
NodeMachine nodeMachine(const Settings& settings, runtime::Backend backend,
                        const std::vector<NodeDevice>& devices, const Ports& ports = {});

}  // namespace unisono::comm
