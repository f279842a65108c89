// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "base/error.h"
#include "topo_view.h"

// `unisono topo --svg`. A tile for each host: the NVSwitches on top, then the GPUs, the network
// ports, PCI switches and CPUs in rows below each other. Each distinct channel is a line of its own
// colour: arcs above the GPUs, and between ports and GPUs where it uses the network. A hop to a GPU
// of another tile rises to the NVSwitches and comes down there.
namespace unisono::topo {

using namespace topology;

namespace {

constexpr double kMinBox = 84, kMaxBox = 150, kGpuHeight = 54, kPortHeight = 46;
constexpr double kGap = 10, kGroupGap = 14, kMargin = 28;
constexpr double kStrip =
    18;  // left of each port, for the line from the GPU above it to its switch
constexpr double kSwitchHeight = 34, kCpuHeight = 46, kLevel = 76;
constexpr double kMinArc = 26, kMaxArc = 210;
constexpr double kNest = 3;  // between lines of one bundle at their highest point
constexpr double kLegendRow = 19;
constexpr double kFullWidth = 1240;  // boxes of small machines are widened up to this
constexpr double kMaxWidth = 1800;   // tiles are wrapped beyond this
constexpr double kCharacter = 6.8;   // mean width at font size 12

constexpr const char* kPciColour = "#8a949e";
constexpr const char* kChipColour = "#7b4fb5";
constexpr const char* kCpuColour = "#2f6399";
constexpr const char* kNvlinkColour = "#b9c9b2";

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
        result += c;
    }
  }
  return result;
}

// Cuts a text, never inside a UTF-8 sequence.
std::string shorten(std::string_view text, size_t length) {
  if (text.size() <= length) return std::string(text);
  size_t end = length - 2;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) end--;
  return std::string(text.substr(0, end)) + "..";
}

// Hues far from their neighbours' in turn, every second one darker.
std::string colourOf(size_t index, size_t count) {
  const double hue =
      360.0 * static_cast<double>(index) / static_cast<double>(std::max<size_t>(count, 1));
  return fmt::format("hsl({:.0f},{}%,{}%)", hue, index % 2 ? 72 : 82, index % 2 ? 33 : 45);
}

std::string text(double x, double y, int size, std::string_view content,
                 std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" {}>{}</text>\n", x, y, size,
                     more, escape(content));
}

double thickness(Bandwidth bandwidth) {
  return std::clamp(std::sqrt(toGigabytes(bandwidth)) / 2.6, 1.0, 5.0);
}

std::string gigabytes(Bandwidth bandwidth) {
  return fmt::format("{:g}", toGigabytes(bandwidth));
}

std::string cpuText(const CpuInfo& cpu) {
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

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  double center() const { return x + width / 2; }
  double right() const { return x + width; }
  double bottom() const { return y + height; }
};

// A line of a channel between a port and a GPU.
struct PortLine {
  int port, gpu;
  bool enters;  // from the port to the GPU
  size_t group;
  double portX = 0, gpuX = 0;
};

class Drawing {
 public:
  Drawing(const View& view, const NamedChannels& channels)
      : view_(view),
        topology_(view.whole.topology),
        channels_(channels),
        graph_(*channels.graph),
        groups_(equalChannels(graph_)) {}

