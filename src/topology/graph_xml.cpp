// SPDX-License-Identifier: Apache-2.0
#include "topology/graph_xml.h"

#include <fmt/format.h>

#include <algorithm>

#include "topology/search.h"

namespace unisono::topology {

namespace {

constexpr int kHostShift = 56;
constexpr int kMaxChannels = 1024;
constexpr double kMaxSpeed = 1e6;  // GB/s

unsigned long long identifierOf(const Topology& topology, int index) {
  const Node& node = topology.node(index);
  const int dev = node.type == NodeType::gpu ? node.gpu.dev : node.net.dev;
  return static_cast<unsigned long long>(node.host) << kHostShift |
         static_cast<unsigned long long>(dev);
}

void addDevice(XmlNode& channel, std::string_view name, const Topology& topology, int index) {
  // printf's %#x, which leaves zero without 0x.
  const unsigned long long id = identifierOf(topology, index);
  channel.addChild(name).set("dev", id == 0 ? "0" : fmt::format("{:#x}", id));
}

bool fits(GraphId id, Pattern pattern) {
  switch (id) {
    case GraphId::ring:
      return pattern == Pattern::ring;
    case GraphId::tree:
    case GraphId::collnetChain:
      return pattern == Pattern::balancedTree || pattern == Pattern::splitTree ||
             pattern == Pattern::tree;
    case GraphId::nvls:
      return pattern == Pattern::nvls;
    case GraphId::collnetDirect:
      return pattern == Pattern::collnetDirect;
  }
  return false;
}

class GraphReader {
 public:
  GraphReader(std::string_view source, const Topology& topology)
      : reader_(source), topology_(topology) {}

  std::vector<NamedGraph> read(const XmlNode& root) {
    if (root.name != "graphs") reader_.fail(root, "is the root, but it must be <graphs>");
    if (reader_.integer(root, "version", 0, INT32_MAX) != 1) {
      reader_.fail(root, "has a version other than 1");
    }
    base_ = hasBareHexadecimal(root) ? 16 : 10;
    std::vector<NamedGraph> graphs;
    for (const XmlNode& node : root.children) {
      if (node.name != "graph") reader_.fail(node, "is not allowed inside <graphs>");
      graphs.push_back(readGraph(node));
      for (size_t i = 0; i + 1 < graphs.size(); i++) {
        if (graphs[i].id == graphs.back().id) {
          reader_.fail(node,
                       fmt::format("has id {} a second time", static_cast<int>(graphs[i].id)));
        }
      }
    }
    return graphs;
  }

 private:
  NamedGraph readGraph(const XmlNode& node) {
    NamedGraph named;
    ChannelGraph& graph = named.graph;
    named.id = static_cast<GraphId>(reader_.integer(node, "id", 0, 4));
    graph.pattern = static_cast<Pattern>(reader_.integer(node, "pattern", 1, 6));
    graph.crossNic = static_cast<int>(reader_.integerOr(node, "crossnic", 0, 2, 0));
    const long long channels = reader_.integer(node, "nchannels", 0, kMaxChannels);
    graph.speedIntra = fromGigabytes(reader_.number(node, "speedintra", 0, kMaxSpeed));
    graph.speedInter = fromGigabytes(reader_.number(node, "speedinter", 0, kMaxSpeed));
    graph.latencyInterUs = reader_.numberOr(node, "latencyinter", 0, 1e9, 0);
    graph.typeIntra = pathType(node, "typeintra");
    graph.typeInter = pathType(node, "typeinter");
    graph.sameChannels = reader_.integerOr(node, "samechannels", 0, 1, 0) == 1;
    for (const XmlNode& child : node.children) {
      if (child.name != "channel") reader_.fail(child, "is not allowed inside <graph>");
      graph.channels.push_back(readChannel(child, graph.pattern));
    }
    if (static_cast<long long>(graph.channels.size()) != channels) {
      reader_.fail(node, fmt::format("says nchannels=\"{}\" and has {} channels", channels,
                                     graph.channels.size()));
    }
    if (channels == 0) return named;
    if (!fits(named.id, graph.pattern)) {
      reader_.fail(node, fmt::format("has pattern {}, which is none of the graph with id {}",
                                     static_cast<int>(graph.pattern), static_cast<int>(named.id)));
    }
    if (graph.speedIntra == 0 || graph.speedInter == 0) {
      reader_.fail(node, "has channels, but no speed");
    }
    return named;
  }

  PathType pathType(const XmlNode& node, std::string_view attribute) {
    const std::string& text = reader_.text(node, attribute);
    const auto type = pathTypeOf(text);
    if (!type) {
      reader_.fail(node, fmt::format("has {}=\"{}\", which is not a path type", attribute, text));
    }
    return *type;
  }

