// SPDX-License-Identifier: Apache-2.0
#include "bench_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace unisono::bench {
namespace {

// The table shows bandwidths in 10^9 bytes per second.
constexpr double kGiga = 1e9;

double algorithmBandwidth(const Row& row, double seconds) {
  return seconds > 0 ? static_cast<double>(row.bytes) / kGiga / seconds : 0;
}

std::string wrongText(const Measurement& result, bool checked) {
  return checked ? fmt::format("{}", result.wrong) : "n/a";
}

nlohmann::json spreadJson(const std::vector<double>& values) {
  Spread spread = spreadOf(values);
  return {{"min", spread.min}, {"median", spread.median}, {"max", spread.max}};
}

}  // namespace

Spread spreadOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t middle = values.size() / 2;
  double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {values.front(), median, values.back()};
}

std::vector<double> ratios(const Measurement& ours, const Measurement& other) {
  std::vector<double> result;
  for (size_t i = 0; i < ours.seconds.size(); i++) {
    result.push_back(other.seconds[i] / ours.seconds[i]);
  }
  return result;
}

Report::Report(const BenchOptions& options, RunDescription description, std::FILE* table)
    : options_(options), description_(std::move(description)), table_(table) {}

double Report::busBandwidth(const Row& row, double seconds) const {
  return algorithmBandwidth(row, seconds) * busFactor(options_.operation, description_.ranks);
}

void Report::header() {
  const OperationInfo& info = operationInfo(options_.operation);
  fmt::print(table_, "# {}: {}\n", info.name, info.meaning);
  for (size_t i = 0; i < description_.libraries.size(); i++) {
    const char* role = description_.libraries.size() == 1 ? "library" : (i == 0 ? "ours" : "other");
    fmt::print(table_, "# {}: {} (NCCL API {})\n", role, description_.libraries[i].path,
               description_.libraries[i].version);
  }
  fmt::print(table_, "# backend {}, {} ranks, {} node{}, {} process{}\n", description_.backend,
             description_.ranks, description_.nodes, description_.nodes == 1 ? "" : "s",
             description_.processes, description_.processes == 1 ? "" : "es");
  for (size_t rank = 0; rank < description_.rankTexts.size(); rank++) {
    fmt::print(table_, "#   rank {:3}: {}\n", rank, description_.rankTexts[rank]);
  }
  fmt::print(table_, "# {} warm-up calls, {} timed{}, results {}, seed {}\n", options_.warmup,
             options_.iterations,
             options_.graphLaunches > 0
                 ? fmt::format(" (as a graph, launched {} times)", options_.graphLaunches)
                 : "",
             options_.checks > 0 ? "checked" : "not checked", options_.seed);
  if (options_.against.empty()) {
    fmt::print(table_, "#\n#{:>63}{}\n", "out of place",
               info.hasInPlace ? fmt::format("{:>43}", "in place") : "");
    const std::string columns =
        fmt::format("{:>12}{:>10}{:>10}{:>8}", "time us", "alg GB/s", "bus GB/s", "wrong");
    fmt::print(table_, "#{:>11}{:>13}{:>9}{:>7}{:>5}{}{}\n", "size B", "count", "type", "op",
               "root", columns, info.hasInPlace ? "   " + columns : "");
  } else {
    fmt::print(
        table_,
        "# ratio: time of the other library / time of ours (above 1: ours is faster), {} repeats\n",
        options_.repeatCount());
    fmt::print(table_, "#{:>11}{:>13}{:>9}{:>7}{:>5}{:>14}{:>12}{:>12}{:>10}{:>24}{:>14}\n",
               "size B", "count", "type", "op", "root", "placement", "ours us", "other us",
               "ours bus", "ratio min/median/max", "wrong o/o");
  }
  std::fflush(table_);
}

std::string Report::rowStart(const Row& row) const {
  const OperationInfo& info = operationInfo(options_.operation);
  return fmt::format("{:>12}{:>13}{:>9}{:>7}{:>5}", row.bytes, row.count,
                     elementInfo(row.type).name, info.reduces ? reductionName(row.reduction) : "-",
                     info.hasRoot ? fmt::format("{}", row.root) : "-");
}

std::string Report::placementColumns(const Row& row,
                                     const std::vector<Measurement>& results) const {
  double seconds = spreadOf(results[0].seconds).median;
  return fmt::format("{:>12.2f}{:>10.3f}{:>10.3f}{:>8}", seconds * 1e6,
                     algorithmBandwidth(row, seconds), busBandwidth(row, seconds),
                     wrongText(results[0], options_.checks > 0));
}

void Report::comparison(const Row& row, const std::vector<Measurement>& results,
                        const char* placement) {
  const bool checked = options_.checks > 0;
  double ours = spreadOf(results[0].seconds).median;
  double other = spreadOf(results[1].seconds).median;
  Spread ratio = spreadOf(ratios(results[0], results[1]));
  fmt::print(table_, "{}{:>14}{:>12.2f}{:>12.2f}{:>10.3f}{:>24}{:>14}{}\n", rowStart(row),
             placement, ours * 1e6, other * 1e6, busBandwidth(row, ours),
             fmt::format("{:.3f}/{:.3f}/{:.3f}", ratio.min, ratio.median, ratio.max),
             wrongText(results[0], checked) + "/" + wrongText(results[1], checked),
             row.sampled ? "  (sampled)" : "");
}

