// SPDX-License-Identifier: Apache-2.0
#include "explain_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <utility>

#include "explain_plot.h"
#include "explain_report.h"

namespace unisono::explain {
namespace {

using Json = nlohmann::ordered_json;
using bench::BenchOperation;
using plan::MessageChoice;
using plan::MessagePath;

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

// A message of a call of `bytes` bytes.
plan::MessageQuestion questionOf(const MessageReport& report, const MessagePair& pair,
                                 uint64_t bytes) {
  return {.call = callOf(report.operation),
          .from = pair.from,
          .to = pair.to,
          .bytes = messageBytesOf(report, bytes)};
}

tuning::MessageTime timeOf(const MessageReport& report, const MessagePair& pair, MessagePath path,
                           uint64_t messageBytes) {
  const int channels = fifoChoice(report.config, pair.from, pair.to, messageBytes).channels;
  return tuning::messageTime(report.measured, pair.link, path,
                             {.operation = messageOperation(report.operation),
                              .ranks = pair.ranks,
                              .nodes = pair.nodes,
                              .bytes = messageBytes,
                              .channels = channels});
}

// The choice at a size with its time.
struct TimedChoice {
  MessageChoice choice;
  double timeUs;
};
TimedChoice choiceAt(const MessageReport& report, const MessagePair& pair, uint64_t bytes) {
  const plan::MessageQuestion question = questionOf(report, pair, bytes);
  const MessageChoice choice = messageChoice(report.config, question);
  return {choice, timeOf(report, pair, choice.path, question.bytes).us};
}

// As tuning::choicesBySize.
std::vector<MessageRange> rangesOf(const MessageReport& report, const MessagePair& pair) {
  const auto at = [&](uint64_t bytes) { return choiceAt(report, pair, bytes); };
  constexpr uint64_t kStepsPerOctave = 64;
  std::vector<MessageRange> ranges;
  const auto open = [&](uint64_t bytes) {
    const auto [choice, timeUs] = at(bytes);
    ranges.push_back({bytes, bytes, choice.path, choice.channels, choice.channels, timeUs, timeUs});
  };
  const auto close = [&](uint64_t bytes) {
    const auto [choice, timeUs] = at(bytes);
    ranges.back().lastBytes = bytes;
    ranges.back().lastChannels = choice.channels;
    ranges.back().lastTimeUs = timeUs;
  };
  open(report.minBytes);
  for (uint64_t bytes = report.minBytes; bytes < report.maxBytes;) {
    const uint64_t octave = std::bit_floor(std::max<uint64_t>(bytes, 1));
    const uint64_t next =
        std::min(report.maxBytes, bytes + std::max<uint64_t>(octave / kStepsPerOctave, 1));
    const MessagePath current = ranges.back().path;
    if (at(next).choice.path == current) {
      bytes = next;
      continue;
    }
    // The last size with the current path.
    uint64_t low = bytes, high = next;
    while (high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      (at(middle).choice.path == current ? low : high) = middle;
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
      return std::string(nameOf(choice.path));
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
                                 route.pair.name, route.pair.from, route.pair.to, route.pair.links);
  text += fmt::format("Choice: {}\n\nCandidates\n  {:<15}{:>14}{:>10}  {}\n",
                      choiceText(report, route.choice), "path", "predicted us", "GB/s", "why not");
  for (const MessageCandidate& row : route.candidates) {
    text += fmt::format("  {:<15}{:>14}{:>10}  {}{}\n", nameOf(row.path), timeText(row.time.us),
                        bandwidthText(report.bytes, row.time.us),
                        row.chosen ? "the choice" : row.reason,
                        row.time.measured ? " (time measured)" : "");
  }
  text += fmt::format("\nBy size\n  {:>14}{:>14}  {:<15}{:<20}{:>20}\n", "from", "to", "choice",
                      "channels or blocks", "predicted us");
  for (const MessageRange& range : route.ranges) {
    text += fmt::format(
        "  {:>14}{:>14}  {:<15}{:<20}{:>20}\n", bytesText(range.firstBytes),
        bytesText(range.lastBytes), nameOf(range.path),
        spanText(range.firstChannels, range.lastChannels),
        fmt::format("{} to {}", timeText(range.firstTimeUs), timeText(range.lastTimeUs)));
  }
  return text;
}

std::string runText(const MessageReport& report) {
  if (report.backend.empty()) return "";
  // What a simulation takes says nothing about the prediction.
  const bool simulated = report.simulated();
  std::string text = fmt::format(
      "\nMeasured ({} backend)\n  {:>14}{:>14}{:>22}{:>22}{:>8}  {}\n", report.backend, "bytes",
      "predicted us", simulated ? "simulation on CPU us" : "measured us",
      simulated ? "" : "measured / predicted", "wrong", simulated ? "choice of GPUs" : "choice");
  for (const MessageRow& row : report.run) {
    std::string paths;
    for (const MessagePath path : row.paths) {
      paths += fmt::format("{}{}", paths.empty() ? "" : " and ", nameOf(path));
    }
    text +=
        fmt::format("  {:>14}{:>14}{:>22.2f}{:>22}{:>8}  {}\n", bytesText(row.bytes),
                    timeText(row.predictedUs), row.measuredUs,
                    simulated ? "" : ratioText(row.measuredUs, row.predictedUs), row.wrong, paths);
  }
  if (simulated) text += kSimulationNote;
  return text;
}

// A time that is not known is null.
Json timeJson(double timeUs) {
  return timeUs > 0 ? Json(timeUs) : Json(nullptr);
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
  Json json = {{"name", route.pair.name},
               {"from", route.pair.from},
               {"to", route.pair.to},
               {"links", route.pair.links},
               {"choice", choiceJson(route.choice)},
               {"candidates", Json::array()},
               {"ranges", Json::array()}};
  for (const MessageCandidate& row : route.candidates) {
    json["candidates"].push_back({{"path", nameOf(row.path)},
                                  {"chosen", row.chosen},
                                  {"possible", row.possible},
                                  {"predicted_us", timeJson(row.time.us)},
                                  {"measured", row.time.measured},
                                  {"reason", row.reason}});
  }
  for (const MessageRange& range : route.ranges) {
    json["ranges"].push_back({{"first_bytes", range.firstBytes},
                              {"last_bytes", range.lastBytes},
                              {"path", nameOf(range.path)},
                              {"first_channels", range.firstChannels},
                              {"last_channels", range.lastChannels},
                              {"first_us", timeJson(range.firstTimeUs)},
                              {"last_us", timeJson(range.lastTimeUs)}});
  }
  return json;
}

// The curve of each path and route, and of each choice.
std::vector<PlotCurve> curvesOf(const MessageReport& report) {
  std::vector<PlotCurve> curves;
  for (const MessageRoute& route : report.routes) {
    const MessagePair& pair = route.pair;
    // Whether some message can take the path; others end its curve.
    const auto kindOf = [&](MessagePath path) {
      const plan::MessageExclusion exclusion =
          exclusionOf(report.config, path, questionOf(report, pair, report.minBytes));
      const bool possible = exclusion != plan::MessageExclusion::model &&
                            exclusion != plan::MessageExclusion::noLines &&
                            exclusion != plan::MessageExclusion::settings;
      return possible ? PlotCurve::Kind::candidate : PlotCurve::Kind::impossible;
    };
    for (const uint64_t bytes : plotSizes(report.minBytes, report.maxBytes)) {
      const plan::MessageQuestion question = questionOf(report, pair, bytes);
      for (int p = 0; p < tuning::kMessagePaths; p++) {
        const auto path = static_cast<MessagePath>(p);
        const double timeUs = timeOf(report, pair, path, question.bytes).us;
        const plan::MessageExclusion exclusion = exclusionOf(report.config, path, question);
        if (!(timeUs > 0) || exclusion == plan::MessageExclusion::tooLarge ||
            exclusion == plan::MessageExclusion::otherNode) {
          continue;
        }
        curveOf(curves, fmt::format("{} {}", nameOf(path), pair.name), kindOf(path))
            .points.push_back({bytes, timeUs});
      }
      const double chosenUs = choiceAt(report, pair, bytes).timeUs;
      if (!(chosenUs > 0)) continue;
      curveOf(curves, fmt::format("the choice {}", pair.name), PlotCurve::Kind::choice)
          .points.push_back({bytes, chosenUs});
    }
  }
  return curves;
}

std::string titleOf(const MessageReport& report) {
  return fmt::format("{}, {} ranks on {} node{}: {}", bench::operationInfo(report.operation).name,
                     report.ranks, report.nodes, report.nodes == 1 ? "" : "s", report.source);
}

double busBandwidth(const MessageReport& report, double timeUs) {
  return bandwidthOf(report.bytes, timeUs) * bench::busFactor(report.operation, report.ranks);
}

}  // namespace

void addRoute(MessagePair pair, MessageReport& report) {
  MessageRoute route{std::move(pair), {}, {}, {}};
  const plan::MessageQuestion question = questionOf(report, route.pair, report.bytes);
  route.choice = messageChoice(report.config, question);
  for (int p = 0; p < tuning::kMessagePaths; p++) {
    const auto path = static_cast<MessagePath>(p);
    const bool chosen = path == route.choice.path;
    route.candidates.push_back(
        {path, chosen, exclusionOf(report.config, path, question) == plan::MessageExclusion::none,
         timeOf(report, route.pair, path, question.bytes),
         chosen ? std::string() : reasonOf(report.config, path, question)});
  }
  route.ranges = rangesOf(report, route.pair);
  report.routes.push_back(std::move(route));
}

MessageRow predict(const MessageReport& report, uint64_t bytes) {
  MessageRow row{bytes, {}, 0, 0, 0};
  bool known = true;
  for (const MessageRoute& route : report.routes) {
    const auto [choice, timeUs] = choiceAt(report, route.pair, bytes);
    row.paths.push_back(choice.path);
    row.predictedUs = std::max(row.predictedUs, timeUs);
    known = known && timeUs > 0;
  }
  if (!known) row.predictedUs = 0;
  return row;
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
  if (const double timeUs = predict(report, report.bytes).predictedUs; timeUs > 0) {
    text += fmt::format("Predicted: {} us, {} GB/s (bus bandwidth {:.3f} GB/s)\n", timeText(timeUs),
                        bandwidthText(report.bytes, timeUs), busBandwidth(report, timeUs));
  }
  for (const MessageRoute& route : report.routes) text += routeText(report, route);
  return text + runText(report);
}

std::string jsonOf(const MessageReport& report) {
  const double timeUs = predict(report, report.bytes).predictedUs;
  Json json = {{"machine", report.source},
               {"nodes", report.nodes},
               {"ranks", report.ranks},
               {"network", report.network},
               {"operation", bench::operationInfo(report.operation).name},
               {"bytes", report.bytes},
               {"message_bytes", report.messageBytes},
               {"count", report.count},
               {"type", report.typeName},
               {"predicted_us", timeJson(timeUs)},
               {"gb_per_second", bandwidthOf(report.bytes, timeUs)},
               {"bus_gb_per_second", busBandwidth(report, timeUs)},
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
                                     {"predicted_us", timeJson(row.predictedUs)},
                                     {"measured_us", row.measuredUs},
                                     {"wrong", row.wrong}});
    }
  }
  return json.dump(2) + "\n";
}

std::string svgOf(const MessageReport& report) {
  return svgOf(Plot{titleOf(report), report.minBytes, report.maxBytes, curvesOf(report)});
}

}  // namespace unisono::explain
