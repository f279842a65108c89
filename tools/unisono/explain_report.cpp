// SPDX-License-Identifier: Apache-2.0
#include "explain_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "explain_plot.h"

namespace unisono::explain {
namespace {

using Json = nlohmann::ordered_json;
using tuning::nameOf;

std::string nameOfBoth(tuning::Algorithm algorithm, tuning::Protocol protocol) {
  return fmt::format("{} {}", nameOf(algorithm), nameOf(protocol));
}

std::string candidatesText(const ExplainReport& report) {
  std::string text = fmt::format("Candidates\n  {:<15}{:<10}{:>14}{:>10}  {}\n", "algorithm",
                                 "protocol", "predicted us", "GB/s", "why not");
  for (const tuning::CandidateReport& row : report.explanation.candidates) {
    std::string reason = row.chosen && row.reason.empty() ? "the choice" : row.reason;
    if (row.measured) reason += " (time measured)";
    text +=
        fmt::format("  {:<15}{:<10}{:>14}{:>10}  {}\n", nameOf(row.algorithm), nameOf(row.protocol),
                    timeText(row.timeUs), bandwidthText(report.question.bytes, row.timeUs), reason);
  }
  return text;
}

std::string rangesText(const ExplainReport& report) {
  std::string text = fmt::format("\nBy size\n  {:>14}{:>14}  {:<22}{:<12}{:>20}\n", "from", "to",
                                 "choice", "channels", "predicted us");
  for (const tuning::ChoiceRange& range : report.ranges) {
    text += fmt::format("  {:>14}{:>14}  {:<22}{:<12}{:>20}\n", bytesText(range.firstBytes),
                        bytesText(range.lastBytes), nameOfBoth(range.algorithm, range.protocol),
                        spanText(range.firstChannels, range.lastChannels),
                        fmt::format("{:.2f} to {:.2f}", range.firstTimeUs, range.lastTimeUs));
  }
  return text;
}

std::string runText(const ExplainReport& report) {
  if (report.backend.empty()) return "";
  // What a simulation takes says nothing about the prediction.
  const bool simulated = report.simulated();
  std::string text = fmt::format(
      "\nMeasured ({} backend)\n  {:>14}  {:<22}{:>14}{:>20}{:>22}{:>8}\n", report.backend, "bytes",
      "choice", "predicted us", simulated ? "simulation on CPU us" : "measured us",
      simulated ? "" : "measured / predicted", "wrong");
  for (const MeasuredRow& row : report.run) {
    const double predicted = row.choice.timeUs;
    text += fmt::format("  {:>14}  {:<22}{:>14}{:>20.2f}{:>22}{:>8}\n", bytesText(row.bytes),
                        nameOfBoth(row.choice.algorithm, row.choice.protocol), timeText(predicted),
                        row.measuredUs, simulated ? "" : ratioText(row.measuredUs, predicted),
                        row.wrong);
  }
  if (simulated) text += kSimulationNote;
  return text;
}

std::string titleOf(const ExplainReport& report) {
  return fmt::format("{}, {} ranks on {} node{}: {}", nameOf(report.question.operation),
                     report.ranks, report.nodes, report.nodes == 1 ? "" : "s", report.source);
}

Json choiceJson(const ExplainReport& report) {
  const tuning::Choice& choice = report.explanation.choice;
  return {{"algorithm", nameOf(choice.algorithm)},
          {"protocol", nameOf(choice.protocol)},
          {"channels", choice.channels},
          {"threads", choice.threads},
          {"allowed", choice.allowed},
          {"predicted_us", choice.timeUs},
          {"gb_per_second", bandwidthOf(report.question.bytes, choice.timeUs)},
          {"bus_gb_per_second", report.busBandwidth(report.question.bytes, choice.timeUs)}};
}

}  // namespace

std::string svgOf(const ExplainReport& report) {
  std::vector<PlotCurve> curves;
  PlotCurve chosen{"the choice", PlotCurve::Kind::choice, {}};
  tuning::Question question = report.question;
  for (const uint64_t bytes : plotSizes(report.minBytes, report.maxBytes)) {
    question.bytes = bytes;
    const tuning::Explanation explanation = tuning::explain(report.model, question);
    for (const tuning::CandidateReport& row : explanation.candidates) {
      if (!(row.timeUs > 0)) continue;
      if (row.chosen) chosen.points.push_back({bytes, row.timeUs});
      // A call that is too large for a candidate ends its curve.
      if (row.exclusion == tuning::Exclusion::tooLarge) continue;
      const bool possible = row.exclusion == tuning::Exclusion::none;
      curveOf(curves, nameOfBoth(row.algorithm, row.protocol),
              possible ? PlotCurve::Kind::candidate : PlotCurve::Kind::impossible)
          .points.push_back({bytes, row.timeUs});
    }
  }
  std::ranges::stable_sort(curves, {}, [](const PlotCurve& curve) {
    return std::pair(curve.kind, std::string_view(curve.name));
  });
  curves.push_back(std::move(chosen));
  return svgOf(Plot{titleOf(report), report.minBytes, report.maxBytes, std::move(curves)});
}

double ExplainReport::busBandwidth(uint64_t bytes, double timeUs) const {
  return bandwidthOf(bytes, timeUs) * bench::busFactor(operation, ranks);
}

std::string timeText(double timeUs) {
  return timeUs > 0 ? fmt::format("{:.2f}", timeUs) : std::string("-");
}

std::string bandwidthText(uint64_t bytes, double timeUs) {
  return timeUs > 0 ? fmt::format("{:.3f}", bandwidthOf(bytes, timeUs)) : std::string("-");
}

std::string spanText(int first, int last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{} to {}", first, last);
}

double bandwidthOf(uint64_t bytes, double timeUs) {
  return timeUs > 0 ? static_cast<double>(bytes) / timeUs / 1000 : 0;
}

std::string ratioText(double measuredUs, double predictedUs) {
  return predictedUs > 0 ? fmt::format("{:.2f}", measuredUs / predictedUs) : std::string("-");
}

std::string bytesText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    unit++;
  }
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

