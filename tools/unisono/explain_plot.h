// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// A plot of predicted times over sizes as SVG, both axes logarithmic.
namespace unisono::explain {

struct PlotPoint {
  uint64_t bytes;
  double timeUs;
};
struct PlotCurve {
  // Candidates that cannot run are dashed and grey, a choice is drawn wide below the others.
  enum class Kind : uint8_t { candidate, impossible, choice };
  std::string name;
  Kind kind = Kind::candidate;
  std::vector<PlotPoint> points;
};
struct Plot {
  std::string title;
  uint64_t minBytes, maxBytes;
  std::vector<PlotCurve> curves;
};

// The sizes at which a plot of this range has points.
std::vector<uint64_t> plotSizes(uint64_t minBytes, uint64_t maxBytes);

// The curve of this name, which is added if there is none.
PlotCurve& curveOf(std::vector<PlotCurve>& curves, const std::string& name, PlotCurve::Kind kind);

std::string svgOf(const Plot& plot);

}  // namespace unisono::explain
