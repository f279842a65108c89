// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "explain_report.h"

// `unisono explain --svg`: the predicted time of each candidate over the sizes, both axes
// logarithmic. Candidates that cannot run are dashed and grey, the choice is drawn wide below them.
namespace unisono::explain {
namespace {

constexpr double kWidth = 980, kHeight = 560;
constexpr double kLeft = 80, kRight = 250, kTop = 50, kBottom = 60;
constexpr double kPointsPerOctave = 4;
constexpr const char* kColours[] = {"#1b6ca8", "#c8553d", "#3d8b37", "#8e5aa8",
                                    "#b8860b", "#2a9d8f", "#6d4c41"};

struct Point {
  uint64_t bytes;
  double timeUs;
};
struct Curve {
  std::string name;
  bool possible = false;
  std::vector<Point> points;
};

std::vector<uint64_t> sizesOf(const ExplainReport& report) {
  std::vector<uint64_t> sizes;
  const double low = std::log2(static_cast<double>(std::max<uint64_t>(report.minBytes, 1)));
  const double high = std::log2(static_cast<double>(std::max<uint64_t>(report.maxBytes, 1)));
  const auto points = static_cast<int>(std::ceil((high - low) * kPointsPerOctave));
  for (int point = 0; point < points; point++) {
    const auto bytes = static_cast<uint64_t>(std::exp2(low + point / kPointsPerOctave) + 0.5);
    if (sizes.empty() || bytes > sizes.back()) sizes.push_back(bytes);
  }
  if (sizes.empty() || sizes.back() < report.maxBytes) sizes.push_back(report.maxBytes);
  return sizes;
}

// The curve of each candidate, and that of the choice last.
std::vector<Curve> curvesOf(const ExplainReport& report, const std::vector<uint64_t>& sizes) {
  std::vector<Curve> curves;
  Curve chosen{"the choice", true, {}};
  tuning::Question question = report.question;
  for (const uint64_t bytes : sizes) {
    question.bytes = bytes;
    const tuning::Explanation explanation = tuning::explain(report.model, question);
    for (const tuning::CandidateReport& row : explanation.candidates) {
      if (!(row.timeUs > 0)) continue;
      if (row.chosen) chosen.points.push_back({bytes, row.timeUs});
      // A call that is too large for a candidate ends its curve.
      if (row.exclusion == tuning::Exclusion::tooLarge) continue;
      const std::string name =
          fmt::format("{} {}", tuning::nameOf(row.algorithm), tuning::nameOf(row.protocol));
      auto curve = std::find_if(curves.begin(), curves.end(),
                                [&](const Curve& other) { return other.name == name; });
      if (curve == curves.end()) {
        curves.push_back({name, row.exclusion == tuning::Exclusion::none, {}});
        curve = curves.end() - 1;
      }
      curve->points.push_back({bytes, row.timeUs});
    }
  }
  std::stable_sort(curves.begin(), curves.end(), [](const Curve& a, const Curve& b) {
    return a.possible != b.possible ? a.possible : a.name < b.name;
  });
  curves.push_back(std::move(chosen));
  return curves;
}

class Plot {
 public:
  Plot(const ExplainReport& report, const std::vector<Curve>& curves) : report_(report) {
    double lowest = 1e300, highest = 0;
    for (const Curve& curve : curves) {
      for (const Point& point : curve.points) {
        lowest = std::min(lowest, point.timeUs);
        highest = std::max(highest, point.timeUs);
      }
    }
    if (highest == 0) lowest = highest = 1;
    lowTime_ = std::floor(std::log10(lowest));
    highTime_ = std::max(std::ceil(std::log10(highest)), lowTime_ + 1);
    lowSize_ = std::log2(static_cast<double>(std::max<uint64_t>(report.minBytes, 1)));
    highSize_ = std::max(std::log2(static_cast<double>(std::max<uint64_t>(report.maxBytes, 1))),
                         lowSize_ + 1);
  }

  std::string draw(const std::vector<Curve>& curves) const {
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" "
        "height=\"{1}\" fill=\"white\"/>\n",
        kWidth, kHeight);
    svg += fmt::format(
        "<text x=\"{}\" y=\"28\" font-size=\"16\">{}</text>\n", kLeft,
        escapeXml(fmt::format("{}, {} ranks on {} node{}: {}",
                              tuning::nameOf(report_.question.operation), report_.ranks,
                              report_.nodes, report_.nodes == 1 ? "" : "s", report_.source)));
    svg += axes();
    svg += line(curves.back(), "#f2c94c", 7, "");
    size_t row = 0, colour = 0;
    for (size_t i = 0; i + 1 < curves.size(); i++) {
      const bool possible = curves[i].possible;
      const char* stroke = possible ? kColours[colour++ % std::size(kColours)] : "#b0b7bd";
      svg += line(curves[i], stroke, possible ? 2 : 1.2, possible ? "" : "4 3");
      svg += legend(curves[i].name + (possible ? "" : " (cannot run)"), stroke, row++);
    }
    svg += legend("the choice", "#f2c94c", row);
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

  std::string line(const Curve& curve, const char* stroke, double width, const char* dashes) const {
    std::string points;
    for (const Point& point : curve.points) {
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

  const ExplainReport& report_;
  double lowTime_, highTime_, lowSize_, highSize_;
};

}  // namespace

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

std::string svgOf(const ExplainReport& report) {
  const std::vector<Curve> curves = curvesOf(report, sizesOf(report));
  return Plot(report, curves).draw(curves);
}

}  // namespace unisono::explain
