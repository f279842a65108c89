// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "operations.h"
#include "topo_view.h"
#include "tuning/choice.h"

// What `unisono explain` shows: why a call is carried as it is, as plain data.
namespace unisono::explain {

// One size of a real run, with the prediction.
struct MeasuredRow {
  uint64_t bytes;
  tuning::Choice choice;
  double measuredUs;
  uint64_t wrong;  // elements that differ from the expected result
};

struct ExplainReport {
  std::string source;  // file, preset or "this machine"
  int nodes = 1, ranks = 1;
  std::string network;  // that joins the nodes; empty: none, or shared memory
  bool asNccl = false;
  bench::BenchOperation operation{};
  std::string typeName, reductionName;
  uint64_t count = 0;  // of the call, in elements
  tuning::Question question;
  tuning::CostModel model;
  tuning::Explanation explanation;
  uint64_t minBytes = 0, maxBytes = 0;
  std::vector<tuning::ChoiceRange> ranges;         // from minBytes to maxBytes
  std::string tunerName;                           // of the plug-in that is asked; empty: none
  std::shared_ptr<const tuning::Advisor> advisor;  // that plug-in
  std::vector<std::string> warnings;
  std::string backend;  // of the run; empty: there was none
  std::vector<MeasuredRow> run;

  bool simulated() const { return backend == "host"; }
  double busBandwidth(uint64_t bytes, double timeUs) const;
};

std::string textOf(const ExplainReport& report);
std::string jsonOf(const ExplainReport& report);
// Draws the predicted time of every candidate over the sizes.
std::string svgOf(const ExplainReport& report);

// Below the times of a run on the host backend.
inline constexpr const char* kSimulationNote =
    "  A CPU simulated the GPUs: the results are real, the times of the simulation are not those "
    "of "
    "GPUs.\n";

// "12.34", "-" for a time that is not known (0).
std::string timeText(double timeUs);
// In GB/s: the bytes of the call by time; 0 or "-" if the time is not known.
double bandwidthOf(uint64_t bytes, double timeUs);
std::string bandwidthText(uint64_t bytes, double timeUs);
// "3", "3 to 8".
std::string spanText(int first, int last);
// Measured by predicted.
std::string ratioText(double measuredUs, double predictedUs);

// Text for SVG.
std::string escapeXml(const std::string& text);

// "256 KiB", "1000001 B".
std::string bytesText(uint64_t bytes);

}  // namespace unisono::explain