  std::string draw() {
    collectLines();
    placeColumns();
    placeRows();
    drawHeader();
    drawBoxes();
    drawLinks();
    drawHops();
    drawPortLines();
    drawLegend();
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
               "width=\"{0:.0f}\" height=\"{1:.0f}\" "
               "font-family=\"DejaVu Sans, Arial, sans-serif\">\n"
               "<title>{2}</title>\n<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#fff\"/>\n",
               width_, height_, escape(view_.source)) +
           lines_ + arcs_ + boxes_ + "</svg>\n";
  }

 private:
  const Channel& channelOf(size_t group) const {
    return graph_.channels[static_cast<size_t>(groups_[group].front())];
  }
  int whole(int index) const { return wholeIndex(view_, *channels_.topology, index); }
  int hostOf(int index) const { return topology_.node(index).host; }

  // The hops between GPUs and the lines between ports and GPUs, by numbers of the whole machine.
  void collectLines() {
    for (size_t group = 0; group < groups_.size(); group++) {
      const Channel& channel = channelOf(group);
      std::vector<int> gpus;
      for (const int gpu : channel.gpus) gpus.push_back(whole(gpu));
      const bool star = graph_.pattern == Pattern::collnetDirect;
      for (size_t i = 1; i < gpus.size(); i++) {
        hops_.push_back({star ? gpus[0] : gpus[i - 1], gpus[i], group});
      }
      const bool closed = graph_.pattern == Pattern::ring && channel.netOut < 0;
      if (closed && gpus.size() > 1) hops_.push_back({gpus.back(), gpus.front(), group});
      const NetworkGpus ends = networkGpus(graph_.pattern, channel);
      if (channel.netIn >= 0) {
        portLines_.push_back({whole(channel.netIn), whole(ends.receives), true, group});
      }
      if (channel.netOut >= 0) {
        portLines_.push_back({whole(channel.netOut), whole(ends.sends), false, group});
      }
    }
    for (const PortLine& line : portLines_) usedPorts_.push_back(line.port);
  }

  // Children of a node on the path from the CPU to the devices.
  std::vector<int> childrenOf(int index, int parent) const {
    std::vector<int> children;
    for (const Link& link : topology_.node(index).links) {
      const NodeType type = topology_.node(link.to).type;
      if (link.to == parent || type == NodeType::cpu || type == NodeType::nvs) continue;
      if (link.type != LinkType::pci && link.type != LinkType::network &&
          link.type != LinkType::c2c && type != NodeType::nic) {
        continue;
      }
      if (std::find(children.begin(), children.end(), link.to) == children.end()) {
        children.push_back(link.to);
      }
    }
    std::sort(children.begin(), children.end());
    return children;
  }

  // Places boxes from left to right, host by host, and wraps the tiles.
  void placeColumns() {
    const bool several = topology_.hosts.size() > 1;
    const size_t columns =
        std::max(topology_.of(NodeType::gpu).size(), topology_.of(NodeType::net).size());
    box_ = several ? kMinBox
                   : std::clamp(kFullWidth / static_cast<double>(std::max<size_t>(columns, 1)) -
                                    kGap - kGroupGap,
                                kMinBox, kMaxBox);
    tiles_.resize(topology_.hosts.size());
    double x = kMargin;
    int row = 0;
    for (size_t host = 0; host < tiles_.size(); host++) {
      cursor_ = 0;
      for (const int cpu : topology_.of(NodeType::cpu)) {
        if (hostOf(cpu) != static_cast<int>(host)) continue;
        placeBelow(cpu, -1, 0);
        cursor_ += 2 * kGroupGap;
      }
      Tile& tile = tiles_[host];
      tile.width = std::max(cursor_ - 2 * kGroupGap - kGap, 0.0);
      if (x > kMargin && x + tile.width > kMaxWidth - kMargin) {
        x = kMargin;
        row++;
      }
      tile.x = x;
      tile.row = row;
      x += tile.width + 4 * kGroupGap;
      width_ = std::max(width_, tile.x + tile.width + kMargin);
    }
    width_ = std::max(width_, 760.0);
    for (auto& [index, box] : places_) box.x += tiles_[static_cast<size_t>(hostOf(index))].x;
  }

  void placeBelow(int index, int parent, int depth) {
    if (places_.contains(index)) return;
    Box& own = places_[index];
    depth_[index] = depth;
    deepest_ = std::max(deepest_, depth);
    const double begin = cursor_;
    std::vector<int> gpus, ports, switches;
    for (const int child : childrenOf(index, parent)) {
      if (places_.contains(child)) continue;
      parents_[child] = index;
      switch (topology_.node(child).type) {
        case NodeType::gpu:
          gpus.push_back(child);
          break;
        case NodeType::nic:
          addPorts(child, index, ports);
          break;
        default:
          switches.push_back(child);
      }
    }
    const size_t columns = std::max(gpus.size(), ports.size());
    for (size_t i = 0; i < columns; i++) {
      if (i < gpus.size()) places_[gpus[i]] = {cursor_, 0, box_, kGpuHeight};
      if (i < ports.size()) {
        places_[ports[i]] = {cursor_ + kStrip, 0, box_ - kStrip, kPortHeight};
      }
      cursor_ += box_ + kGap;
    }
    for (const int child : switches) placeBelow(child, index, depth + 1);
    if (cursor_ == begin) cursor_ += 2 * kMinBox + kGap;
    const double extent = cursor_ - kGap - (switches.empty() ? 0 : kGroupGap) - begin;
    if (topology_.node(index).type == NodeType::cpu) {
      own = {begin, 0, std::max(extent, 2 * kMinBox), kCpuHeight};
    } else {
      own = {begin, 0, extent, kSwitchHeight};
      cursor_ += kGroupGap;
    }
    cursor_ = std::max(cursor_, own.right() + kGap);
  }

  // The ports of an adapter stand for it; an adapter without any stands for itself.
  void addPorts(int nic, int parent, std::vector<int>& ports) {
    const std::vector<int> children = childrenOf(nic, parent);
    for (const int port : children) parents_[port] = parent;
    if (children.empty()) {
      ports.push_back(nic);
    } else {
      ports.insert(ports.end(), children.begin(), children.end());
      parents_.erase(nic);
    }
    for (const int port : children) adapterOf_[port] = nic;
  }

  bool sameTile(int a, int b) const { return hostOf(a) == hostOf(b); }

  void placeRows() {
    double longest = 0;
    for (const Hop& hop : hops_) {
      if (sameTile(hop.from, hop.to)) {
        longest =
            std::max(longest, std::abs(places_[hop.from].center() - places_[hop.to].center()));
      }
    }
    const bool nvswitch = !topology_.of(NodeType::nvs).empty();
    const bool ports = !topology_.of(NodeType::net).empty() || !topology_.of(NodeType::nic).empty();
    size_t mostCpus = 1;
    std::map<int, size_t> cpusOf;
    for (const int cpu : topology_.of(NodeType::cpu)) {
      mostCpus = std::max(mostCpus, ++cpusOf[hostOf(cpu)]);
    }
    switchY_ = topology_.hosts.size() > 1 ? 22 : 0;
    gpuY_ = switchY_ + (nvswitch ? kSwitchHeight + 12 : 0) + arcHeight(longest) +
            kNest * static_cast<double>(groups_.size()) + 16;
    portY_ = gpuY_ + kGpuHeight + (portLines_.empty() ? 34 : 78);
    leafBottom_ = ports ? portY_ + kPortHeight : gpuY_ + kGpuHeight;
    const double cpuY = leafBottom_ + 36 + deepest_ * kLevel;
    tileHeight_ = cpuY + kCpuHeight + (mostCpus > 2 ? 16.0 * static_cast<double>(mostCpus) : 14);
    headerHeight_ = kMargin + 66 + 17 * static_cast<double>(headerLines().size());
    for (auto& [index, box] : places_) {
      const NodeType type = topology_.node(index).type;
      double y = cpuY;
      if (type == NodeType::gpu) y = gpuY_;
      if (type == NodeType::net || type == NodeType::nic) y = portY_;
      if (type == NodeType::pci) y = leafBottom_ + 36 + (deepest_ - depth_[index]) * kLevel;
      box.y = tileY(hostOf(index)) + y;
    }
    below_ = tileY(static_cast<int>(tiles_.size()) - 1) + tileHeight_;
  }

  double tileY(int host) const {
    return headerHeight_ + tiles_[static_cast<size_t>(host)].row * (tileHeight_ + 30);
  }

  std::vector<std::string> headerLines() const {
    std::vector<std::string> result;
    const size_t columns = static_cast<size_t>((width_ - 2 * kMargin) / kCharacter);
    for (const std::string& warning : view_.warnings) {
      std::istringstream stream(wrapped("warning: " + warning, 0, columns));
      for (std::string line; std::getline(stream, line);) result.push_back(line);
    }
    return result;
  }

  void drawHeader() {
    boxes_ += text(kMargin, kMargin + 10, 18, shorten(view_.source, 80), "font-weight=\"bold\"");
    boxes_ +=
        text(kMargin, kMargin + 30, 12,
             fmt::format("{}, {}{}; numbers at lines are GB/s per direction",
                         counted(topology_.of(NodeType::gpu).size(), "GPU"),
                         counted(topology_.of(NodeType::net).size(), "NET port"),
                         view_.nodes > 1 ? fmt::format(", one of {} such machines", view_.nodes)
                                         : std::string()),
             "fill=\"#444\"");
    std::string totals =
        fmt::format("{}: {} per direction between GPUs ({})", channels_.name,
                    totalText(graph_.channels.size(), graph_.speedIntra), nameOf(graph_.typeIntra));
    if (graph_.channels.front().netIn >= 0) {
      totals += fmt::format(", {:g} GB/s to the network ({})", toGigabytes(graph_.totalInter()),
                            nameOf(graph_.typeInter));
    }
    boxes_ += text(kMargin, kMargin + 50, 13, totals, "font-weight=\"bold\"");
    double y = kMargin + 69;
    for (const std::string& line : headerLines()) {
      boxes_ += text(kMargin, y, 12, line, "fill=\"#b00020\"");
      y += 17;
    }
  }

  void line(double x1, double y1, double x2, double y2, double width, std::string_view colour) {
    lines_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
        "stroke-width=\"{:.1f}\"/>\n",
        x1, y1, x2, y2, colour, width);
  }

  void label(double x, double y, std::string_view content, std::string_view colour,
             std::string_view anchor = "start") {
    boxes_ +=
        text(x, y, 10, content, fmt::format("fill=\"{}\" text-anchor=\"{}\"", colour, anchor));
  }

  void box(const Box& place, const char* fill, const char* edge, std::string_view title,
           const std::vector<std::string>& details, bool used = true) {
    boxes_ += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"6\" fill=\"{}\" "
        "stroke=\"{}\" stroke-width=\"1.4\"{}/>\n",
        place.x, place.y, place.width, place.height, used ? fill : "#f6f6f6",
        used ? edge : "#9a9a9a", used ? "" : " stroke-dasharray=\"4 3\"");
    const double lineHeight = 13, rows = 1 + static_cast<double>(details.size());
    double y = place.y + place.height / 2 - rows * lineHeight / 2 + 11;
    boxes_ += text(place.center(), y, 13, title, "text-anchor=\"middle\" font-weight=\"bold\"");
    for (const std::string& detail : details) {
      y += lineHeight;
      boxes_ += text(place.center(), y, 10, detail, "text-anchor=\"middle\" fill=\"#444\"");
    }
  }

  void drawBoxes() {
    if (tiles_.size() > 1) {
      for (size_t host = 0; host < tiles_.size(); host++) {
        boxes_ += text(tiles_[host].x, tileY(static_cast<int>(host)) + 12, 13,
                       fmt::format("host {}", host), "font-weight=\"bold\"");
      }
    }
    for (const auto& [index, place] : places_) {
      const Node& node = topology_.node(index);
      const bool used = std::find(usedPorts_.begin(), usedPorts_.end(), index) != usedPorts_.end();
      switch (node.type) {
        case NodeType::gpu:
          box(place, "#d9f0d3", "#3b7d2e", fmt::format("GPU {}", node.gpu.dev),
              {formatBusId(node.id),
               node.gpu.rank < 0 ? "no rank" : fmt::format("rank {}", node.gpu.rank)});
          break;
        case NodeType::net:
          box(place, "#fde7c8", "#b9770e", fmt::format("NET {}", node.net.dev),
              {shorten(node.net.name, static_cast<size_t>(place.width / 6)),
               gigabytes(node.net.bandwidth) + " GB/s"},
              used);
          break;
        case NodeType::pci:
          box(place, "#e3e6ea", "#5f6a76", place.width < 96 ? "PCI" : "PCI switch",
              {formatBusId(node.id)});
          break;
        case NodeType::cpu:
          box(place, "#d6e6f7", "#2f6399",
              node.cpu.numa < 0 ? "CPU" : fmt::format("CPU, NUMA node {}", node.cpu.numa),
              {cpuText(node.cpu)});
          break;
        case NodeType::nic:
          box(place, "#fde7c8", "#b9770e", "NIC", {"no port"}, false);
          break;
        case NodeType::nvs:
          break;
      }
    }
  }

  Bandwidth linkBetween(int a, int b, LinkType type) const {
    for (const Link& link : topology_.node(a).links) {
      if (link.to == b && link.type == type) return link.bandwidth;
    }
    return 0;
  }

  void drawLinks() {
    for (const auto& [child, parent] : parents_) {
      if (places_.contains(child)) connectToParent(child, parent);
    }
    drawCpuLinks();
    const auto& gpus = topology_.of(NodeType::gpu);
    for (const int nvs : topology_.of(NodeType::nvs)) drawNvSwitch(nvs, gpus);
    for (const int gpu : gpus) {
      for (const Link& link : topology_.node(gpu).links) {
        if (link.type != LinkType::nvlink || link.to <= gpu ||
            topology_.node(link.to).type != NodeType::gpu || !sameTile(gpu, link.to)) {
          continue;
        }
        arc(places_[gpu].center(), places_[link.to].center(), places_[gpu].y, -8, kNvlinkColour,
            thickness(link.bandwidth) + 1);
      }
    }
  }

  // Down past the row of ports, then to the nearest place on the parent's upper edge.
  void connect(double x, const Box& high, const Box& low, Bandwidth bandwidth,
               std::string_view colour, double labelX, double labelY) {
    const double turn = std::max(high.bottom(), low.y - 22);
    const double foot = std::clamp(x, low.x + 4, low.right() - 4);
    line(x, high.bottom(), x, turn, thickness(bandwidth), colour);
    line(x, turn, foot, low.y, thickness(bandwidth), colour);
    if (bandwidth < kLocalBandwidth) label(labelX, labelY, gigabytes(bandwidth), colour);
  }

  void connectToParent(int child, int parent) {
    const Box &high = places_[child], &low = places_[parent];
    const NodeType type = topology_.node(child).type;
    if (type == NodeType::gpu) {
      const double y = high.bottom() + 12;
      if (const Bandwidth pci = linkBetween(child, parent, LinkType::pci); pci > 0) {
        connect(high.x + 5, high, low, pci, kPciColour, high.x + kStrip, y);
      }
      for (const Link& link : topology_.node(child).links) {
        if (link.type != LinkType::c2c) continue;
        connect(high.x + 12, high, places_[link.to], link.bandwidth, kChipColour, high.x + kStrip,
                y + 12);
      }
      return;
    }
    const auto adapter = adapterOf_.find(child);
    const int top = adapter == adapterOf_.end() ? child : adapter->second;
    Bandwidth bandwidth = linkBetween(top, parent, LinkType::pci);
    if (bandwidth == 0) bandwidth = kLocalBandwidth;
    connect(high.center(), high, low, bandwidth, kPciColour, high.center() + 4, high.bottom() + 13);
  }

  // Neighbours are connected directly, others by lines below the row. Where all links of a host are
  // equal, the number is written once.
  void drawCpuLinks() {
    for (size_t host = 0; host < tiles_.size(); host++) {
      std::vector<int> cpus;
      for (const int cpu : topology_.of(NodeType::cpu)) {
        if (hostOf(cpu) == static_cast<int>(host)) cpus.push_back(cpu);
      }
      std::vector<Bandwidth> all;
      for (size_t i = 0; i < cpus.size(); i++) {
        for (size_t j = i + 1; j < cpus.size(); j++) {
          all.push_back(linkBetween(cpus[i], cpus[j], LinkType::system));
        }
      }
      const bool equal =
          std::all_of(all.begin(), all.end(), [&](Bandwidth b) { return b == all[0]; });
      const bool once = equal && all.size() > 1;
      for (size_t i = 0; i < cpus.size(); i++) {
        for (size_t j = i + 1; j < cpus.size(); j++) {
          drawCpuLink(cpus[i], cpus[j], static_cast<int>(j - i), !once);
        }
      }
      if (once && all[0] > 0) {
        label(tiles_[host].x, tileY(static_cast<int>(host)) + tileHeight_,
              fmt::format("between any two CPUs: {} GB/s", gigabytes(all[0])), kCpuColour);
      }
    }
  }

  void drawCpuLink(int a, int b, int distance, bool labelled) {
    const Bandwidth bandwidth = linkBetween(a, b, LinkType::system);
    if (bandwidth == 0) return;
    const Box &left = places_[a], &right = places_[b];
    const double width = thickness(bandwidth);
    double x = (left.right() + right.x) / 2, y = left.y + left.height / 2;
    if (distance == 1) {
      line(left.right(), y, right.x, y, width, kCpuColour);
    } else {
      // Each distance has a level and feet of its own.
      const double step = 14.0 * (distance - 1);
      const double from = left.center() + step, to = right.center() - step;
      const double level = left.bottom() + step;
      lines_ += fmt::format(
          "<path d=\"M{0:.1f} {1:.1f} V{2:.1f} H{3:.1f} V{1:.1f}\" fill=\"none\" stroke=\"{4}\" "
          "stroke-width=\"{5:.1f}\"/>\n",
          from, left.bottom(), level, to, kCpuColour, width);
      x = (from + to) / 2;
      y = level;
    }
    if (labelled) label(x, y - 4, gigabytes(bandwidth), kCpuColour, "middle");
  }

  // A bar above each row of tiles; all of them are the same switches.
  void drawNvSwitch(int nvs, const std::vector<int>& gpus) {
    const int rows = tiles_.back().row + 1;
    for (int row = 0; row < rows; row++) {
      Box bar{width_, 0, 0, kSwitchHeight};
      double end = 0;
      Bandwidth low = 0, high = 0;
      for (const int gpu : gpus) {
        const Bandwidth bandwidth = linkBetween(gpu, nvs, LinkType::nvlink);
        if (bandwidth == 0 || tiles_[static_cast<size_t>(hostOf(gpu))].row != row) continue;
        low = low == 0 ? bandwidth : std::min(low, bandwidth);
        high = std::max(high, bandwidth);
        bar.y = tileY(hostOf(gpu)) + switchY_;
        const Box& place = places_[gpu];
        bar.x = std::min(bar.x, place.x);
        end = std::max(end, place.right());
        line(place.center(), place.y, place.center(), bar.bottom(), thickness(bandwidth),
             "#d5dbd2");
      }
      if (end == 0) continue;
      bar.width = end - bar.x;
      box(bar, "#eef5ea", "#3b7d2e",
          fmt::format("{}NVSwitch, {} GB/s to each GPU", row > 0 ? "the same " : "",
                      low == high ? gigabytes(low)
                                  : fmt::format("{} to {}", gigabytes(low), gigabytes(high))),
          {});
    }
  }

  static double arcHeight(double distance) { return std::min(kMinArc + 0.2 * distance, kMaxArc); }

  // A triangle with its tip at (x, y), pointing down (1) or up (-1).
  void arrowHead(double x, double y, int direction, std::string_view colour) {
    arcs_ += fmt::format("<path d=\"M{:.1f} {:.1f} l{:.1f} {:.1f} h{:.1f} z\" fill=\"{}\"/>\n", x,
                         y, -headWidth() / 2, -direction * 10.0, headWidth(), colour);
  }

  void arc(double from, double to, double y, double rise, std::string_view colour, double width,
           double top = 0) {
    const double radius = std::abs(to - from) / 2;
    const double height = arcHeight(2 * radius) + rise;
    arcs_ += fmt::format(
        "<path d=\"M{:.1f} {:.1f} A{:.1f} {:.1f} 0 0 {} {:.1f} {:.1f}\" fill=\"none\" "
        "stroke=\"{}\" stroke-width=\"{:.1f}\"/>\n",
        from, y, radius, height, to > from ? 1 : 0, to, y - top, colour, width);
  }

  void riser(int gpu, double x, std::string_view colour, bool up, bool down) {
    const double low = places_[gpu].y;
    const double high = tileY(hostOf(gpu)) + switchY_ + kSwitchHeight;
    arcs_ +=
        fmt::format("<path d=\"M{:.1f} {:.1f} V{:.1f}\" stroke=\"{}\" stroke-width=\"{:.1f}\"/>\n",
                    x, low - (down ? 6 : 0), high + (up ? 6 : 0), colour, lineWidth());
    if (up) arrowHead(x, high, -1, colour);
    if (down) arrowHead(x, low, 1, colour);
  }

  // Between the ends of two lines on one half of a GPU's upper edge.
  double endStep() const {
    return (box_ / 2 - 6) / std::max(static_cast<double>(groups_.size()), 1.0);
  }
  double headWidth() const { return std::clamp(endStep() * 1.5, 5.5, 9.0); }
  double lineWidth() const { return groups_.size() > 12 ? 1.4 : groups_.size() > 4 ? 1.9 : 2.4; }

  // A bundle of lines leaves a box on the side towards its target, in such an order that lines of
  // one bundle do not cross. Data of trees flow both ways.
  void drawHops() {
    const bool ring = graph_.pattern == Pattern::ring;
    const double count = static_cast<double>(groups_.size());
    for (const Hop& hop : hops_) {
      const std::string colour = colourOf(hop.group, groups_.size());
      const double offset = 3 + endStep() * (static_cast<double>(hop.group) + 0.25);
      const Box &from = places_[hop.from], &to = places_[hop.to];
      if (!sameTile(hop.from, hop.to)) {
        riser(hop.from, from.center() + offset, colour, true, !ring);
        riser(hop.to, to.center() - offset, colour, !ring, true);
        continue;
      }
      const double side = to.center() > from.center() ? 1 : -1;
      const double fromX = from.center() + side * (offset + endStep() / 2);
      const double toX = to.center() - side * offset;
      arc(fromX, toX, from.y, kNest * (count - 1 - static_cast<double>(hop.group)), colour,
          lineWidth(), 6);
      arrowHead(toX, to.y, 1, colour);
      if (!ring) arrowHead(fromX, from.y, 1, colour);
    }
    if (graph_.pattern != Pattern::nvls) return;
    for (size_t group = 0; group < groups_.size(); group++) {
      const int head = whole(channelOf(group).gpus.front());
      riser(head, places_[head].center() + (group % 2 ? 7 : -7), colourOf(group, groups_.size()),
            true, true);
    }
  }

  // Shares the edge of a box among the lines that end there, in the order of their other ends.
  void spreadEnds(const std::vector<PortLine*>& lines, double left, double right,
                  double PortLine::*own) {
    for (size_t i = 0; i < lines.size(); i++) {
      lines[i]->*own = left + (right - left) * static_cast<double>(i + 1) /
                                  static_cast<double>(lines.size() + 1);
    }
  }

  void drawPortLines() {
    std::map<int, std::vector<PortLine*>> ofGpu, ofPort;
    for (PortLine& line : portLines_) {
      ofGpu[line.gpu].push_back(&line);
      ofPort[line.port].push_back(&line);
    }
    for (auto& [gpu, lines] : ofGpu) {
      std::stable_sort(lines.begin(), lines.end(), [&](const PortLine* a, const PortLine* b) {
        return places_[a->port].x < places_[b->port].x;
      });
      spreadEnds(lines, places_[gpu].x + kStrip, places_[gpu].right(), &PortLine::gpuX);
    }
    for (auto& [port, lines] : ofPort) {
      std::stable_sort(lines.begin(), lines.end(),
                       [](const PortLine* a, const PortLine* b) { return a->gpuX < b->gpuX; });
      spreadEnds(lines, places_[port].x, places_[port].right(), &PortLine::portX);
    }
    for (const PortLine& line : portLines_) {
      const std::string colour = colourOf(line.group, groups_.size());
      const double high = places_[line.gpu].bottom(), low = places_[line.port].y;
      const double from = low - (line.enters ? 0 : 6), to = high + (line.enters ? 6 : 0);
      const double middle = (from + to) / 2;
      arcs_ += fmt::format(
          "<path d=\"M{0:.1f} {1:.1f} C{0:.1f} {2:.1f} {3:.1f} {2:.1f} {3:.1f} {4:.1f}\" "
          "fill=\"none\" stroke=\"{5}\" stroke-width=\"{6:.1f}\"/>\n",
          line.portX, from, middle, line.gpuX, to, colour, lineWidth());
      if (line.enters) {
        arrowHead(line.gpuX, high, -1, colour);
      } else {
        arrowHead(line.portX, low, 1, colour);
      }
    }
  }

  // The channels by colour, then the kinds of lines.
  void drawLegend() {
    double y = below_ + 30;
    if (view_.domains.size() > 1) {
      boxes_ += text(kMargin, y, 12,
                     fmt::format("channels of the first of {} groups of GPUs that only the "
                                 "network connects",
                                 view_.domains.size()));
      y += kLegendRow;
    }
    std::vector<std::string> rows;
    size_t longest = 0, widestNumber = 0;
    for (size_t group = 0; group < groups_.size(); group++) {
      const Channel& channel = channelOf(group);
      const auto name = [&](int net) {
        const Node& node = channels_.topology->node(net);
        return tiles_.size() > 1 ? fmt::format("h{} NET {}", node.host, node.net.dev)
                                 : fmt::format("NET {}", node.net.dev);
      };
      std::string row = orderText(*channels_.topology, channel);
      if (channel.netIn >= 0) row = fmt::format("{} > {}", name(channel.netIn), row);
      if (channel.netOut >= 0) row += fmt::format(" > {}", name(channel.netOut));
      longest = std::max(longest, row.size());
      widestNumber = std::max(widestNumber, rangesText(groups_[group]).size());
      rows.push_back(std::move(row));
    }
    const double number = 46 + kCharacter * static_cast<double>(widestNumber);
    const double full = width_ - 2 * kMargin;
    const double column = std::min(number + 24 + kCharacter * static_cast<double>(longest), full);
    const auto columns = static_cast<size_t>(std::clamp(full / column, 1.0, 4.0));
    const size_t perColumn = (rows.size() + columns - 1) / columns;
    const auto characters = static_cast<size_t>((column - number) / kCharacter);
    double rowY = y, lowest = y;
    for (size_t i = 0; i < rows.size(); i++) {
      if (i % perColumn == 0) rowY = y;
      const double x = kMargin + column * static_cast<double>(i / perColumn);
      boxes_ += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"22\" height=\"6\" rx=\"3\" fill=\"{}\"/>\n", x,
          rowY - 7, colourOf(i, rows.size()));
      boxes_ += text(x + 30, rowY, 12, rangesText(groups_[i]) + ":");
      std::istringstream stream(wrapped(rows[i], 0, characters));
      for (std::string part; std::getline(stream, part); rowY += kLegendRow) {
        boxes_ += text(x + number, rowY, 12, part);
      }
      lowest = std::max(lowest, rowY);
    }
    height_ = drawKey(lowest + 10) + kMargin;
  }

  // Explains the colours of links that the picture has.
  double drawKey(double y) {
    bool chip = false, nvlink = false, unused = false;
    for (const int gpu : topology_.of(NodeType::gpu)) {
      for (const Link& link : topology_.node(gpu).links) {
        chip |= link.type == LinkType::c2c;
        nvlink |= link.type == LinkType::nvlink && topology_.node(link.to).type == NodeType::gpu;
      }
    }
    for (const int net : topology_.of(NodeType::net)) {
      unused |= std::find(usedPorts_.begin(), usedPorts_.end(), net) == usedPorts_.end();
    }
    std::vector<std::pair<std::string_view, std::string_view>> keys = {{kPciColour, "PCI"}};
    if (chip) keys.emplace_back(kChipColour, "C2C");
    if (nvlink) keys.emplace_back(kNvlinkColour, "NVLink");
    if (topology_.of(NodeType::cpu).size() > 1) keys.emplace_back(kCpuColour, "between CPUs");
    double x = kMargin;
    for (const auto& [colour, meaning] : keys) {
      line(x, y - 4, x + 22, y - 4, 3, colour);
      boxes_ += text(x + 30, y, 11, meaning, "fill=\"#444\"");
      x += 54 + kCharacter * static_cast<double>(meaning.size());
    }
    if (unused) {
      boxes_ += text(x, y, 11, "dashed: not used by these channels", "fill=\"#444\"");
    }
    return y;
  }

  struct Hop {
    int from, to;
    size_t group;
  };
  struct Tile {
    double x = 0, width = 0;
    int row = 0;
  };

  const View& view_;
  const Topology& topology_;
  const NamedChannels& channels_;
  const ChannelGraph& graph_;
  const std::vector<std::vector<int>> groups_;  // equal channels, drawn as one
  std::vector<Hop> hops_;
  std::vector<PortLine> portLines_;
  std::vector<int> usedPorts_;
  std::vector<Tile> tiles_;  // by host
  std::map<int, Box> places_;
  std::map<int, int> depth_, parents_, adapterOf_;
  double box_ = kMinBox;  // width of a GPU
  double cursor_ = 0;     // where the next box of the tile begins
  double width_ = 0, height_ = 0, headerHeight_ = 0;
  // In a tile: upper edges of the rows, and the lower edge of the lowest devices.
  double switchY_ = 0, gpuY_ = 0, portY_ = 0, leafBottom_ = 0, tileHeight_ = 0;
  double below_ = 0;  // lower edge of the last tile
  int deepest_ = 0;
  std::string lines_, arcs_, boxes_;
};

}  // namespace

std::string svgText(const View& view, std::string_view pattern) {
  std::string names;
  for (const NamedChannels& named : graphsOf(view.domains.front())) {
    if (named.graph->channels.empty()) continue;
    if (named.name == pattern) return Drawing(view, named).draw();
    names += fmt::format("{}{}", names.empty() ? "" : ", ", named.name);
  }
  throw invalidArgument("--pattern: no channels of the pattern \"{}\" to draw", pattern)
      .remedy(fmt::format("This machine has {}.", names));
}

}  // namespace unisono::topo
