// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/agreement.h"
#include "comm/node_machine.h"
#include "detect/nvml.h"

// Each rank asks the driver's management library about its own GPU only. This takes several calls
// for each NVLink, and the library takes milliseconds to open a GPU.
namespace unisono::comm {

// What the driver says of a GPU. Unknown if its links lead to more places than LinkFacts holds.
LinkFacts packLinks(detect::NvmlSource& driver, topology::BusId gpu);

// What the ranks of a node have said of their GPUs' NVLinks; the driver says the rest.
class NodeLinks final : public detect::NvmlSource {
 public:
  // Both must outlive this object.
  NodeLinks(detect::NvmlSource& driver, const std::vector<NodeDevice>& devices)
      : driver_(driver), devices_(devices) {}

  std::vector<topology::BusId> gpus() override { return driver_.gpus(); }
  int computeCapability(topology::BusId gpu) override { return driver_.computeCapability(gpu); }
  std::vector<NvLink> nvlinks(topology::BusId gpu) override;
  ChipLink chipLink(topology::BusId gpu) override;
  int indexOf(topology::BusId gpu) override { return driver_.indexOf(gpu); }
  // The driver is asked only where the runtime does not see one of the GPUs.
  bool peerAllowed(topology::BusId a, topology::BusId b) override;
  std::optional<Fabric> fabric(topology::BusId gpu) override { return driver_.fabric(gpu); }

 private:
  // Null for a GPU of no rank.
  const NodeDevice* find(topology::BusId gpu) const;
  // Null where no rank has said anything.
  const LinkFacts* linksOf(topology::BusId gpu) const;

  detect::NvmlSource& driver_;
  const std::vector<NodeDevice>& devices_;
};

}  // namespace unisono::comm
