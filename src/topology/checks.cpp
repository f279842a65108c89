// SPDX-License-Identifier: Apache-2.0
#include "topology/checks.h"

#include <fmt/format.h>

#include <algorithm>

namespace unisono::topology {

namespace {

RankInfo factsOf(const PathSettings& settings, int rank) {
  const auto found = settings.ranks.find(rank);
  return found == settings.ranks.end() ? RankInfo{} : found->second;
}

// The CPU that decides how far P2P reaches: the first one, as machines do not mix them.
const CpuInfo& anyCpu(const Topology& topology) {
  return topology.node(topology.of(NodeType::cpu).front()).cpu;
}

PathType defaultPeerLevel(const Topology& topology) {
  // AMD's host bridges pass P2P, and with two GPUs nothing else competes for them.
  if (!topology.of(NodeType::cpu).empty()) {
    const CpuInfo& cpu = anyCpu(topology);
    if (cpu.architecture == CpuArchitecture::x86 && cpu.vendor == CpuVendor::amd &&
        topology.of(NodeType::gpu).size() <= 2) {
      return PathType::sys;
    }
  }
  return PathType::pxb;
}

bool hasNvlink(const Topology& topology, int gpu) {
  const auto& links = topology.node(gpu).links;
  return std::any_of(links.begin(), links.end(),
                     [](const Link& link) { return link.type == LinkType::nvlink; });
}

}  // namespace

PeerVerdict checkPeer(const Topology& topology, const PathTable& paths,
                      const PathSettings& settings, int gpuA, int gpuB) {
  PeerVerdict verdict;
  const Node& a = topology.node(gpuA);
  const Node& b = topology.node(gpuB);
  const Path path = paths.wirePath(gpuA, gpuB);
  verdict.level = settings.p2pLevel.value_or(defaultPeerLevel(topology));
  const auto refuse = [&](std::string reason) {
    verdict.reason = std::move(reason);
    return verdict;
  };

  if (path.type == PathType::dis) return refuse("no wire leads from one to the other");
  const RankInfo factsA = factsOf(settings, a.gpu.rank), factsB = factsOf(settings, b.gpu.rank);
  if (a.host != b.host) {
    if (!settings.multiNodeNvlink) {
      return refuse(
          "they are on different hosts, and NCCL_MNNVL_ENABLE=0 forbids NVLink between "
          "hosts");
    }
    const bool told = settings.ranks.contains(a.gpu.rank) || settings.ranks.contains(b.gpu.rank);
    if (factsA.fabric != factsB.fabric || (told && factsA.fabric == 0)) {
      return refuse("they are on different hosts and not in one NVLink fabric");
    }
    if (path.type != PathType::nvl) {
      return refuse("they are on different hosts and no NVLink joins them");
    }
  } else if (factsA.shmDevice != factsB.shmDevice) {
    return refuse(
        "their processes do not share /dev/shm, so they are in different containers; "
        "give both the same /dev/shm");
  }
  verdict.byUser = settings.p2pDisable || (settings.p2pLevel && path.type > *settings.p2pLevel);
  if (settings.p2pDisable) return refuse("NCCL_P2P_DISABLE forbids it");
  if (path.type > verdict.level) {
    return refuse(fmt::format("the path is {}, and P2P is used up to {} only ({})",
                              nameOf(path.type), nameOf(verdict.level),
                              settings.p2pLevel ? "NCCL_P2P_LEVEL" : "the default"));
  }
  if (settings.p2pRefused.contains(std::minmax(a.gpu.rank, b.gpu.rank))) {
    return refuse(
        "the driver says that these GPUs cannot reach each other's memory; look for "
        "PCI access control (ACS), an IOMMU or GPUs without P2P");
  }

  verdict.allowed = true;
  verdict.nvlink = path.type <= PathType::nvl;
  if (path.type == PathType::nvb) {
    for (const Hop& hop : paths.hops(gpuA, gpuB)) {
      const int to = topology.node(hop.node).links[static_cast<size_t>(hop.link)].to;
      if (to != gpuB && topology.node(to).type == NodeType::gpu) verdict.through = to;
    }
  }
  const bool ampere = path.type == PathType::nvl && a.gpu.sm == b.gpu.sm && a.gpu.sm == kAmpere;
  verdict.read = settings.p2pRead.value_or(ampere);
  verdict.reason = fmt::format("the path is {}, and P2P is used up to {}", nameOf(path.type),
                               nameOf(verdict.level));
  return verdict;
}

Verdict checkSharedMemory(const Topology& topology, const PathSettings& settings, int gpuA,
                          int gpuB) {
  const Node& a = topology.node(gpuA);
  const Node& b = topology.node(gpuB);
  if (settings.shmDisable) return {false, "NCCL_SHM_DISABLE forbids it"};
  if (a.host != b.host) return {false, "they are on different hosts"};
  if (factsOf(settings, a.gpu.rank).shmDevice != factsOf(settings, b.gpu.rank).shmDevice) {
    return {false, "their processes do not share /dev/shm; give both containers the same one"};
  }
  return {true, "both are on one host and share /dev/shm"};
}

GdrVerdict checkGdr(const Topology& topology, const PathTable& paths, const PathSettings& settings,
                    int gpu, int net, bool read) {
  const Node& device = topology.node(gpu);
  const Node& port = topology.node(net);
  if (!port.net.gdr) {
    return {false, false, "the network port offers no access to GPU memory (gdr=\"0\")"};
  }
  if (!device.gpu.gdr) {
    return {false, false,
            "the GPU's driver offers no access to its memory (gdr=\"0\"); load "
            "nvidia-peermem or use a kernel with DMA-BUF"};
  }
  if (read) {
    if (settings.gdrRead == false) return {false, false, "NCCL_NET_GDR_READ=0 forbids reads"};
    // Before Ampere, reads by the NIC hurt other PCI traffic; with NVLink there is little.
    if (!settings.gdrRead && device.gpu.sm < kAmpere && !hasNvlink(topology, gpu)) {
      return {false, false,
              "GPUs before Ampere without NVLink are not read by a NIC by default "
              "(NCCL_NET_GDR_READ=1 allows it)"};
    }
  }
  const Path path = paths.wirePath(gpu, net);
  const PathType level =
      settings.gdrLevel.value_or(settings.gdrC2c ? PathType::p2c : PathType::pxb);
  if (path.type > level) {
    return {
        false, false,
        fmt::format("the path is {}, and GPUDirect is used up to {} only ({})", nameOf(path.type),
                    nameOf(level), settings.gdrLevel ? "NCCL_NET_GDR_LEVEL" : "the default")};
  }
  return {true, !read && (settings.forceFlush || device.gpu.sm < kHopper),
          fmt::format("the path is {}, and GPUDirect is used up to {}", nameOf(path.type),
                      nameOf(level))};
}

namespace {

// Whether `peer`, one of the GPUs nearest to the port, can stand in for `gpu`.
PxnVerdict checkPxnThrough(const Topology& topology, const PathTable& paths,
                           const PathSettings& settings, int gpu, int net, int peer) {
  const Path own = paths.wirePath(gpu, net);
  const Path far = paths.wirePath(peer, net);
  const std::string name = topology.nameOf(peer);
  const PathType level = settings.pxnC2c ? PathType::p2c : PathType::pxb;
  if (topology.node(peer).host != topology.node(gpu).host) {
    return {false, -1, fmt::format("{}, the GPU near the port, is on another host", name)};
  }
  if (far.type > level) {
    return {
        false, -1,
        fmt::format("{}, the nearest GPU, reaches the port over {} only", name, nameOf(far.type))};
  }
  if (paths.wirePath(gpu, peer).type > PathType::nvl) {
    return {false, -1, fmt::format("no NVLink leads to {}, the GPU near the port", name)};
  }
  if (!checkPeer(topology, paths, settings, gpu, peer).allowed) {
    return {false, -1, fmt::format("P2P to {}, the GPU near the port, is not allowed", name)};
  }
  if (const GdrVerdict gdr = checkGdr(topology, paths, settings, peer, net, false); !gdr.allowed) {
    return {false, -1, fmt::format("{} cannot use GPUDirect with the port: {}", name, gdr.reason)};
  }
  if (far.bandwidth <= own.bandwidth && own.type <= PathType::pxn) {
    return {false, -1, fmt::format("the path through {} does not have more bandwidth", name)};
  }
  return {true, peer,
          fmt::format("{} is near the port ({}) and NVLink leads to it, which {}", name,
                      nameOf(far.type),
                      own.type > PathType::pxn ? "avoids the CPU" : "has more bandwidth")};
}

}  // namespace

PxnVerdict checkPxn(const Topology& topology, const PathTable& paths, const PathSettings& settings,
                    int gpu, int net) {
  if (settings.pxnDisable) return {false, -1, "NCCL_PXN_DISABLE forbids it"};
  const std::vector<int>& near = paths.nearest(net);
  if (near.empty()) return {false, -1, "no GPU is near the port"};
  if (std::find(near.begin(), near.end(), gpu) != near.end()) {
    return {false, -1, "no other GPU is nearer to the port"};
  }
  // Of several GPUs as near, first the one of the port's own place, so that ports share the work.
  const std::vector<int>& ports = paths.nearest(near.front());
  const size_t place =
      static_cast<size_t>(std::find(ports.begin(), ports.end(), net) - ports.begin());
  PxnVerdict first;
  for (size_t i = 0; i < near.size(); i++) {
    const int peer = near[(place + i) % near.size()];
    PxnVerdict verdict = checkPxnThrough(topology, paths, settings, gpu, net, peer);
    if (verdict.used) return verdict;
    if (i == 0) first = std::move(verdict);
  }
  return first;
}

std::vector<int> messagePorts(const Topology& topology, const PathTable& paths, int gpu) {
  const std::vector<int>& near = paths.nearest(gpu);
  std::vector<int> ports;
  for (const int net : near) {
    if (topology.node(net).host == topology.node(gpu).host) ports.push_back(net);
  }
  if (ports.empty()) return {};
  const std::vector<int>& sharers = paths.nearest(ports.front());
  const auto own = std::find(sharers.begin(), sharers.end(), gpu);
  // The ports nearest to a GPU may be nearer to others.
  const size_t place =
      own == sharers.end() ? static_cast<size_t>(gpu) : static_cast<size_t>(own - sharers.begin());
  const size_t share =
      own == sharers.end() ? 1 : (ports.size() + sharers.size() - 1) / sharers.size();
  std::vector<int> result;
  for (size_t i = 0; i < share; i++) {
    result.push_back(ports[(place * share + i) % ports.size()]);
  }
  return result;
}

namespace {

// Of the GPUs nearest to a port the one that uses it for its own messages.
int gpuOfPort(const Topology& topology, const PathTable& paths, int net) {
  const std::vector<int>& near = paths.nearest(net);
  for (const int gpu : near) {
    const std::vector<int> ports = messagePorts(topology, paths, gpu);
    if (std::find(ports.begin(), ports.end(), net) != ports.end()) return gpu;
  }
  return near.empty() ? -1 : near.front();
}

}  // namespace

PxnVerdict checkMessagePxn(const Topology& topology, const PathTable& paths,
                           const PathSettings& settings, int gpu, int net) {
  if (settings.pxnDisable) return {false, -1, "NCCL_PXN_DISABLE forbids it"};
  if (settings.p2pPxnLevel == 0) return {false, -1, "NCCL_P2P_PXN_LEVEL=0 forbids it"};
  const Path& path = paths.path(gpu, net);
  if (settings.p2pPxnLevel == 1) {
    const bool used = path.type <= PathType::pxn;
    return {used, used ? (path.type == PathType::pxn ? path.via : gpu) : -1,
            fmt::format("the path is {}, and NCCL_P2P_PXN_LEVEL=1 allows up to PXN",
                        nameOf(path.type))};
  }
  const int through = gpuOfPort(topology, paths, net);
  if (through < 0) return {false, -1, "no GPU is near the port"};
  if (topology.node(through).host != topology.node(gpu).host) {
    return {false, -1,
            fmt::format("{}, the GPU near the port, is on another host", topology.nameOf(through))};
  }
  const Path wire = paths.wirePath(through, net);
  const std::string name = topology.nameOf(through);
  if (through != gpu && paths.wirePath(through, gpu).type > PathType::nvl) {
    return {false, -1, fmt::format("no NVLink leads to {}, the GPU near the port", name)};
  }
  if (through != gpu && !checkPeer(topology, paths, settings, gpu, through).allowed) {
    return {false, -1, fmt::format("P2P to {}, the GPU near the port, is not allowed", name)};
  }
  if (wire.type > (settings.pxnC2c ? PathType::p2c : PathType::pxb)) {
    return {
        false, -1,
        fmt::format("{}, the nearest GPU, reaches the port over {} only", name, nameOf(wire.type))};
  }
  if (const GdrVerdict gdr = checkGdr(topology, paths, settings, through, net, false);
      !gdr.allowed) {
    return {false, -1, fmt::format("{} cannot use GPUDirect with the port: {}", name, gdr.reason)};
  }
  return {true, through,
          through == gpu ? "the port is near the GPU"
                         : fmt::format("{} is near the port and forwards them", name)};
}

Verdict preferNet(const Topology& topology, const PathTable& paths, int gpuA, int gpuB) {
  const Path& direct = paths.path(gpuA, gpuB);
  const auto widest = [&](int gpu) {
    Bandwidth best = 0;
    for (const int net : topology.of(NodeType::net)) {
      const Path& path = paths.path(gpu, net);
      const Path& back = paths.path(net, gpu);
      if (path.type > PathType::pxb || back.type > PathType::pxb) continue;
      best = std::max(best,
                      std::min({path.bandwidth, back.bandwidth, topology.node(net).net.bandwidth}));
    }
    return best;
  };
  if (direct.type >= PathType::net) return {true, "nothing else joins them"};
  const Bandwidth network = std::min(widest(gpuA), widest(gpuB));
  if (network == 0) return {false, "they have no ports as near as PXB"};
  if (network > direct.bandwidth) {
    return {true,
            fmt::format("their NICs carry {:g} GB/s, the {} path between them {:g} GB/s",
                        toGigabytes(network), nameOf(direct.type), toGigabytes(direct.bandwidth))};
  }
  return {false,
          fmt::format("the {} path between them carries {:g} GB/s, their NICs {:g} GB/s",
                      nameOf(direct.type), toGigabytes(direct.bandwidth), toGigabytes(network))};
}

std::string explainPath(const Topology& topology, const PathTable& paths,
                        const PathSettings& settings, int from, int to) {
  const Path& path = paths.path(from, to);
  const Path wire = paths.wirePath(from, to);
  std::string text =
      fmt::format("{} -> {}: {}", topology.nameOf(from), topology.nameOf(to), nameOf(path.type));
  if (path.type < PathType::net) {
    text += fmt::format(", {:g} GB/s, {} hop{}\n", toGigabytes(path.bandwidth), path.hops,
                        path.hops == 1 ? "" : "s");
    for (const Hop& hop : paths.hops(from, to)) {
      const Link& link = topology.node(hop.node).links[static_cast<size_t>(hop.link)];
      text += fmt::format("  {} -{} {:g}-> {}\n", topology.nameOf(hop.node), nameOf(link.type),
                          toGigabytes(link.bandwidth), topology.nameOf(link.to));
    }
    if (path.via >= 0) {
      text +=
          fmt::format("routed through {}; the shortest path is {}, {:g} GB/s\n",
                      topology.nameOf(path.via), nameOf(wire.type), toGigabytes(wire.bandwidth));
    }
  } else {
    text += path.type == PathType::net ? ", only the network joins them\n"
                                       : ", nothing inside the machine joins them\n";
  }
  const NodeType a = topology.node(from).type, b = topology.node(to).type;
  const auto say = [&](std::string_view what, bool yes, const std::string& reason) {
    text += fmt::format("{}: {}, {}\n", what, yes ? "yes" : "no", reason);
  };
  if (a == NodeType::gpu && b == NodeType::gpu && from != to) {
    const PeerVerdict peer = checkPeer(topology, paths, settings, from, to);
    say("P2P", peer.allowed, peer.reason);
    if (peer.through >= 0) {
      text += fmt::format("intermediate GPU: {}\n", topology.nameOf(peer.through));
    }
    const Verdict memory = checkSharedMemory(topology, settings, from, to);
    say("shared memory", memory.allowed, memory.reason);
    const Verdict net = preferNet(topology, paths, from, to);
    say("network instead", net.allowed, net.reason);
  }
  if ((a == NodeType::gpu && b == NodeType::net) || (a == NodeType::net && b == NodeType::gpu)) {
    const bool sends = a == NodeType::gpu;
    const int gpu = sends ? from : to, net = sends ? to : from;
    const PxnVerdict pxn =
        sends ? checkPxn(topology, paths, settings, gpu, net) : PxnVerdict{false, -1, ""};
    // With PXN the port reads the memory of the GPU that sends on behalf of this one.
    const int owner = path.type == PathType::pxn ? path.via : gpu;
    const GdrVerdict gdr = checkGdr(topology, paths, settings, owner, net, sends);
    say(sends ? "GPUDirect read" : "GPUDirect write", gdr.allowed,
        owner == gpu ? gdr.reason + (gdr.flush ? "; what arrives is flushed" : "")
                     : fmt::format("from {}, which sends for {} (PXN): {}", topology.nameOf(owner),
                                   topology.nameOf(gpu), gdr.reason));
    if (sends) {
      say("PXN", pxn.used, pxn.reason);
      const PxnVerdict message = checkMessagePxn(topology, paths, settings, gpu, net);
      say("messages to other machines through this port", message.used, message.reason);
    }
  }
  return text;
}

}  // namespace unisono::topology
