// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench_options.h"

// The output of the bench: a table, line by line as results arrive, and JSON at the end.
namespace unisono::bench {

// Known before the first size.
struct RunDescription {
  struct LibraryPart {
    std::string path;
    std::string version;
  };
  std::vector<LibraryPart> libraries;  // ours, and the other one with --against
  std::string backend;
  int ranks = 0;
  int nodes = 1;
  int processes = 1;
  std::vector<std::string> rankTexts;  // "node 0, process 0, device 0 (NVIDIA H200 ...)"
  std::string command;
};

// One library's results of one row, in place or out of place.
struct Measurement {
  std::vector<double> seconds;  // one per repeat
  uint64_t wrong = 0;
  std::string firstWrong;
};

struct Row {
  size_t bytes = 0;
  size_t count = 0;
  ElementType type{};
  BenchReduction reduction{};
  int root = -1;
  bool sampled = false;
  std::vector<Measurement> outOfPlace;  // by library
  std::vector<Measurement> inPlace;     // empty if the operation has none
};

struct Spread {
  double min = 0, median = 0, max = 0;
};
// `values` must not be empty. The median of an even number of values is the mean of the middle two.
Spread spreadOf(std::vector<double> values);

// For each repeat the time of the other library divided by ours: above 1 ours is faster.
std::vector<double> ratios(const Measurement& ours, const Measurement& other);

class Report {
 public:
  // `table` is not closed.
  Report(const BenchOptions& options, RunDescription description, std::FILE* table);

  void header();
  // Prints one line (with --against one for each placement) and flushes it.
  void add(const Row& row);
  void footer();
  // Throws unisono::Error when the file cannot be written.
  void writeJson() const;

 private:
  std::string placementColumns(const Row& row, const std::vector<Measurement>& results) const;
  void comparison(const Row& row, const std::vector<Measurement>& results, const char* placement);
  void wrongLines(const Row& row);
  nlohmann::json rowJson(const Row& row) const;
  double busBandwidth(const Row& row, double seconds) const;
  std::string rowStart(const Row& row) const;

  const BenchOptions& options_;
  RunDescription description_;
  std::FILE* table_;
  std::vector<Row> rows_;
};

}  // namespace unisono::bench
