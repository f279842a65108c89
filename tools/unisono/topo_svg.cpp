#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "topo_view.h"

// `unisono topo --svg`: GPUs and network ports in one row, the PCI switches and CPUs that they hang
// at below, the NVSwitches above. Between, each channel is a line of its own colour from GPU to
// GPU.
namespace unisono::topo {

using namespace topology;

namespace {

constexpr double kBoxWidth = 84, kBoxHeight = 54, kGap = 10, kGroupGap = 14;
constexpr double kMargin = 28, kTitle = 54, kLevel = 96;
constexpr double kSwitchHeight = 34, kCpuHeight = 46;
constexpr double kLeastArc = 26, kMostArc = 210;
constexpr double kNest = 3;  // between lines of one bundle at their highest point
constexpr double kChannelRow = 19;

std::string escape(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return result;
}

std::string shorten(std::string_view text, std::size_t length) {
  return text.size() <= length ? std::string(text) : std::string(text.substr(0, length - 2)) + "..";
}

// Colours far from their neighbours: hues in turn, each second one darker.
std::string colourOf(std::size_t index, std::size_t count) {
  const double hue =
      360.0 * static_cast<double>(index) / static_cast<double>(std::max<std::size_t>(count, 1));
  return fmt::format("hsl({:.0f},{}%,{}%)", hue, index % 2 ? 72 : 82, index % 2 ? 33 : 48);
}

struct Box {
  double x = 0, y = 0, width = kBoxWidth, height = kBoxHeight;
  double center() const { return x + width / 2; }
  double bottom() const { return y + height; }
};

class Drawing {
 public:
  Drawing(const View& view, const NamedChannels& channels)
      : view_(view), topology_(view.whole.topology), channels_(channels) {}

  std::string draw() {
    placeTree();
    liftRows();
    const double below = drawTree();
    drawLinks();
    drawChannels();
    const double height = drawLegend(below);
    return header(height) + lines_ + arcs_ + boxes_ + "</svg>\n";
  }

 private:
  // Children of a node on the way from the CPU to the devices. Ports stand for their adapter.
  std::vector<int> childrenOf(int index, int parent) const {
    std::vector<int> children;
    for (const Link& link : topology_.node(index).links) {
      const NodeType type = topology_.node(link.to).type;
      if (link.to == parent || type == NodeType::cpu || type == NodeType::nvs) continue;
      if (link.type == LinkType::pci || link.type == LinkType::network ||
          link.type == LinkType::c2c || type == NodeType::nic)
        if (std::find(children.begin(), children.end(), link.to) == children.end())
          children.push_back(link.to);
    }
    std::sort(children.begin(), children.end());
    return children;
  }

  // Columns from left to right; each box above the middle of what hangs at it.
  void placeTree() {
    for (const int cpu : topology_.of(NodeType::cpu)) {
      placeBelow(cpu, -1, 0);
      cursor_ += 2 * kGroupGap;
    }
    width_ = std::max(cursor_ - 2 * kGroupGap - kGap + kMargin, 640.0);
  }

  void placeBelow(int index, int parent, int depth) {
    if (places_.contains(index)) return;
    Box& own = places_[index];
    depth_[index] = depth;
    const NodeType type = topology_.node(index).type;
    const std::vector<int> children = type == NodeType::gpu || type == NodeType::net
                                          ? std::vector<int>()
                                          : childrenOf(index, parent);
    if (children.empty() && type != NodeType::cpu) {
      own.x = cursor_;
      right_ = cursor_ + kBoxWidth;
      cursor_ += kBoxWidth + kGap;
      return;
    }
    deepest_ = std::max(deepest_, type == NodeType::nic ? depth - 1 : depth);
    const double begin = cursor_;
    double first = 0, last = 0;
    bool any = false;
    for (const int child : children) {
      if (places_.contains(child)) continue;
      placeBelow(child, index, depth + 1);
      parents_[child] = index;
      const Box& box = places_[child];
      if (!any) first = box.center();
      last = box.center();
      any = true;
    }
    if (!any) {
      own.x = cursor_;
      own.width = kBoxWidth * 2;
      cursor_ += own.width + kGap;
      return;
    }
    if (type == NodeType::pci) cursor_ += kGroupGap;
    own.width = type == NodeType::cpu
                    ? std::max(right_ - begin, kBoxWidth * 2)
                    : std::max(kBoxWidth, std::min(last - first + kBoxWidth * 0.6, 220.0));
    own.x = type == NodeType::cpu ? begin : (first + last) / 2 - own.width / 2;
    cursor_ = std::max(cursor_, own.x + own.width + kGap);
  }