void Report::wrongLines(const Row& row) {
  for (const auto* placement : {&row.outOfPlace, &row.inPlace}) {
    for (size_t library = 0; library < placement->size(); library++) {
      const Measurement& result = (*placement)[library];
      if (result.wrong == 0) continue;
      fmt::print(table_, "#   wrong{}{}: {}\n",
                 placement == &row.inPlace ? ", in place" : ", out of place",
                 placement->size() == 1 ? "" : (library == 0 ? ", ours" : ", other"),
                 result.firstWrong);
    }
  }
}

void Report::add(const Row& row) {
  rows_.push_back(row);
  if (options_.against.empty()) {
    fmt::print(table_, "{}{}{}{}\n", rowStart(row), placementColumns(row, row.outOfPlace),
               row.inPlace.empty() ? "" : "   " + placementColumns(row, row.inPlace),
               row.sampled ? "  (sampled)" : "");
  } else {
    comparison(row, row.outOfPlace, "out of place");
    if (!row.inPlace.empty()) comparison(row, row.inPlace, "in place");
  }
  wrongLines(row);
  std::fflush(table_);
}

void Report::footer() {
  uint64_t wrong = 0;
  double bandwidth = 0;
  size_t measured = 0;
  bool sampled = false;
  for (const Row& row : rows_) {
    sampled = sampled || row.sampled;
    for (const auto* placement : {&row.outOfPlace, &row.inPlace}) {
      for (const Measurement& result : *placement) wrong += result.wrong;
      if (placement->empty()) continue;
      bandwidth += busBandwidth(row, spreadOf((*placement)[0].seconds).median);
      measured++;
    }
  }
  if (sampled) {
    fmt::print(
        table_,
        "# (sampled): pieces larger than 1 GiB were checked at both ends and in every 8th MiB\n");
  }
  const std::string verdict = options_.checks == 0 ? "results were not checked"
                              : wrong == 0         ? "all results correct"
                                                   : fmt::format("{} elements WRONG", wrong);
  fmt::print(table_, "# {}; average bus bandwidth {:.3f} GB/s\n", verdict,
             measured > 0 ? bandwidth / static_cast<double>(measured) : 0);
  std::fflush(table_);
}

nlohmann::json Report::rowJson(const Row& row) const {
  const OperationInfo& info = operationInfo(options_.operation);
  nlohmann::json json = {{"bytes", row.bytes},
                         {"count", row.count},
                         {"type", elementInfo(row.type).name},
                         {"sampled", row.sampled}};
  if (info.reduces) json["reduction"] = reductionName(row.reduction);
  if (info.hasRoot) json["root"] = row.root;
  auto placementJson = [&](const std::vector<Measurement>& results) {
    nlohmann::json part;
    for (size_t library = 0; library < results.size(); library++) {
      const Measurement& result = results[library];
      double median = spreadOf(result.seconds).median;
      nlohmann::json entry = {{"seconds", result.seconds},
                              {"time", spreadJson(result.seconds)},
                              {"algorithm_gb_per_second", algorithmBandwidth(row, median)},
                              {"bus_gb_per_second", busBandwidth(row, median)}};
      if (options_.checks > 0) entry["wrong"] = result.wrong;
      if (!result.firstWrong.empty()) entry["first_wrong"] = result.firstWrong;
      part[library == 0 ? "ours" : "other"] = entry;
    }
    if (results.size() == 2) part["ratio"] = spreadJson(ratios(results[0], results[1]));
    return part;
  };
  json["out_of_place"] = placementJson(row.outOfPlace);
  if (!row.inPlace.empty()) json["in_place"] = placementJson(row.inPlace);
  return json;
}

void Report::writeJson() const {
  if (options_.jsonPath.empty()) return;
  nlohmann::json json;
  json["operation"] = operationInfo(options_.operation).name;
  json["backend"] = description_.backend;
  json["ranks"] = description_.ranks;
  json["nodes"] = description_.nodes;
  json["processes"] = description_.processes;
  json["rank_places"] = description_.rankTexts;
  json["bus_factor"] = busFactor(options_.operation, description_.ranks);
  json["seed"] = options_.seed;
  json["iterations"] = options_.iterations;
  json["warmup"] = options_.warmup;
  json["graph_launches"] = options_.graphLaunches;
  json["registration"] = options_.registration;
  json["checked"] = options_.checks > 0;
  json["repeats"] = options_.repeatCount();
  for (const RunDescription::LibraryPart& library : description_.libraries) {
    json["libraries"].push_back({{"path", library.path}, {"version", library.version}});
  }
  uint64_t wrong = 0;
  json["rows"] = nlohmann::json::array();
  for (const Row& row : rows_) {
    json["rows"].push_back(rowJson(row));
    for (const auto* placement : {&row.outOfPlace, &row.inPlace}) {
      for (const Measurement& result : *placement) wrong += result.wrong;
    }
  }
  json["wrong"] = wrong;
  const std::string text = json.dump(2) + "\n";
  if (options_.jsonPath == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    return;
  }
  std::ofstream file(options_.jsonPath);
  file << text;
  file.close();
  if (!file) {
    throw Error(ErrorCode::systemError, fmt::format("cannot write {}", options_.jsonPath))
        .remedy("Name a file in a writable directory with --json");
  }
}

}  // namespace unisono::bench
