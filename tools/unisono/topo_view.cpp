// SPDX-License-Identifier: Apache-2.0
#include "topo_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/error.h"
#include "topology/validate.h"

namespace unisono::topo {

using namespace topology;

namespace {

constexpr long long kMaxRanks = 1 << 20;

// Joins the channels as the ranks of a communicator do. Ranks are numbered machine by machine, and
// within one as in the file.
Joined joinMachines(const std::vector<Domain>& domains, size_t gpus, int machines,
                    const JoinSettings& settings) {
  std::vector<RankPlace> ofMachine(gpus);
  for (const Domain& domain : domains) {
    const Topology& topology = domain.machine.topology;
    std::vector<std::vector<int>> ranksOf(topology.nodes.size());
    int first = static_cast<int>(gpus);
    for (const int gpu : topology.of(NodeType::gpu)) {
      ranksOf[static_cast<size_t>(gpu)] = {topology.node(gpu).gpu.rank};
      first = std::min(first, topology.node(gpu).gpu.rank);
    }
    for (const int gpu : topology.of(NodeType::gpu)) {
      const int rank = topology.node(gpu).gpu.rank;
      ofMachine[static_cast<size_t>(rank)] =
          placeOf(domain.graphs, ranksOf, rank, static_cast<uint64_t>(first));
      ofMachine[static_cast<size_t>(rank)].machine = machineFactsOf(topology);
    }
  }
  std::vector<RankPlace> places;
  places.reserve(gpus * static_cast<size_t>(machines));
  for (int machine = 0; machine < machines; machine++) {
    for (RankPlace place : ofMachine) {
      place.node += static_cast<uint64_t>(machine) * gpus;
      places.push_back(place);
    }
  }
  return join(places, settings);
}

// Renumbers ranks from 0: those of a file may be a part of a larger communicator's.
void renumberRanks(Topology& topology, int ranksPerNode) {
  std::vector<int> gpus = topology.of(NodeType::gpu);
  std::erase_if(gpus, [&](int gpu) { return topology.node(gpu).gpu.rank < 0; });
  std::sort(gpus.begin(), gpus.end(),
            [&](int a, int b) { return topology.node(a).gpu.rank < topology.node(b).gpu.rank; });
  if (static_cast<size_t>(ranksPerNode) > gpus.size()) {
    throw invalidArgument("this machine has {} GPUs, not {}", gpus.size(), ranksPerNode)
        .remedy("Ask for fewer ranks, or for more machines with --nodes.");
  }
  for (size_t rank = 0; rank < gpus.size(); rank++) {
    const bool used = ranksPerNode == 0 || rank < static_cast<size_t>(ranksPerNode);
    topology.nodes[static_cast<size_t>(gpus[rank])].gpu.rank = used ? static_cast<int>(rank) : -1;
  }
}

}  // namespace

View makeView(const XmlTopology& file, const ViewSettings& settings) {
  const std::vector<GpuDescription> described = gpusOf(file);
  if (described.empty()) {
    throw invalidArgument("{}: no <gpu> found", file.source)
        .remedy(
            "A cloud provider's file without GPUs is completed on its machine: set NCCL_TOPO_FILE "
            "there.");
  }
  for (const GpuDescription& gpu : described) {
    if (gpu.sm == 0) {
      throw invalidArgument("{}: the GPU {} has no compute capability (sm)", file.source,
                            formatBusId(gpu.busId))
          .remedy("Only NVIDIA's driver knows it. Use a file that NCCL_TOPO_DUMP_FILE wrote.");
    }
  }
  Topology topology = buildTopology(file);
  for (Node& node : topology.nodes) {
    node.net.name = printable(node.net.name);
  }
  renumberRanks(topology, settings.ranksPerNode);
  const auto& gpus = topology.of(NodeType::gpu);
  const auto ranks = static_cast<size_t>(std::count_if(
      gpus.begin(), gpus.end(), [&](int gpu) { return topology.node(gpu).gpu.rank >= 0; }));
  if (static_cast<long long>(ranks) * settings.nodes > kMaxRanks) {
    throw invalidArgument("{} machines of {} GPUs have more than {} ranks", settings.nodes, ranks,
                          kMaxRanks)
        .remedy("Use a smaller number with --nodes.");
  }
  View view{printable(file.source),
            settings.nodes,
            Machine(topology, settings.paths),
            {},
            {},
            topology.notes,
            {}};

  std::vector<bool> placed(ranks, false);
  for (size_t rank = 0; rank < ranks; rank++) {
    if (placed[rank]) continue;
    Domain domain{trimMachine(topology, settings.paths, static_cast<int>(rank),
                              static_cast<int>(ranks) * settings.nodes),
                  {}};
    const Topology& own = domain.machine.topology;
    for (const int gpu : own.of(NodeType::gpu)) {
      placed[static_cast<size_t>(own.node(gpu).gpu.rank)] = true;
    }
    SearchSettings search = settings.search;
    for (const int net : own.of(NodeType::net)) search.collnet |= own.node(net).net.collective;
    if (!settings.graphFile.empty()) {
      search.given = parseGraphs(settings.graphText, settings.graphFile, own);
      for (const NamedGraph& given : search.given) {
        for (const std::string& violation : validate(given.graph, domain.machine)) {
          view.notes.push_back(fmt::format("{}: {}: {}", settings.graphFile,
                                           nameOf(given.graph.pattern), violation));
        }
      }
    }
    domain.graphs = searchGraphs(domain.machine, search);
    view.domains.push_back(std::move(domain));
  }
  view.joined = joinMachines(view.domains, ranks, settings.nodes, settings.join);
  for (std::string& note : view.notes) {
    note = printable(note);
  }
  view.warnings = findWarnings(view);
  return view;
}

std::vector<NamedChannels> graphsOf(const Domain& domain) {
  const GraphSet& graphs = domain.graphs;
  const Topology* topology = &domain.machine.topology;
  return {{"ring", GraphId::ring, &graphs.ring, topology},
          {"tree", GraphId::tree, &graphs.tree, topology},
          {"collnet_chain", GraphId::collnetChain, &graphs.collnetChain, topology},
          {"collnet_direct", GraphId::collnetDirect, &graphs.collnetDirect, topology},
          {"nvls", GraphId::nvls, &graphs.nvls, topology}};
}

int wholeIndex(const View& view, const Topology& from, int index) {
  const Topology& to = view.whole.topology;
  const Node& node = from.node(index);
  const uint64_t host = from.hosts[static_cast<size_t>(node.host)];
  for (const int candidate : to.of(node.type)) {
    const Node& other = to.node(candidate);
    if (other.id == node.id && to.hosts[static_cast<size_t>(other.host)] == host &&
        other.net.name == node.net.name) {
      return candidate;
    }
  }
  throw internalError("the node {} of the search is not in the machine", from.nameOf(index));
}

namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

int findNode(const Topology& topology, const std::string& text) {
  if (const int exact = topology.find(text); exact >= 0) return exact;
  std::string wanted = lower(text);
  if (!wanted.empty() && std::all_of(wanted.begin(), wanted.end(),
                                     [](unsigned char c) { return std::isdigit(c) != 0; })) {
    wanted = "gpu" + wanted;
  }
  const BusId busId = parseBusId(text);
  std::vector<std::string> names;
  for (size_t i = 0; i < topology.nodes.size(); i++) {
    const int index = static_cast<int>(i);
    const Node& node = topology.node(index);
    const std::string name = topology.nameOf(index);
    std::string plain = lower(name);
    const bool same = plain == wanted || (node.type == NodeType::net && node.net.name == text);
    std::erase(plain, '/');
    const bool numbered =
        plain == wanted || (node.type == NodeType::net && plain.starts_with(wanted + "-"));
    const bool addressed = busId != kNoBusId && node.id == busId &&
                           (node.type == NodeType::gpu || node.type == NodeType::pci);
    if (same || numbered || addressed) return index;
    if (node.type != NodeType::pci && node.type != NodeType::nic) names.push_back(name);
  }
  throw invalidArgument("this machine has no \"{}\"", text)
      .remedy(fmt::format("It has {}.", fmt::join(names, ", ")));
}

}  // namespace unisono::topo