  // Vertical places: devices under the arcs, switches by their depth, CPUs at the bottom.
  void liftRows() {
    double longest = 0;
    for (const Channel& channel : channels_.graph->channels)
      for (const auto& [from, to] : hopsOf(channel))
        longest = std::max(longest, std::abs(places_[from].center() - places_[to].center()));
    const double arcs = arcHeight(longest) + kNest * static_cast<double>(count()) + 26;
    const bool switches = !topology_.of(NodeType::nvs).empty();
    row_ = kMargin + kTitle + (switches ? kSwitchHeight + 12 : 0) + arcs;
    for (auto& [index, box] : places_) {
      const NodeType type = topology_.node(index).type;
      box.y = row_;
      if (type == NodeType::pci) {
        box.height = kSwitchHeight;
        box.y = row_ + kBoxHeight + 44 + (deepest_ - depth_[index]) * kLevel * 0.8;
      }
      if (type == NodeType::cpu) {
        box.height = kCpuHeight;
        box.y = row_ + kBoxHeight + 44 + deepest_ * kLevel * 0.8;
      }
    }
  }

  void line(double x1, double y1, double x2, double y2, double width, const char* colour) {
    lines_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
        "stroke-width=\"{:.1f}\"/>\n",
        x1, y1, x2, y2, colour, width);
  }

  static std::string text(double x, double y, int size, std::string_view content,
                          std::string_view more = "") {
    return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" {}>{}</text>\n", x, y,
                       size, more, escape(content));
  }

