// SPDX-License-Identifier: Apache-2.0
#include "comm/node_links.h"

#include <algorithm>

namespace unisono::comm {

using detect::NvmlSource;

LinkFacts packLinks(NvmlSource& driver, topology::BusId gpu) {
  LinkFacts facts{};
  for (const NvmlSource::NvLink& link : driver.nvlinks(gpu)) {
    topology::BusId busId = topology::parseBusId(link.remoteBusId);
    if (busId == topology::kNoBusId) busId = topology::kHiddenBusId;
    const auto remote = static_cast<int32_t>(link.remote);
    const auto target = std::ranges::find_if(facts.targets, [&](const LinkFacts::Target& known) {
      return known.links == 0 || (known.busId == busId && known.remote == remote);
    });
    if (target == facts.targets.end()) return {};
    *target = {busId, remote, target->links + 1};
  }
  const NvmlSource::ChipLink chip = driver.chipLink(gpu);
  facts.chipLinks = chip.count;
  facts.chipMegabytes = chip.megabytes;
  const int index = driver.indexOf(gpu);
  if (index < 0) return {};
  facts.index = static_cast<int16_t>(index);
  facts.isKnown = 1;
  return facts;
}

const NodeDevice* NodeLinks::find(topology::BusId gpu) const {
  const auto device = std::ranges::find(devices_, gpu, &NodeDevice::busId);
  return device == devices_.end() ? nullptr : &*device;
}

const LinkFacts* NodeLinks::linksOf(topology::BusId gpu) const {
  const NodeDevice* device = find(gpu);
  return device == nullptr || device->links.isKnown == 0 ? nullptr : &device->links;
}

bool NodeLinks::peerAllowed(topology::BusId a, topology::BusId b) {
  const auto isCertain = [&](topology::BusId gpu) {
    const NodeDevice* device = find(gpu);
    return device != nullptr && device->reachIsCertain;
  };
  return (isCertain(a) && isCertain(b)) || driver_.peerAllowed(a, b);
}

std::vector<NvmlSource::NvLink> NodeLinks::nvlinks(topology::BusId gpu) {
  const LinkFacts* facts = linksOf(gpu);
  if (facts == nullptr) return driver_.nvlinks(gpu);
  std::vector<NvLink> links;
  for (const LinkFacts::Target& target : facts->targets) {
    const NvLink link{topology::formatBusId(target.busId),
                      static_cast<NvLink::Remote>(target.remote)};
    links.insert(links.end(), static_cast<size_t>(target.links), link);
  }
  return links;
}

NvmlSource::ChipLink NodeLinks::chipLink(topology::BusId gpu) {
  const LinkFacts* facts = linksOf(gpu);
  if (facts == nullptr) return driver_.chipLink(gpu);
  return {facts->chipLinks, facts->chipMegabytes};
}

}  // namespace unisono::comm
