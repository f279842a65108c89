// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "topo_view.h"

// `unisono topo --json`.
namespace unisono::topo {

using namespace topology;
using Json = nlohmann::ordered_json;

namespace {

Json describeNode(const Topology& topology, int index) {
  const Node& node = topology.node(index);
  Json json;
  json["name"] = topology.nameOf(index);
  json["type"] = nameOf(node.type);
  json["host"] = node.host;
  switch (node.type) {
    case NodeType::gpu:
      json["dev"] = node.gpu.dev;
      json["rank"] = node.gpu.rank;
      json["sm"] = node.gpu.sm;
      json["gdr"] = node.gpu.gdr;
      json["bus_id"] = formatBusId(node.id);
      break;
    case NodeType::net:
      json["dev"] = node.net.dev;
      json["port_name"] = node.net.name;
      json["bandwidth"] = toGigabytes(node.net.bandwidth);
      json["gdr"] = node.net.gdr;
      json["collective"] = node.net.collective;
      break;
    case NodeType::cpu:
      json["numa"] = node.cpu.numa;
      json["affinity"] = node.cpu.affinity;
      break;
    case NodeType::pci:
      json["bus_id"] = formatBusId(node.id);
      break;
    default:
      break;
  }
  Json links = Json::array();
  for (const Link& link : node.links) {
    links.push_back({{"to", topology.nameOf(link.to)},
                     {"type", nameOf(link.type)},
                     {"bandwidth", toGigabytes(link.bandwidth)}});
  }
  json["links"] = std::move(links);
  return json;
}

Json describePathTable(const Machine& machine) {
  Json paths = Json::array();
  std::vector<int> ends = machine.topology.of(NodeType::gpu);
  const auto& nets = machine.topology.of(NodeType::net);
  ends.insert(ends.end(), nets.begin(), nets.end());
  for (const int from : ends) {
    for (const int to : ends) {
      if (from == to) continue;
      const Path& path = machine.path(from, to);
      Json json = {{"from", machine.topology.nameOf(from)},
                   {"to", machine.topology.nameOf(to)},
                   {"type", nameOf(path.type)},
                   {"bandwidth", toGigabytes(path.bandwidth)},
                   {"hops", path.hops}};
      if (path.via >= 0) json["via"] = machine.topology.nameOf(path.via);
      paths.push_back(std::move(json));
    }
  }
  return paths;
}

Json describeChannels(const NamedChannels& named, size_t domain) {
  const ChannelGraph& graph = *named.graph;
  const Topology& topology = *named.topology;
  Json channels = Json::array();
  for (const Channel& channel : graph.channels) {
    Json gpus = Json::array(), ranks = Json::array();
    for (const int gpu : channel.gpus) {
      gpus.push_back(topology.nameOf(gpu));
      ranks.push_back(topology.node(gpu).gpu.rank);
    }
    Json json = {{"gpus", std::move(gpus)}, {"ranks", std::move(ranks)}};
    if (channel.netIn >= 0) json["net_in"] = topology.nameOf(channel.netIn);
    if (channel.netOut >= 0) json["net_out"] = topology.nameOf(channel.netOut);
    channels.push_back(std::move(json));
  }
  return {{"pattern", named.name},
          {"shape", nameOf(graph.pattern)},
          {"id", static_cast<int>(named.id)},
          {"domain", domain},
          {"speed_intra", toGigabytes(graph.speedIntra)},
          {"speed_inter", toGigabytes(graph.speedInter)},
          {"type_intra", nameOf(graph.typeIntra)},
          {"type_inter", nameOf(graph.typeInter)},
          {"same_channels", graph.sameChannels},
          {"cross_nic", graph.crossNic},
          {"channels", std::move(channels)}};
}

// Writes a tree as the parent of each member, -1 for the root.
Json describeJoined(const Joined& joined) {
  Json channels = Json::array();
  for (int channel = 0; channel < joined.channels(); channel++) {
    std::vector<int> parents;
    for (int rank = 0; rank < joined.ranks(); rank++) {
      parents.push_back(joined.treePlace(channel, rank).up);
    }
    channels.push_back({{"ring", joined.ringOrder(channel)},
                        {"tree", joined.treeOf(channel)},
                        {"tree_parent_of_rank", std::move(parents)}});
  }
  std::vector<int> nodeOf;
  for (int rank = 0; rank < joined.ranks(); rank++) nodeOf.push_back(joined.nodeOf(rank));
  Json chains = Json::array();
  for (int channel = 0; channel < joined.collnetChannels(); channel++) {
    Json ofNodes = Json::array();
    for (int node = 0; node < joined.nodes(); node++) {
      const auto chain = joined.collnetChain(channel, node);
      ofNodes.push_back(std::vector<int>(chain.begin(), chain.end()));
    }
    chains.push_back(std::move(ofNodes));
  }
  Json nvls = Json::array();
  for (size_t head = 0; head < joined.nvlsHeads().size(); head++) {
    const std::vector<int>& members = joined.nvlsHeads()[head];
    Json entry = {{"head_of_node", members}};
    for (const int tree : {0, 1}) {
      std::vector<int> parents;
      for (const int rank : members) {
        parents.push_back(joined.nvlsTreePlace(static_cast<int>(head), tree, rank).up);
      }
      entry[tree == 0 ? "tree_0_parent_of_node" : "tree_1_parent_of_node"] = std::move(parents);
    }
    nvls.push_back(std::move(entry));
  }
  return {{"nodes", joined.nodes()},
          {"node_of_rank", std::move(nodeOf)},
          {"channels", std::move(channels)},
          {"collnet_chain_of_node", std::move(chains)},
          {"collnet_direct_head_of_node", joined.collnetHeads()},
          {"nvls", std::move(nvls)}};
}

}  // namespace

std::string jsonText(const View& view, JoinedPart joined) {
  const Topology& topology = view.whole.topology;
  Json json;
  json["source"] = view.source;
  json["node_count"] = view.nodes;
  json["ranks"] = view.joined.ranks();
  json["notes"] = view.notes;
  json["warnings"] = view.warnings;
  json["nodes"] = Json::array();
  for (size_t i = 0; i < topology.nodes.size(); i++) {
    json["nodes"].push_back(describeNode(topology, static_cast<int>(i)));
  }
  json["paths"] = describePathTable(view.whole);
  json["graphs"] = Json::array();
  for (size_t domain = 0; domain < view.domains.size(); domain++) {
    for (const NamedChannels& named : graphsOf(view.domains[domain])) {
      if (!named.graph->channels.empty()) json["graphs"].push_back(describeChannels(named, domain));
    }
  }
  if (joined == JoinedPart::show) json["joined"] = describeJoined(view.joined);
  // Bytes of a file that are not UTF-8 must not make the JSON invalid.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace unisono::topo