  void box(const Box& place, const char* fill, const char* edge, std::string_view title,
           const std::vector<std::string>& details) {
    boxes_ += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"6\" fill=\"{}\" "
        "stroke=\"{}\" stroke-width=\"1.4\"/>\n",
        place.x, place.y, place.width, place.height, fill, edge);
    const double lineHeight = 13, rows = 1 + static_cast<double>(details.size());
    double y = place.y + place.height / 2 - rows * lineHeight / 2 + 11;
    boxes_ += text(place.center(), y, 13, title, "text-anchor=\"middle\" font-weight=\"bold\"");
    for (const std::string& detail : details)
      boxes_ +=
          text(place.center(), y += lineHeight, 10, detail, "text-anchor=\"middle\" fill=\"#444\"");
  }

  static double thickness(Bandwidth bandwidth) {
    return std::clamp(std::sqrt(toGigabytes(bandwidth)) / 2.6, 1.0, 5.0);
  }

  Bandwidth linkBetween(int a, int b) const {
    for (const Link& link : topology_.node(a).links)
      if (link.to == b) return link.bandwidth;
    return 0;
  }

  double drawTree() {
    double below = row_ + kBoxHeight;
    for (const auto& [index, place] : places_) {
      const Node& node = topology_.node(index);
      below = std::max(below, place.bottom());
      switch (node.type) {
        case NodeType::gpu:
          box(place, "#d9f0d3", "#3b7d2e", fmt::format("GPU {}", node.gpu.dev),
              {formatBusId(node.id), fmt::format("rank {}", node.gpu.rank)});
          break;
        case NodeType::net:
          box(place, "#fde7c8", "#b9770e", fmt::format("NET {}", node.net.dev),
              {shorten(node.net.name, 13),
               fmt::format("{:g} GB/s", toGigabytes(node.net.bandwidth))});
          break;
        case NodeType::pci:
          box(place, "#e3e6ea", "#5f6a76", "PCI switch", {formatBusId(node.id)});
          break;
        case NodeType::cpu:
          box(place, "#d6e6f7", "#2f6399",
              node.cpu.numa < 0 ? "CPU" : fmt::format("CPU, NUMA node {}", node.cpu.numa),
              {topology_.hosts.size() > 1 ? fmt::format("host {}", node.host) : cpuText(node.cpu)});
          break;
        case NodeType::nic:
          if (!isParent(index)) box(place, "#fde7c8", "#b9770e", "NIC", {"no port in use"});
          break;
        case NodeType::nvs:
          break;
      }
    }
    for (const auto& [child, parent] : parents_) connectToParent(child, parent);
    return below;
  }

  static std::string cpuText(const CpuInfo& cpu) {
    switch (cpu.vendor) {
      case CpuVendor::intel:
        return fmt::format("Intel, model {}", cpu.model);
      case CpuVendor::amd:
        return fmt::format("AMD, model {}", cpu.model);
      case CpuVendor::zhaoxin:
        return fmt::format("Zhaoxin, model {}", cpu.model);
      case CpuVendor::unknown:
        break;
    }
    return cpu.architecture == CpuArchitecture::arm     ? "Arm"
           : cpu.architecture == CpuArchitecture::power ? "POWER"
                                                        : "unknown processor";
  }

  bool isParent(int index) const {
    return std::any_of(parents_.begin(), parents_.end(),
                       [&](const auto& entry) { return entry.second == index; });
  }

  // A port is drawn for its adapter: its line goes to what the adapter hangs at.
  void connectToParent(int child, int parent) {
    const Node& node = topology_.node(child);
    if (node.type == NodeType::nic && isParent(child)) return;
    Bandwidth bandwidth = linkBetween(child, parent);
    if (topology_.node(parent).type == NodeType::nic) {
      const auto above = parents_.find(parent);
      if (above == parents_.end()) return;
      bandwidth = linkBetween(parent, above->second);
      parent = above->second;
    }
    const Box& low = places_[parent];
    const Box& high = places_[child];
    const double x = high.center();
    const double foot = std::clamp(x, low.x + 8, low.x + low.width - 8);
    line(x, high.bottom(), foot, low.y, thickness(bandwidth), "#8a949e");
    if (bandwidth >= kLocalBandwidth) return;
    const std::string label = fmt::format("{:g}", toGigabytes(bandwidth));
    boxes_ += text((x + foot) / 2 + 5, high.bottom() + 15, 10, label, "fill=\"#5f6a76\"");
  }

  void drawLinks() {
    const auto& cpus = topology_.of(NodeType::cpu);
    for (std::size_t i = 0; i + 1 < cpus.size(); ++i) {
      const Box& left = places_[cpus[i]];
      const Box& right = places_[cpus[i + 1]];
      const Bandwidth bandwidth = linkBetween(cpus[i], cpus[i + 1]);
      if (bandwidth == 0) continue;
      const double y = left.y + left.height / 2;
      line(left.x + left.width, y, right.x, y, thickness(bandwidth), "#2f6399");
      boxes_ += text((left.x + left.width + right.x) / 2, y - 5, 10,
                     fmt::format("{:g}", toGigabytes(bandwidth)),
                     "text-anchor=\"middle\" fill=\"#2f6399\"");
    }
    const auto& gpus = topology_.of(NodeType::gpu);
    for (const int nvs : topology_.of(NodeType::nvs)) drawSwitch(nvs, gpus);
    for (const int gpu : gpus)
      for (const Link& link : topology_.node(gpu).links)
        if (link.type == LinkType::nvlink && topology_.node(link.to).type == NodeType::gpu &&
            link.to > gpu)
          arc(places_[gpu].center(), places_[link.to].center(), -8, "#b9c2b4",
              thickness(link.bandwidth) + 1, false);
  }

  void drawSwitch(int nvs, const std::vector<int>& gpus) {
    Box bar;
    bar.y = kMargin + kTitle;
    bar.height = kSwitchHeight;
    bar.x = width_;
    double end = 0;
    Bandwidth each = 0;
    for (const int gpu : gpus) {
      const Bandwidth bandwidth = linkBetween(gpu, nvs);
      if (bandwidth == 0) continue;
      each = std::max(each, bandwidth);
      bar.x = std::min(bar.x, places_[gpu].x);
      end = std::max(end, places_[gpu].x + kBoxWidth);
      line(places_[gpu].center(), row_, places_[gpu].center(), bar.bottom(), thickness(bandwidth),
           "#d5dbd2");
    }
    bar.width = end - bar.x;
    box(bar, "#eef5ea", "#3b7d2e",
        fmt::format("NVSwitch, {:g} GB/s to each GPU", toGigabytes(each)), {});
  }

  std::size_t count() const { return channels_.graph->channels.size(); }

  static double arcHeight(double distance) {
    return std::min(kLeastArc + 0.2 * distance, kMostArc);
  }

  // From device to device, by numbers of the whole machine.
  std::vector<std::pair<int, int>> hopsOf(const Channel& channel) const {
    std::vector<int> stops;
    if (channel.netIn >= 0) stops.push_back(wholeIndex(view_, *channels_.topology, channel.netIn));
    for (const int gpu : channel.gpus) stops.push_back(wholeIndex(view_, *channels_.topology, gpu));
    std::vector<std::pair<int, int>> hops;
    const bool ring = channels_.graph->pattern == Pattern::ring;
    const bool star = channels_.graph->pattern == Pattern::collnetDirect;
    const std::size_t head = channel.netIn >= 0 ? 1 : 0;
    for (std::size_t i = 1; i < stops.size(); ++i)
      hops.emplace_back(star && i > head ? stops[head] : stops[i - 1], stops[i]);
    if (channel.netOut >= 0 && ring)
      hops.emplace_back(stops.back(), wholeIndex(view_, *channels_.topology, channel.netOut));
    else if (ring && stops.size() > 1)
      hops.emplace_back(stops.back(), stops.front());
    return hops;
  }

  void arc(double from, double to, double rise, std::string_view colour, double width, bool arrow) {
    const double radius = std::abs(to - from) / 2;
    const double height = arcHeight(2 * radius) + rise;
    const double top = row_ - (arrow ? 6 : 0);
    arcs_ += fmt::format(
        "<path d=\"M{:.1f} {:.1f} A{:.1f} {:.1f} 0 0 {} {:.1f} {:.1f}\" fill=\"none\" "
        "stroke=\"{}\" stroke-width=\"{:.1f}\"/>\n",
        from, row_, radius, height, to > from ? 1 : 0, to, top, colour, width);
    if (arrow)
      arcs_ += fmt::format("<path d=\"M{:.1f} {:.1f} l-2.6 -6.5 h5.2 z\" fill=\"{}\"/>\n", to, row_,
                           colour);
  }

  // NVLS: the switch gathers from and spreads to all GPUs what the head gives it.
  void riseToSwitch(int head, double x, std::string_view colour) {
    const double top = kMargin + kTitle + kSwitchHeight;
    arcs_ += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f} V{2:.1f}\" stroke=\"{3}\" stroke-width=\"3\"/>\n"
        "<path d=\"M{0:.1f} {2:.1f} l-5 9 h10 z\" fill=\"{3}\"/>\n"
        "<path d=\"M{0:.1f} {1:.1f} l-5 -9 h10 z\" fill=\"{3}\"/>\n",
        places_[head].center() + x, row_, top, colour);
  }

  // A bundle of lines leaves a box by the side towards its goal, in such an order that lines of
  // one bundle do not cross.
  void drawChannels() {
    const std::size_t channels = count();
    const double step = (kBoxWidth / 2 - 6) / std::max<double>(static_cast<double>(channels), 1);
    for (std::size_t i = 0; i < channels; ++i) {
      const double offset = 3 + step * (static_cast<double>(i) + 0.25);
      if (channels_.graph->pattern == Pattern::nvls)
        riseToSwitch(
            wholeIndex(view_, *channels_.topology, channels_.graph->channels[i].gpus.front()),
            (i % 2 ? 1 : -1) * offset / 2, colourOf(i, channels));
      for (const auto& [from, to] : hopsOf(channels_.graph->channels[i])) {
        const double side = places_[to].center() > places_[from].center() ? 1 : -1;
        arc(places_[from].center() + side * (offset + step / 2),
            places_[to].center() - side * offset, kNest * static_cast<double>(channels - 1 - i),
            colourOf(i, channels), channels > 12 ? 1.4 : 1.9, true);
      }
    }
  }

  double drawLegend(double below) {
    const ChannelGraph& graph = *channels_.graph;
    double y = below + 34;
    boxes_ +=
        text(kMargin, y, 14,
             fmt::format("{}{}: {} of {:g} GB/s inside ({}){}", channels_.name,
                         view_.domains.size() > 1
                             ? fmt::format(" in the first of {} groups of GPUs that only the "
                                           "network joins",
                                           view_.domains.size())
                             : std::string(),
                         counted(count(), "channel"), toGigabytes(graph.speedIntra),
                         nameOf(graph.typeIntra),
                         graph.channels.front().netIn >= 0
                             ? fmt::format(", {:g} GB/s to the network ({})",
                                           toGigabytes(graph.speedInter), nameOf(graph.typeInter))
                             : std::string()),
             "font-weight=\"bold\"");
    std::vector<std::string> rows;
    std::size_t longest = 0;
    for (const Channel& channel : graph.channels) {
      std::string row;
      const auto name = [&](int net) {
        return fmt::format("NET {}", channels_.topology->node(net).net.dev);
      };
      if (channel.netIn >= 0) row += name(channel.netIn) + " > ";
      for (std::size_t i = 0; i < channel.gpus.size(); ++i)
        row += fmt::format("{}{}", i ? " " : "", channels_.topology->node(channel.gpus[i]).gpu.dev);
      if (channel.netOut >= 0) row += " > " + name(channel.netOut);
      longest = std::max(longest, row.size());
      rows.push_back(std::move(row));
    }
    const double column = 80 + 7.4 * static_cast<double>(longest);
    const auto columns =
        static_cast<std::size_t>(std::clamp((width_ - 2 * kMargin) / column, 1.0, 4.0));
    const std::size_t perColumn = (rows.size() + columns - 1) / columns;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t columnsBefore = i / perColumn;
      const double x = kMargin + column * static_cast<double>(columnsBefore);
      const double rowY = y + 8 + kChannelRow * static_cast<double>(i % perColumn + 1);
      boxes_ += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"22\" height=\"6\" rx=\"3\" fill=\"{}\"/>\n", x,
          rowY - 7, colourOf(i, rows.size()));
      boxes_ += text(x + 30, rowY, 12, fmt::format("{}:", i));
      boxes_ += text(x + 54, rowY, 12, rows[i]);
    }
    return y + 8 + kChannelRow * static_cast<double>(perColumn) + kMargin;
  }

  std::string header(double height) const {
    std::string result = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
        "width=\"{0:.0f}\" height=\"{1:.0f}\" font-family=\"DejaVu Sans, Arial, sans-serif\">\n"
        "<title>{2}</title>\n<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
        width_, height, escape(view_.source));
    result += text(kMargin, kMargin + 10, 18, shorten(view_.source, 80), "font-weight=\"bold\"");
    result += text(kMargin, kMargin + 30, 12,
                   fmt::format("{}, {}{}; figures at lines are GB/s in each direction",
                               counted(topology_.of(NodeType::gpu).size(), "GPU"),
                               counted(topology_.of(NodeType::net).size(), "network port"),
                               view_.nodes > 1 ? fmt::format(", one of {} such nodes", view_.nodes)
                                               : std::string(", alone")),
                   "fill=\"#444\"");
    return result;
  }

  const View& view_;
  const Topology& topology_;
  const NamedChannels& channels_;
  std::map<int, Box> places_;
  std::map<int, int> depth_, parents_;
  double cursor_ = kMargin;
  double right_ = 0;  // edge of the last device that was placed
  double width_ = 0;
  double row_ = 0;  // top of the row of devices
  int deepest_ = 0;
  std::string lines_, arcs_, boxes_;
};

}  // namespace

std::string svgText(const View& view, std::string_view pattern) {
  std::string names;
  for (const NamedChannels& named : graphsOf(view.domains.front())) {
    if (named.name == pattern && !named.graph->channels.empty()) return Drawing(view, named).draw();
    if (!named.graph->channels.empty())
      names += fmt::format("{}{}", names.empty() ? "" : ", ", named.name);
  }
  throw invalidArgument("there are no channels of the pattern \"{}\" to draw", pattern)
      .remedy(fmt::format("This machine has {}.", names));
}

}  // namespace unisono::topo
