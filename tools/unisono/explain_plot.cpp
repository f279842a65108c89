// SPDX-License-Identifier: Apache-2.0
#include "explain_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "explain_report.h"

namespace unisono::explain {
namespace {

constexpr double kWidth = 980, kHeight = 560;
constexpr double kLeft = 80, kRight = 250, kTop = 50, kBottom = 60;
constexpr double kPointsPerOctave = 4;
constexpr const char* kColours[] = {"#1b6ca8", "#c8553d", "#3d8b37", "#8e5aa8",
                                    "#b8860b", "#2a9d8f", "#6d4c41"};
constexpr const char* kChoiceColour = "#f2c94c";

class Drawing {
 public:
  explicit Drawing(const Plot& plot) : plot_(plot) {
    double lowest = 1e300, highest = 0;
    for (const PlotCurve& curve : plot.curves) {
      for (const PlotPoint& point : curve.points) {
        lowest = std::min(lowest, point.timeUs);
        highest = std::max(highest, point.timeUs);
      }
    }
    if (highest == 0) lowest = highest = 1;
    lowTime_ = std::floor(std::log10(lowest));
    highTime_ = std::max(std::ceil(std::log10(highest)), lowTime_ + 1);
    lowSize_ = std::log2(static_cast<double>(std::max<uint64_t>(plot.minBytes, 1)));
    highSize_ = std::max(std::log2(static_cast<double>(std::max<uint64_t>(plot.maxBytes, 1))),
                         lowSize_ + 1);
  }

  std::string draw() const {
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" "
        "height=\"{1}\" fill=\"white\"/>\n",
        kWidth, kHeight);
    svg += fmt::format("<text x=\"{}\" y=\"28\" font-size=\"16\">{}</text>\n", kLeft,
                       escapeXml(plot_.title));
    svg += axes();
    for (const PlotCurve& curve : plot_.curves) {
      if (curve.kind == PlotCurve::Kind::choice) svg += line(curve, kChoiceColour, 7, "");
    }
    std::string legends;
    size_t row = 0, colour = 0;
    for (const PlotCurve& curve : plot_.curves) {
      if (curve.kind == PlotCurve::Kind::choice) continue;
      const bool possible = curve.kind == PlotCurve::Kind::candidate;
      const char* stroke = possible ? kColours[colour++ % std::size(kColours)] : "#b0b7bd";
      svg += line(curve, stroke, possible ? 2 : 1.2, possible ? "" : "4 3");
      legends += legend(curve.name + (possible ? "" : " (cannot run)"), stroke, row++);
    }
    svg += legends + legend("the choice", kChoiceColour, row);
    return svg + "</svg>\n";
  }

 private:
  double x(uint64_t bytes) const {
    const double exponent = std::log2(static_cast<double>(std::max<uint64_t>(bytes, 1)));
    return kLeft + (exponent - lowSize_) / (highSize_ - lowSize_) * (kWidth - kLeft - kRight);
  }
  double y(double timeUs) const {
    return kHeight - kBottom -
           (std::log10(timeUs) - lowTime_) / (highTime_ - lowTime_) * (kHeight - kTop - kBottom);
  }

  std::string axes() const {
    std::string svg;
    constexpr double kLabels = 6;
    const int step = std::max(1, static_cast<int>(std::ceil((highSize_ - lowSize_) / kLabels)));
    for (int exponent = static_cast<int>(std::ceil(lowSize_)); exponent <= highSize_;
         exponent += step) {
      const uint64_t bytes = uint64_t{1} << exponent;
      svg += fmt::format(
          "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#e3e6e8\"/>"
          "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
          x(bytes), kTop, kHeight - kBottom, kHeight - kBottom + 18, bytesText(bytes));
    }
    for (int exponent = static_cast<int>(lowTime_); exponent <= highTime_; exponent++) {
      const double time = std::pow(10, exponent);
      svg += fmt::format(
          "<line x1=\"{1}\" x2=\"{2}\" y1=\"{0:.1f}\" y2=\"{0:.1f}\" stroke=\"#e3e6e8\"/>"
          "<text x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5:g} us</text>\n",
          y(time), kLeft, kWidth - kRight, kLeft - 8, y(time) + 4, time);
    }
    return svg + fmt::format(
                     "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">bytes (the larger of a rank's "
                     "input and output)</text>\n",
                     (kLeft + kWidth - kRight) / 2, kHeight - 14);
  }

  std::string line(const PlotCurve& curve, const char* stroke, double width,
                   const char* dashes) const {
    std::string points;
    for (const PlotPoint& point : curve.points) {
      points += fmt::format("{:.1f},{:.1f} ", x(point.bytes), y(point.timeUs));
    }
    return fmt::format(
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-dasharray=\"{}\" "
        "stroke-linejoin=\"round\" points=\"{}\"><title>{}</title></polyline>\n",
        stroke, width, dashes, points, escapeXml(curve.name));
  }

  static std::string legend(const std::string& name, const char* stroke, size_t row) {
    const double top = kTop + 12 + 20 * static_cast<double>(row);
    return fmt::format(
        "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\" stroke=\"{3}\" stroke-width=\"3\"/>"
        "<text x=\"{4}\" y=\"{5}\">{6}</text>\n",
        kWidth - kRight + 20, kWidth - kRight + 44, top, stroke, kWidth - kRight + 52, top + 4,
        escapeXml(name));
  }

  const Plot& plot_;
  double lowTime_, highTime_, lowSize_, highSize_;
};

}  // namespace

std::vector<uint64_t> plotSizes(uint64_t minBytes, uint64_t maxBytes) {
  std::vector<uint64_t> sizes;
  const double low = std::log2(static_cast<double>(std::max<uint64_t>(minBytes, 1)));
  const double high = std::log2(static_cast<double>(std::max<uint64_t>(maxBytes, 1)));
  const auto points = static_cast<int>(std::ceil((high - low) * kPointsPerOctave));
  for (int point = 0; point < points; point++) {
    const auto bytes = static_cast<uint64_t>(std::exp2(low + point / kPointsPerOctave) + 0.5);
    if (sizes.empty() || bytes > sizes.back()) sizes.push_back(bytes);
  }
  if (sizes.empty() || sizes.back() < maxBytes) sizes.push_back(maxBytes);
  return sizes;
}

PlotCurve& curveOf(std::vector<PlotCurve>& curves, const std::string& name, PlotCurve::Kind kind) {
  const auto curve = std::ranges::find(curves, name, &PlotCurve::name);
  return curve != curves.end() ? *curve : curves.emplace_back(PlotCurve{name, kind, {}});
}

std::string escapeXml(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else {
      result += c;
    }
  }
  return result;
}

std::string svgOf(const Plot& plot) {
  return Drawing(plot).draw();
}

}  // namespace unisono::explain
