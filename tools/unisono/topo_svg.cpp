// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "base/error.h"
#include "topo_layout.h"

// `unisono topo --svg`. Each distinct channel is a line of its own colour: arcs above the GPUs, and
// between ports and GPUs where it uses the network. A hop to a GPU of another tile rises to the
// NVSwitches and comes down there.
namespace unisono::topo {

using namespace topology;

namespace {

constexpr double kLegendRow = 19;

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

class Drawing {
 public:
  Drawing(const View& view, const NamedChannels& channels)
      : view_(view), layout_(makeLayout(view, channels)) {}

  std::string draw() {
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
               layout_.width, height_, escape(view_.source)) +
           lines_ + arcs_ + boxes_ + "</svg>\n";
  }

 private:
  void drawHeader() {
    boxes_ += text(kMargin, kMargin + 10, 18, shorten(view_.source, 80), "font-weight=\"bold\"");
    boxes_ +=
        text(kMargin, kMargin + 30, 12,
             fmt::format("{}, {}{}; numbers at lines are GB/s per direction",
                         counted(layout_.topology.of(NodeType::gpu).size(), "GPU"),
                         counted(layout_.topology.of(NodeType::net).size(), "NET port"),
                         view_.nodes > 1 ? fmt::format(", one of {} such machines", view_.nodes)
                                         : std::string()),
             "fill=\"#444\"");
    std::string totals =
        fmt::format("{}: {} per direction between GPUs ({})", layout_.channels.name,
                    totalText(layout_.graph.channels.size(), layout_.graph.speedIntra),
                    nameOf(layout_.graph.typeIntra));
    if (layout_.graph.channels.front().netIn >= 0) {
      totals +=
          fmt::format(", {:g} GB/s to the network ({})", toGigabytes(layout_.graph.totalInter()),
                      nameOf(layout_.graph.typeInter));
    }
    boxes_ += text(kMargin, kMargin + 50, 13, totals, "font-weight=\"bold\"");
    double y = kMargin + 69;
    for (const std::string& line : layout_.warnings) {
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
    if (layout_.tiles.size() > 1) {
      for (size_t host = 0; host < layout_.tiles.size(); host++) {
        boxes_ += text(layout_.tiles[host].x, layout_.tileY(static_cast<int>(host)) + 12, 13,
                       fmt::format("host {}", host), "font-weight=\"bold\"");
      }
    }
    for (const auto& [index, place] : layout_.places) {
      const Node& node = layout_.topology.node(index);
      const bool used = std::find(layout_.usedPorts.begin(), layout_.usedPorts.end(), index) !=
                        layout_.usedPorts.end();
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
    for (const Link& link : layout_.topology.node(a).links) {
      if (link.to == b && link.type == type) return link.bandwidth;
    }
    return 0;
  }

  void drawLinks() {
    for (const auto& [child, parent] : layout_.parents) {
      if (layout_.places.contains(child)) connectToParent(child, parent);
    }
    drawCpuLinks();
    const auto& gpus = layout_.topology.of(NodeType::gpu);
    for (const int nvs : layout_.topology.of(NodeType::nvs)) drawNvSwitch(nvs, gpus);
    for (const int gpu : gpus) {
      for (const Link& link : layout_.topology.node(gpu).links) {
        if (link.type != LinkType::nvlink || link.to <= gpu ||
            layout_.topology.node(link.to).type != NodeType::gpu ||
            !layout_.sameTile(gpu, link.to)) {
          continue;
        }
        arc(layout_.places[gpu].center(), layout_.places[link.to].center(), layout_.places[gpu].y,
            -8, kNvlinkColour, thickness(link.bandwidth) + 1);
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
    const Box &high = layout_.places[child], &low = layout_.places[parent];
    const NodeType type = layout_.topology.node(child).type;
    if (type == NodeType::gpu) {
      const double y = high.bottom() + 12;
      if (const Bandwidth pci = linkBetween(child, parent, LinkType::pci); pci > 0) {
        connect(high.x + 5, high, low, pci, kPciColour, high.x + kStrip, y);
      }
      for (const Link& link : layout_.topology.node(child).links) {
        if (link.type != LinkType::c2c) continue;
        connect(high.x + 12, high, layout_.places[link.to], link.bandwidth, kChipColour,
                high.x + kStrip, y + 12);
      }
      return;
    }
    const auto adapter = layout_.adapterOf.find(child);
    const int top = adapter == layout_.adapterOf.end() ? child : adapter->second;
    Bandwidth bandwidth = linkBetween(top, parent, LinkType::pci);
    if (bandwidth == 0) bandwidth = kLocalBandwidth;
    connect(high.center(), high, low, bandwidth, kPciColour, high.center() + 4, high.bottom() + 13);
  }

  // Neighbours are connected directly, others by lines below the row. Where all links of a host are
  // equal, the number is written once.
  void drawCpuLinks() {
    for (size_t host = 0; host < layout_.tiles.size(); host++) {
      std::vector<int> cpus;
      for (const int cpu : layout_.topology.of(NodeType::cpu)) {
        if (layout_.hostOf(cpu) == static_cast<int>(host)) cpus.push_back(cpu);
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
        label(layout_.tiles[host].x, layout_.tileY(static_cast<int>(host)) + layout_.tileHeight,
              fmt::format("between any two CPUs: {} GB/s", gigabytes(all[0])), kCpuColour);
      }
    }
  }

  void drawCpuLink(int a, int b, int distance, bool labelled) {
    const Bandwidth bandwidth = linkBetween(a, b, LinkType::system);
    if (bandwidth == 0) return;
    const Box &left = layout_.places[a], &right = layout_.places[b];
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
    const int rows = layout_.tiles.back().row + 1;
    for (int row = 0; row < rows; row++) {
      Box bar{layout_.width, 0, 0, kSwitchHeight};
      double end = 0;
      Bandwidth low = 0, high = 0;
      for (const int gpu : gpus) {
        const Bandwidth bandwidth = linkBetween(gpu, nvs, LinkType::nvlink);
        if (bandwidth == 0 || layout_.tiles[static_cast<size_t>(layout_.hostOf(gpu))].row != row)
          continue;
        low = low == 0 ? bandwidth : std::min(low, bandwidth);
        high = std::max(high, bandwidth);
        bar.y = layout_.tileY(layout_.hostOf(gpu)) + layout_.switchY;
        const Box& place = layout_.places[gpu];
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
    const double low = layout_.places[gpu].y;
    const double high = layout_.tileY(layout_.hostOf(gpu)) + layout_.switchY + kSwitchHeight;
    arcs_ +=
        fmt::format("<path d=\"M{:.1f} {:.1f} V{:.1f}\" stroke=\"{}\" stroke-width=\"{:.1f}\"/>\n",
                    x, low - (down ? 6 : 0), high + (up ? 6 : 0), colour, lineWidth());
    if (up) arrowHead(x, high, -1, colour);
    if (down) arrowHead(x, low, 1, colour);
  }

  // Between the ends of two lines on one half of a GPU's upper edge.
  double endStep() const {
    return (layout_.box / 2 - 6) / std::max(static_cast<double>(layout_.groups.size()), 1.0);
  }
  double headWidth() const { return std::clamp(endStep() * 1.5, 5.5, 9.0); }
  double lineWidth() const {
    return layout_.groups.size() > 12 ? 1.4 : layout_.groups.size() > 4 ? 1.9 : 2.4;
  }

  // A bundle of lines leaves a box on the side towards its target, in such an order that lines of
  // one bundle do not cross. Data of trees flow both ways.
  void drawHops() {
    const bool ring = layout_.graph.pattern == Pattern::ring;
    const double count = static_cast<double>(layout_.groups.size());
    for (const Layout::Hop& hop : layout_.hops) {
      const std::string colour = colourOf(hop.group, layout_.groups.size());
      const double offset = 3 + endStep() * (static_cast<double>(hop.group) + 0.25);
      const Box &from = layout_.places[hop.from], &to = layout_.places[hop.to];
      if (!layout_.sameTile(hop.from, hop.to)) {
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
    if (layout_.graph.pattern != Pattern::nvls) return;
    for (size_t group = 0; group < layout_.groups.size(); group++) {
      const int head = layout_.whole(layout_.channelOf(group).gpus.front());
      riser(head, layout_.places[head].center() + (group % 2 ? 7 : -7),
            colourOf(group, layout_.groups.size()), true, true);
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
    for (PortLine& line : layout_.portLines) {
      ofGpu[line.gpu].push_back(&line);
      ofPort[line.port].push_back(&line);
    }
    for (auto& [gpu, lines] : ofGpu) {
      std::stable_sort(lines.begin(), lines.end(), [&](const PortLine* a, const PortLine* b) {
        return layout_.places[a->port].x < layout_.places[b->port].x;
      });
      spreadEnds(lines, layout_.places[gpu].x + kStrip, layout_.places[gpu].right(),
                 &PortLine::gpuX);
    }
    for (auto& [port, lines] : ofPort) {
      std::stable_sort(lines.begin(), lines.end(),
                       [](const PortLine* a, const PortLine* b) { return a->gpuX < b->gpuX; });
      spreadEnds(lines, layout_.places[port].x, layout_.places[port].right(), &PortLine::portX);
    }
    for (const PortLine& line : layout_.portLines) {
      const std::string colour = colourOf(line.group, layout_.groups.size());
      const double high = layout_.places[line.gpu].bottom(), low = layout_.places[line.port].y;
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
    double y = layout_.below + 30;
    if (view_.domains.size() > 1) {
      boxes_ += text(kMargin, y, 12,
                     fmt::format("channels of the first of {} groups of GPUs that only the "
                                 "network connects",
                                 view_.domains.size()));
      y += kLegendRow;
    }
    std::vector<std::string> rows;
    size_t longest = 0, widestNumber = 0;
    for (size_t group = 0; group < layout_.groups.size(); group++) {
      const Channel& channel = layout_.channelOf(group);
      const auto name = [&](int net) {
        const Node& node = layout_.channels.topology->node(net);
        return layout_.tiles.size() > 1 ? fmt::format("h{} NET {}", node.host, node.net.dev)
                                        : fmt::format("NET {}", node.net.dev);
      };
      std::string row = orderText(*layout_.channels.topology, channel);
      if (channel.netIn >= 0) row = fmt::format("{} > {}", name(channel.netIn), row);
      if (channel.netOut >= 0) row += fmt::format(" > {}", name(channel.netOut));
      longest = std::max(longest, row.size());
      widestNumber = std::max(widestNumber, rangesText(layout_.groups[group]).size());
      rows.push_back(std::move(row));
    }
    const double number = 46 + kCharacter * static_cast<double>(widestNumber);
    const double full = layout_.width - 2 * kMargin;
    const double column = std::min(number + 24 + kCharacter * static_cast<double>(longest), full);
    const auto columns = static_cast<size_t>(std::clamp(full / column, 1.0, 4.0));
    const size_t perColumn = (rows.size() + columns - 1) / columns;
    const auto characters = static_cast<size_t>((column - number) / kCharacter);
    double rowY = y, lowest = y;
    for (size_t i = 0; i < rows.size(); i++) {
      if (i % perColumn == 0) rowY = y;
      const size_t left = i / perColumn;  // columns
      const double x = kMargin + column * static_cast<double>(left);
      boxes_ += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"22\" height=\"6\" rx=\"3\" fill=\"{}\"/>\n", x,
          rowY - 7, colourOf(i, rows.size()));
      boxes_ += text(x + 30, rowY, 12, rangesText(layout_.groups[i]) + ":");
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
    for (const int gpu : layout_.topology.of(NodeType::gpu)) {
      for (const Link& link : layout_.topology.node(gpu).links) {
        chip |= link.type == LinkType::c2c;
        nvlink |=
            link.type == LinkType::nvlink && layout_.topology.node(link.to).type == NodeType::gpu;
      }
    }
    for (const int net : layout_.topology.of(NodeType::net)) {
      unused |= std::find(layout_.usedPorts.begin(), layout_.usedPorts.end(), net) ==
                layout_.usedPorts.end();
    }
    std::vector<std::pair<std::string_view, std::string_view>> keys = {{kPciColour, "PCI"}};
    if (chip) keys.emplace_back(kChipColour, "C2C");
    if (nvlink) keys.emplace_back(kNvlinkColour, "NVLink");
    if (layout_.topology.of(NodeType::cpu).size() > 1)
      keys.emplace_back(kCpuColour, "between CPUs");
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

  const View& view_;
  Layout layout_;
  double height_ = 0;
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
