// SPDX-License-Identifier: Apache-2.0
#include "explain_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "explain_report.h"

namespace unisono::explain {
namespace {

using Json = nlohmann::ordered_json;
using bench::BenchOperation;
using plan::MessageChoice;
using plan::MessagePath;

constexpr const char* kNoPrediction =
    "there is no cost model of messages: sizes, settings and links decide; --run measures";

plan::Call callOf(BenchOperation operation) {
  switch (operation) {
    case BenchOperation::allToAll:
      return plan::Call::allToAll;
    case BenchOperation::gather:
      return plan::Call::gather;
    case BenchOperation::scatter:
      return plan::Call::scatter;
    default:
      return plan::Call::send;
  }
}

uint64_t messageBytesOf(const MessageReport& report, uint64_t bytes) {
  return bench::countForBytes(report.operation, bytes, report.typeBytes, report.ranks) *
         report.typeBytes;
}

plan::MessageQuestion questionOf(const MessageReport& report, const MessageRoute& route,
                                 uint64_t messageBytes) {
  return {
      .call = callOf(report.operation), .from = route.from, .to = route.to, .bytes = messageBytes};
}

// As tuning::choicesBySize.
std::vector<MessageRange> rangesOf(const plan::CommConfig& config, const MessageReport& report,
                                   const MessageRoute& route) {
  const auto at = [&](uint64_t bytes) { return choiceAt(config, report, route, bytes); };
  constexpr uint64_t kStepsPerOctave = 64;
  std::vector<MessageRange> ranges;
  const auto open = [&](uint64_t bytes) {
    const MessageChoice choice = at(bytes);
    ranges.push_back({bytes, bytes, choice.path, choice.channels, choice.channels});
  };
  const auto close = [&](uint64_t bytes) {
    ranges.back().lastBytes = bytes;
    ranges.back().lastChannels = at(bytes).channels;
  };
  open(report.minBytes);
  for (uint64_t bytes = report.minBytes; bytes < report.maxBytes;) {
    const uint64_t octave = std::bit_floor(std::max<uint64_t>(bytes, 1));
    const uint64_t next =
        std::min(report.maxBytes, bytes + std::max<uint64_t>(octave / kStepsPerOctave, 1));
    const MessagePath current = ranges.back().path;
    if (at(next).path == current) {
      bytes = next;
      continue;
    }
    // The last size with the current path.
    uint64_t low = bytes, high = next;
    while (high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      (at(middle).path == current ? low : high) = middle;
    }
    close(low);
    open(high);
    bytes = high;
  }
  close(report.maxBytes);
  return ranges;
}

std::string choiceText(const MessageReport& report, const MessageChoice& choice) {
  const char* const plural = choice.channels == 1 ? "" : "s";
  switch (choice.path) {
    case MessagePath::copyEngines:
      return nameOf(choice.path);
    case MessagePath::directLl:
    case MessagePath::directLl128:
      return fmt::format("{}, {} block{}", nameOf(choice.path), choice.channels, plural);
    case MessagePath::fifoLl:
    case MessagePath::fifoSimple:
      break;
  }
  if (report.ranks == 1) return "a copy inside the device";
  return fmt::format(
      "{}, {} channel{} of up to {}, slices of {}{}", nameOf(choice.path), choice.channels, plural,
      bytesText(choice.partBytes), bytesText(std::min(choice.sliceBytes, choice.partBytes)),
      choice.offered ? ", into the receiver's buffer where the sender reaches it" : "");
}

std::string routeText(const MessageReport& report, const MessageRoute& route) {
  std::string text = fmt::format("\nMessages {} (as from rank {} to rank {}), through {}\n",
                                 route.name, route.from, route.to, route.links);
  text += fmt::format("Choice: {}\n\nCandidates\n", choiceText(report, route.choice));
  for (const MessageCandidate& row : route.candidates) {
    text += fmt::format("  {:<15}{}\n", nameOf(row.path), row.chosen ? "the choice" : row.reason);
  }
  text += fmt::format("\nBy size\n  {:>14}{:>14}  {:<15}{}\n", "from", "to", "choice",
                      "channels or blocks");
  for (const MessageRange& range : route.ranges) {
    const bool constant = range.firstChannels == range.lastChannels;
    text +=
        fmt::format("  {:>14}{:>14}  {:<15}{}\n", bytesText(range.firstBytes),
                    bytesText(range.lastBytes), nameOf(range.path),
                    constant ? fmt::format("{}", range.firstChannels)
                             : fmt::format("{} to {}", range.firstChannels, range.lastChannels));
  }
  return text;
}

std::string runText(const MessageReport& report) {
  if (report.backend.empty()) return "";
  std::string text =
      fmt::format("\nMeasured ({} backend)\n  {:>14}{:>22}{:>8}  {}\n", report.backend, "bytes",
                  report.simulated() ? "simulation on CPU us" : "measured us", "wrong",
                  report.simulated() ? "choice of GPUs" : "choice");
  for (const MessageRow& row : report.run) {
    std::string paths;
    for (const MessagePath path : row.paths) {
      paths += fmt::format("{}{}", paths.empty() ? "" : " and ", nameOf(path));
    }
    text += fmt::format("  {:>14}{:>22.2f}{:>8}  {}\n", bytesText(row.bytes), row.measuredUs,
                        row.wrong, paths);
  }
  if (report.simulated()) text += kSimulationNote;
  return text;
}

Json choiceJson(const MessageChoice& choice) {
  Json json = {{"path", nameOf(choice.path)}, {"channels", choice.channels}};
  if (choice.partBytes > 0) {
    json["part_bytes"] = choice.partBytes;
    json["slice_bytes"] = choice.sliceBytes;
    json["offered"] = choice.offered;
  }
  return json;
}

Json routeJson(const MessageRoute& route) {
  Json json = {{"name", route.name},
               {"from", route.from},
               {"to", route.to},
               {"links", route.links},
               {"choice", choiceJson(route.choice)},
               {"candidates", Json::array()},
               {"ranges", Json::array()}};
  for (const MessageCandidate& row : route.candidates) {
    json["candidates"].push_back({{"path", nameOf(row.path)},
                                  {"chosen", row.chosen},
                                  {"possible", row.possible},
                                  {"reason", row.reason}});
  }
  for (const MessageRange& range : route.ranges) {
    json["ranges"].push_back({{"first_bytes", range.firstBytes},
                              {"last_bytes", range.lastBytes},
                              {"path", nameOf(range.path)},
                              {"first_channels", range.firstChannels},
                              {"last_channels", range.lastChannels}});
  }
  return json;
}

}  // namespace

MessageChoice choiceAt(const plan::CommConfig& config, const MessageReport& report,
                       const MessageRoute& route, uint64_t bytes) {
  return messageChoice(config, questionOf(report, route, messageBytesOf(report, bytes)));
}

void addRoute(const plan::CommConfig& config, std::string name, int from, int to, std::string links,
              MessageReport& report) {
  MessageRoute route{std::move(name), from, to, std::move(links), {}, {}, {}};
  const plan::MessageQuestion question = questionOf(report, route, report.messageBytes);
  route.choice = messageChoice(config, question);
  for (int p = 0; p < plan::kMessagePaths; p++) {
    const auto path = static_cast<MessagePath>(p);
    const bool chosen = path == route.choice.path;
    route.candidates.push_back({path, chosen,
                                exclusionOf(config, path, question) == plan::MessageExclusion::none,
                                chosen ? std::string() : reasonOf(config, path, question)});
  }
  route.ranges = rangesOf(config, report, route);
  report.routes.push_back(std::move(route));
}

std::string textOf(const MessageReport& report) {
  std::string text =
      fmt::format("{} of {} ({} {}) by {} rank{} on {} node{}: {}\n",
                  bench::operationInfo(report.operation).name, bytesText(report.bytes),
                  report.count, report.typeName, report.ranks, report.ranks == 1 ? "" : "s",
                  report.nodes, report.nodes == 1 ? "" : "s", report.source);
  text += fmt::format("Each message has {}.\n", bytesText(report.messageBytes));
  if (!report.network.empty()) text += fmt::format("Network: {}\n", report.network);
  for (const std::string& warning : report.warnings) text += "Warning: " + warning + "\n";
  text += fmt::format("Predicted: nothing; {}\n", kNoPrediction);
  for (const MessageRoute& route : report.routes) text += routeText(report, route);
  return text + runText(report);
}

std::string jsonOf(const MessageReport& report) {
  Json json = {{"machine", report.source},
               {"nodes", report.nodes},
               {"ranks", report.ranks},
               {"network", report.network},
               {"operation", bench::operationInfo(report.operation).name},
               {"bytes", report.bytes},
               {"message_bytes", report.messageBytes},
               {"count", report.count},
               {"type", report.typeName},
               {"predicted_us", nullptr},
               {"routes", Json::array()},
               {"warnings", report.warnings}};
  for (const MessageRoute& route : report.routes) json["routes"].push_back(routeJson(route));
  if (!report.backend.empty()) {
    json["run"] = {
        {"backend", report.backend}, {"simulated", report.simulated()}, {"rows", Json::array()}};
    for (const MessageRow& row : report.run) {
      Json paths = Json::array();
      for (const MessagePath path : row.paths) paths.push_back(nameOf(path));
      json["run"]["rows"].push_back({{"bytes", row.bytes},
                                     {"paths", std::move(paths)},
                                     {"measured_us", row.measuredUs},
                                     {"wrong", row.wrong}});
    }
  }
  return json.dump(2) + "\n";
}

std::string svgOf(const MessageReport& report) {
  constexpr double kWidth = 980, kLeft = 130, kRight = 30, kTop = 60, kBar = 40, kGap = 30;
  constexpr const char* kColours[plan::kMessagePaths] = {"#8e5aa8", "#3d8b37", "#1b6ca8", "#c8553d",
                                                         "#b8860b"};
  const auto log = [](uint64_t bytes) {
    return std::log2(static_cast<double>(std::max<uint64_t>(bytes, 1)));
  };
  const double low = log(report.minBytes), high = std::max(log(report.maxBytes), low + 1);
  const auto x = [&](double exponent) {
    return kLeft + (exponent - low) / (high - low) * (kWidth - kLeft - kRight);
  };
  const double bottom = kTop + static_cast<double>(report.routes.size()) * (kBar + kGap);
  const double height = bottom + 50 + 20;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" "
      "height=\"{1}\" fill=\"white\"/>\n<text x=\"20\" y=\"28\" font-size=\"16\">{2}</text>\n",
      kWidth, height,
      escapeXml(fmt::format("{}, {} ranks on {} node{}: {}",
                            bench::operationInfo(report.operation).name, report.ranks, report.nodes,
                            report.nodes == 1 ? "" : "s", report.source)));
  constexpr double kLabels = 6;
  const int step = std::max(1, static_cast<int>(std::ceil((high - low) / kLabels)));
  for (int exponent = static_cast<int>(std::ceil(low)); exponent <= high; exponent += step) {
    svg += fmt::format(
        "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#e3e6e8\"/>"
        "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
        x(exponent), kTop, bottom, bottom + 18, bytesText(uint64_t{1} << exponent));
  }
  double top = kTop;
  for (const MessageRoute& route : report.routes) {
    svg += fmt::format("<text x=\"20\" y=\"{:.1f}\">{}</text>\n", top + kBar / 2 + 4,
                       escapeXml(route.name));
    for (const MessageRange& range : route.ranges) {
      const double left = x(log(range.firstBytes)), right = x(log(range.lastBytes + 1));
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\">"
          "<title>{}, {} to {}</title></rect>\n",
          left, top, std::clamp(right, left + 1, std::max(kWidth - kRight, left + 1)) - left, kBar,
          kColours[static_cast<size_t>(range.path)], nameOf(range.path),
          bytesText(range.firstBytes), bytesText(range.lastBytes));
    }
    top += kBar + kGap;
  }
  double left = kLeft;
  for (int p = 0; p < plan::kMessagePaths; p++) {
    svg += fmt::format(
        "<rect x=\"{0}\" y=\"{1}\" width=\"14\" height=\"14\" fill=\"{2}\"/>"
        "<text x=\"{3}\" y=\"{4}\">{5}</text>\n",
        left, bottom + 40, kColours[p], left + 20, bottom + 52,
        nameOf(static_cast<MessagePath>(p)));
    left += 130;
  }
  return svg + fmt::format(
                   "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">bytes (the larger of a rank's "
                   "input and output)</text>\n</svg>\n",
                   kWidth - kRight, bottom + 34);
}

}  // namespace unisono::explain
