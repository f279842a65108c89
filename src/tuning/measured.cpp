// SPDX-License-Identifier: Apache-2.0
#include "tuning/measured.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/error.h"

namespace unisono::tuning {
namespace {

constexpr int64_t kMaxNumber = int64_t{1} << 50;
constexpr double kMaxTimeUs = 1e12;

bool sameKind(const MeasuredCurve& a, const MeasuredCurve& b) {
  return a.operation == b.operation && a.algorithm == b.algorithm && a.protocol == b.protocol;
}

// The words of a line, without its comment.
std::vector<std::string_view> wordsOf(std::string_view line) {
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  constexpr std::string_view kBlank = " \t\r";
  while (true) {
    const size_t begin = line.find_first_not_of(kBlank);
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const size_t length = std::min(line.find_first_of(kBlank), line.size());
    words.push_back(line.substr(0, length));
    line.remove_prefix(length);
  }
}

// Parses one line of the file.
class LineParser {
 public:
  LineParser(std::string_view source, size_t number, std::vector<std::string_view> words)
      : source_(source), number_(number), words_(std::move(words)) {
    constexpr size_t kWords = 7;
    if (words_.size() != kWords) {
      throw invalidUsage("{}:{} has {} words instead of {}", source_, number_, words_.size(),
                         kWords)
          .remedy("Write: operation algorithm protocol nodes ranks bytes microseconds");
    }
  }

  MeasuredCurve curve() const {
    return {static_cast<Operation>(element(0, "an operation", findOperation, operationNames())),
            static_cast<Algorithm>(element(1, "an algorithm", findAlgorithm, algorithmNames())),
            static_cast<Protocol>(element(2, "a protocol", findProtocol, protocolNames())),
            static_cast<int>(number(3, 1, 1 << 20)),
            static_cast<int>(number(4, 2, 1 << 20)),
            {{static_cast<uint64_t>(number(5, 0, kMaxNumber)), time(6)}}};
  }

 private:
  int element(size_t word, std::string_view kind, int (*find)(std::string_view),
              const std::string& names) const {
    const int index = find(words_[word]);
    if (index < 0) {
      throw invalidUsage("{}:{}: \"{}\" is not {}", source_, number_, words_[word], kind)
          .remedy(fmt::format("Use one of {}", names));
    }
    return index;
  }

  template <typename Value>
  bool parse(size_t word, Value& value) const {
    const std::string_view text = words_[word];
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    return problem == std::errc() && end == text.data() + text.size();
  }

  int64_t number(size_t word, int64_t lowest, int64_t highest) const {
    int64_t value = 0;
    if (!parse(word, value) || value < lowest || value > highest) {
      throw invalidUsage("{}:{}: \"{}\" is not a number from {} to {}", source_, number_,
                         words_[word], lowest, highest);
    }
    return value;
  }

  double time(size_t word) const {
    double value = 0;
    if (!parse(word, value) || !(value > 0) || !(value < kMaxTimeUs)) {
      throw invalidUsage("{}:{}: \"{}\" is not a time in microseconds", source_, number_,
                         words_[word]);
    }
    return value;
  }