std::string textOf(const ExplainReport& report) {
  const bench::OperationInfo& info = bench::operationInfo(report.operation);
  const tuning::Choice& choice = report.explanation.choice;
  std::string text = fmt::format(
      "{} of {} ({} {}{}) by {} rank{} on {} node{}: {}\n", nameOf(report.question.operation),
      bytesText(report.question.bytes), report.count, report.typeName,
      info.reduces ? ", " + report.reductionName : "", report.ranks, report.ranks == 1 ? "" : "s",
      report.nodes, report.nodes == 1 ? "" : "s", report.source);
  if (!report.network.empty()) text += fmt::format("Network: {}\n", report.network);
  if (report.asNccl) text += "As if all of NCCL's algorithms and none of ours were implemented.\n";
  if (!report.tunerName.empty()) text += fmt::format("Tuner plug-in: {}\n", report.tunerName);
  for (const std::string& warning : report.warnings) text += "Warning: " + warning + "\n";
  text += fmt::format("Choice: {}, {} channel{} of {} threads\n",
                      nameOfBoth(choice.algorithm, choice.protocol), choice.channels,
                      choice.channels == 1 ? "" : "s", choice.threads);
  if (report.ranks > 1) {
    text += fmt::format("Predicted: {} us, {:.3f} GB/s (bus bandwidth {:.3f} GB/s)\n",
                        timeText(choice.timeUs), bandwidthOf(report.question.bytes, choice.timeUs),
                        report.busBandwidth(report.question.bytes, choice.timeUs));
  }
  return text + "\n" + candidatesText(report) + rangesText(report) + runText(report);
}

std::string jsonOf(const ExplainReport& report) {
  Json json = {{"machine", report.source},
               {"nodes", report.nodes},
               {"ranks", report.ranks},
               {"as_nccl", report.asNccl},
               {"network", report.network},
               {"tuner", report.tunerName},
               {"operation", nameOf(report.question.operation)},
               {"bytes", report.question.bytes},
               {"count", report.count},
               {"type", report.typeName}};
  if (bench::operationInfo(report.operation).reduces) json["reduction"] = report.reductionName;
  json["choice"] = choiceJson(report);
  json["candidates"] = Json::array();
  for (const tuning::CandidateReport& row : report.explanation.candidates) {
    Json entry = {{"algorithm", nameOf(row.algorithm)},
                  {"protocol", nameOf(row.protocol)},
                  {"chosen", row.chosen},
                  {"possible", row.exclusion == tuning::Exclusion::none},
                  {"allowed", row.allowed},
                  {"measured", row.measured},
                  {"reason", row.reason}};
    if (row.timeUs > 0) entry["predicted_us"] = row.timeUs;
    json["candidates"].push_back(std::move(entry));
  }
  json["ranges"] = Json::array();
  for (const tuning::ChoiceRange& range : report.ranges) {
    json["ranges"].push_back({{"first_bytes", range.firstBytes},
                              {"last_bytes", range.lastBytes},
                              {"algorithm", nameOf(range.algorithm)},
                              {"protocol", nameOf(range.protocol)},
                              {"first_channels", range.firstChannels},
                              {"last_channels", range.lastChannels},
                              {"first_us", range.firstTimeUs},
                              {"last_us", range.lastTimeUs}});
  }
  json["warnings"] = report.warnings;
  if (!report.backend.empty()) {
    json["run"] = {
        {"backend", report.backend}, {"simulated", report.simulated()}, {"rows", Json::array()}};
    for (const MeasuredRow& row : report.run) {
      json["run"]["rows"].push_back({{"bytes", row.bytes},
                                     {"algorithm", nameOf(row.choice.algorithm)},
                                     {"protocol", nameOf(row.choice.protocol)},
                                     {"predicted_us", row.choice.timeUs},
                                     {"measured_us", row.measuredUs},
                                     {"wrong", row.wrong}});
    }
  }
  return json.dump(2) + "\n";
}

}  // namespace unisono::explain