  // NCCL reads all numbers as hexadecimal since 2.27, and wrote decimal ones before: a
  // file that has a letter in one is of the first kind.
  static bool hasBareHexadecimal(const XmlNode& node) {
    const std::string* dev = node.find("dev");
    if (dev && dev->find_first_of("abcdefABCDEF") != std::string::npos &&
        dev->find_first_of("xX") == std::string::npos) {
      return true;
    }
    return std::any_of(node.children.begin(), node.children.end(), hasBareHexadecimal);
  }

  int device(const XmlNode& node, NodeType type) {
    reader_.text(node, "dev");
    const unsigned long long id = reader_.identifierOr(node, "dev", 0, base_);
    for (const int index : topology_.of(type)) {
      if (identifierOf(topology_, index) == id) return index;
    }
    reader_.fail(node, fmt::format("has dev \"{}\", which the topology lacks", *node.find("dev")));
  }

  Channel readChannel(const XmlNode& node, Pattern pattern) {
    Channel channel;
    for (const XmlNode& child : node.children) {
      if (child.name == "net") {
        // A file for several nodes serves one, too: there the ports are not needed, and not known.
        if (topology_.of(NodeType::net).empty()) continue;
        int& net = channel.gpus.empty() ? channel.netIn : channel.netOut;
        if (net >= 0) reader_.fail(child, "is one port too many in a channel");
        net = device(child, NodeType::net);
      } else if (child.name == "gpu") {
        const int gpu = device(child, NodeType::gpu);
        // Early dumps of NVLS fill up the channel after its head with GPU 0.
        if (pattern == Pattern::nvls && !channel.gpus.empty()) continue;
        if (std::find(channel.gpus.begin(), channel.gpus.end(), gpu) != channel.gpus.end()) {
          reader_.fail(child, "is a second time in its channel");
        }
        channel.gpus.push_back(gpu);
      } else {
        reader_.fail(child, "is not allowed inside <channel>");
      }
    }
    const size_t gpus = topology_.of(NodeType::gpu).size();
    if (pattern != Pattern::nvls && channel.gpus.size() != gpus) {
      reader_.fail(node,
                   fmt::format("has {} GPUs, the topology has {}", channel.gpus.size(), gpus));
    }
    if (channel.gpus.empty()) reader_.fail(node, "has no GPU");
    if ((channel.netIn < 0) != (channel.netOut < 0)) {
      reader_.fail(node, "enters from the network or leaves to it, but not both");
    }
    return channel;
  }

  XmlReader reader_;
  const Topology& topology_;
  int base_ = 10;  // of numbers without 0x
};

}  // namespace

std::vector<NamedGraph> namedGraphs(const GraphSet& graphs) {
  return {{GraphId::ring, graphs.ring},
          {GraphId::tree, graphs.tree},
          {GraphId::collnetDirect, graphs.collnetDirect},
          {GraphId::collnetChain, graphs.collnetChain},
          {GraphId::nvls, graphs.nvls}};
}

std::string writeGraphs(const std::vector<NamedGraph>& graphs, const Topology& topology) {
  XmlNode root;
  root.name = "graphs";
  root.set("version", "1");
  for (const NamedGraph& named : graphs) {
    const ChannelGraph& graph = named.graph;
    XmlNode& node = root.addChild("graph");
    node.set("id", std::to_string(static_cast<int>(named.id)));
    node.set("pattern", std::to_string(static_cast<int>(graph.pattern)));
    node.set("crossnic", std::to_string(graph.crossNic));
    node.set("nchannels", std::to_string(graph.channels.size()));
    node.set("speedintra", fmt::format("{:g}", toGigabytes(graph.speedIntra)));
    node.set("speedinter", fmt::format("{:g}", toGigabytes(graph.speedInter)));
    node.set("latencyinter", fmt::format("{:g}", graph.latencyInterUs));
    node.set("typeintra", std::string(nameOf(graph.typeIntra)));
    node.set("typeinter", std::string(nameOf(graph.typeInter)));
    node.set("samechannels", graph.sameChannels ? "1" : "0");
    for (const Channel& channel : graph.channels) {
      XmlNode& child = node.addChild("channel");
      if (channel.netIn >= 0) addDevice(child, "net", topology, channel.netIn);
      for (const int gpu : channel.gpus) addDevice(child, "gpu", topology, gpu);
      if (channel.netOut >= 0) addDevice(child, "net", topology, channel.netOut);
    }
  }
  return writeXml(root);
}

std::vector<NamedGraph> parseGraphs(std::string_view text, std::string_view source,
                                    const Topology& topology, const XmlLimits& limits) {
  return GraphReader(source, topology).read(parseXml(text, source, limits));
}

}  // namespace unisono::topology