  std::string_view source_;
  size_t number_;
  std::vector<std::string_view> words_;
};

// Points with the sizes of both curves, at the time that a line through the times of the two
// numbers of ranks has at `ranks`.
std::vector<MeasuredPoint> interpolate(const MeasuredCurve& a, const MeasuredCurve& b, int ranks) {
  std::vector<uint64_t> sizes;
  for (const MeasuredCurve* curve : {&a, &b}) {
    for (const MeasuredPoint& point : curve->points) sizes.push_back(point.bytes);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  std::vector<MeasuredPoint> points;
  const double share = static_cast<double>(ranks - a.ranks) / (b.ranks - a.ranks);
  for (const uint64_t bytes : sizes) {
    const double low = measuredTime(a.points, bytes), high = measuredTime(b.points, bytes);
    // Noise may make fewer ranks slower.
    points.push_back({bytes, std::max(low + share * (high - low), std::min(low, high))});
  }
  return points;
}

// The points of `curve` for another number of ranks.
std::vector<MeasuredPoint> scale(const MeasuredCurve& curve, int ranks) {
  constexpr double kRankUs = 0.17;  // all-reduce of 1 KB, from 2 to 4 H200
  const double factor = directTraffic(curve.operation, curve.algorithm, curve.ranks) /
                        directTraffic(curve.operation, curve.algorithm, ranks);
  const double more = std::max(kRankUs * (ranks - curve.ranks), 0.0);
  std::vector<MeasuredPoint> points = curve.points;
  for (MeasuredPoint& point : points) {
    point.bytes = static_cast<uint64_t>(static_cast<double>(point.bytes) * factor);
    point.timeUs += more;
  }
  return points;
}

}  // namespace

double directTraffic(Operation operation, Algorithm algorithm, int ranks) {
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  if (algorithm == Algorithm::twoShot) return 2 * (ranks - 1.0) / ranks;
  return scatters ? (ranks - 1.0) / ranks : ranks - 1.0;
}

const MeasuredTable& builtinMeasurements() {
  // H200, CUDA graphs, float sum, one process per GPU. Over LL, all-reduce on 2 and 4 GPUs of one
  // run (docs/results/2026-11-21-h200.md, 256 KB from the ratio to NCCL there), so that they
  // compare, and the others in 2026-11-22-direct.md; over LL128 in 2026-11-22-wide.md,
  // and from 64 MB on in 2026-11-22-in-place.md.
  struct Times {
    Operation operation;
    Algorithm algorithm;
    int ranks;
    std::vector<double> us;  // of 1, 4, 16, 64 and 256 KiB; over LL128 of 64 KiB to 256 MiB
  };
  constexpr Algorithm kDirect = Algorithm::direct, kTwoShot = Algorithm::twoShot;
  static const Times kLowLatency[] = {
      {Operation::allReduce, kDirect, 2, {2.12, 2.40, 2.53, 2.82, 4.10}},
      {Operation::allReduce, kDirect, 4, {2.46, 3.00, 3.08, 3.84, 7.20}},
      {Operation::allGather, kDirect, 2, {2.64, 2.89, 3.27, 3.12, 3.59}},
      {Operation::reduceScatter, kDirect, 2, {2.61, 2.86, 3.24, 3.08, 3.59}},
      {Operation::broadcast, kDirect, 2, {2.28, 2.83, 2.83, 2.69, 3.06}},
      {Operation::reduce, kDirect, 2, {2.20, 2.69, 2.69, 2.55, 3.08}},
  };
  static const Times kLowLatency128[] = {
      {Operation::allReduce, kDirect, 2, {4.148, 4.534, 7.152, 19.63, 62.23, 233.6, 923.9}},
      {Operation::allReduce, kTwoShot, 2, {5.504, 6.299, 6.922, 18.21, 57.14, 222.5, 809.3}},
      {Operation::allGather, kDirect, 2, {3.916, 4.43, 4.994, 10.88, 32.47, 111.7, 390.3}},
      {Operation::reduceScatter, kDirect, 2, {4.191, 4.247, 5.057, 12.59, 33.57, 124.5, 427.4}},
      {Operation::broadcast, kDirect, 2, {3.264, 3.279, 5.364, 16.05, 54.63, 204.5, 754.7}},
      {Operation::reduce, kDirect, 2, {3.656, 3.699, 5.003, 14.38, 51.96, 206.2, 734.8}},
  };
  // Never destroyed: the process may exit while another thread makes a communicator.
  static const MeasuredTable& table = *[] {
    auto* made = new MeasuredTable;
    const auto add = [&](Protocol protocol, const auto& curves, uint64_t bytes) {
      for (const Times& times : curves) {
        MeasuredCurve& curve = made->emplace_back(
            MeasuredCurve{times.operation, times.algorithm, protocol, 1, times.ranks, {}});
        for (size_t i = 0; i < times.us.size(); i++) {
          curve.points.push_back({bytes << 2 * i, times.us[i]});
        }
      }
    };
    add(Protocol::ll, kLowLatency, 1 << 10);
    add(Protocol::ll128, kLowLatency128, 64 << 10);
    return made;
  }();
  return table;
}

const MeasuredTable& ringMeasurements(const topology::MachineFacts& machine) {
  // As above, on 2 GPUs (docs/results/2026-11-22-lines.md and 2026-11-22-wide.md).
  struct Times {
    Operation operation;
    double us[6];  // of 1, 4, 16, 64, 256 and 1024 MiB
  };
  static constexpr Times kTimes[] = {
      {Operation::allReduce, {20.0, 35.1, 73.4, 244, 885, 3418}},
      {Operation::allGather, {15.2, 25.2, 46.6, 138, 480, 1834}},
      {Operation::reduceScatter, {12.5, 23.0, 49.6, 146, 465, 1809}},
      {Operation::broadcast, {14.6, 27.5, 69.3, 242, 922, 3632}},
      {Operation::reduce, {9.5, 21.8, 57.4, 206, 793, 3234}},
  };
  static const MeasuredTable& hopper = *[] {
    auto* made = new MeasuredTable;
    for (const Times& times : kTimes) {
      MeasuredCurve& curve = made->emplace_back(
          MeasuredCurve{times.operation, Algorithm::ring, Protocol::simple, 1, 2, {}});
      uint64_t bytes = 1 << 20;
      for (const double us : times.us) {
        curve.points.push_back({bytes, us});
        bytes *= 4;
      }
    }
    return made;
  }();
  static const MeasuredTable& none = *new MeasuredTable;
  const bool isHopper =
      machine.lowestSm == topology::kHopper && machine.highestSm == topology::kHopper;
  return isHopper && machine.switches > 0 ? hopper : none;
}

MeasuredTable parseMeasurements(std::string_view text, std::string_view source) {
  MeasuredTable table;
  for (size_t number = 1; !text.empty(); number++) {
    const size_t length = std::min(text.find('\n'), text.size());
    std::vector<std::string_view> words = wordsOf(text.substr(0, length));
    text.remove_prefix(std::min(length + 1, text.size()));
    if (words.empty()) continue;
    const MeasuredCurve line = LineParser(source, number, std::move(words)).curve();
    auto curve = std::find_if(table.begin(), table.end(), [&](const MeasuredCurve& other) {
      return sameKind(line, other) && line.nodes == other.nodes && line.ranks == other.ranks;
    });
    if (curve == table.end()) {
      table.push_back(line);
      continue;
    }
    const auto at = std::lower_bound(
        curve->points.begin(), curve->points.end(), line.points.front(),
        [](const MeasuredPoint& a, const MeasuredPoint& b) { return a.bytes < b.bytes; });
    if (at != curve->points.end() && at->bytes == line.points.front().bytes) {
      throw invalidUsage("{}:{} repeats a size of an earlier line", source, number);
    }
    curve->points.insert(at, line.points.front());
  }
  return table;
}

std::string formatMeasurements(const MeasuredTable& table) {
  std::string text;
  for (const MeasuredCurve& curve : table) {
    for (const MeasuredPoint& point : curve.points) {
      fmt::format_to(std::back_inserter(text), "{} {} {} {} {} {} {:.3f}\n",
                     nameOf(curve.operation), nameOf(curve.algorithm), nameOf(curve.protocol),
                     curve.nodes, curve.ranks, point.bytes, point.timeUs);
    }
  }
  return text;
}

void limitToLargerSizes(std::vector<MeasuredPoint>& points) {
  for (size_t i = points.size(); i-- > 1;) {
    points[i - 1].timeUs = std::min(points[i - 1].timeUs, points[i].timeUs);
  }
}

MeasuredTable replaceCurves(const MeasuredTable& base, const MeasuredTable& table) {
  MeasuredTable result = table;
  for (const MeasuredCurve& curve : base) {
    const bool replaced = std::any_of(table.begin(), table.end(), [&](const MeasuredCurve& other) {
      return sameKind(curve, other);
    });
    if (!replaced) result.push_back(curve);
  }
  return result;
}

std::vector<MeasuredPoint> pointsFor(const MeasuredTable& table, Operation operation,
                                     Algorithm algorithm, Protocol protocol, int nodes, int ranks) {
  std::vector<const MeasuredCurve*> curves;
  for (const MeasuredCurve& curve : table) {
    if (curve.operation != operation || curve.algorithm != algorithm ||
        curve.protocol != protocol || curve.nodes != nodes) {
      continue;
    }
    if (curve.ranks == ranks) return curve.points;
    curves.push_back(&curve);
  }
  const bool direct = algorithm == Algorithm::direct || algorithm == Algorithm::twoShot;
  if (!direct || nodes != 1 || curves.empty()) return {};
  if (curves.size() == 1) return scale(*curves.front(), ranks);
  std::sort(curves.begin(), curves.end(),
            [](const MeasuredCurve* a, const MeasuredCurve* b) { return a->ranks < b->ranks; });
  size_t upper = 1;
  while (upper + 1 < curves.size() && curves[upper]->ranks < ranks) upper++;
  return interpolate(*curves[upper - 1], *curves[upper], ranks);
}

double measuredTime(const std::vector<MeasuredPoint>& points, uint64_t bytes) {
  const auto above = std::lower_bound(
      points.begin(), points.end(), bytes,
      [](const MeasuredPoint& point, uint64_t value) { return point.bytes < value; });
  if (above == points.begin()) return points.front().timeUs;
  const MeasuredPoint& low = *(above - 1);
  if (above == points.end()) {
    // Noise in the last two points must not make long calls free.
    constexpr double kLeastShare = 0.25;
    const double perByte = low.timeUs / static_cast<double>(std::max<uint64_t>(low.bytes, 1));
    double slope = perByte;
    if (points.size() > 1) {
      const MeasuredPoint& before = points[points.size() - 2];
      slope = std::max((low.timeUs - before.timeUs) / static_cast<double>(low.bytes - before.bytes),
                       kLeastShare * perByte);
    }
    return low.timeUs + slope * static_cast<double>(bytes - low.bytes);
  }
  const double share =
      static_cast<double>(bytes - low.bytes) / static_cast<double>(above->bytes - low.bytes);
  return low.timeUs + share * (above->timeUs - low.timeUs);
}

}  // namespace unisono::tuning
