// SPDX-License-Identifier: Apache-2.0
#include "tuning/measured.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <iterator>

#include "base/error.h"
#include "base/fnv.h"

namespace unisono::tuning {
namespace {

constexpr int64_t kMaxNumber = int64_t{1} << 50;
constexpr double kMaxTimeUs = 1e12;

bool sameKind(const MeasuredCurve& a, const MeasuredCurve& b) {
  return a.operation == b.operation && a.algorithm == b.algorithm && a.protocol == b.protocol;
}
bool sameKind(const MessageCurve& a, const MessageCurve& b) {
  return a.operation == b.operation && a.path == b.path;
}

// Adds the only point of `line` to the curve of the same kind, nodes and ranks. Returns false if
// that has the size.
template <typename Curve>
bool addLine(const Curve& line, std::vector<Curve>& table) {
  const auto curve = std::find_if(table.begin(), table.end(), [&](const Curve& other) {
    return sameKind(line, other) && line.nodes == other.nodes && line.ranks == other.ranks;
  });
  if (curve == table.end()) {
    table.push_back(line);
    return true;
  }
  const MeasuredPoint& point = line.points.front();
  const auto at = std::lower_bound(
      curve->points.begin(), curve->points.end(), point,
      [](const MeasuredPoint& a, const MeasuredPoint& b) { return a.bytes < b.bytes; });
  if (at != curve->points.end() && at->bytes == point.bytes) return false;
  curve->points.insert(at, point);
  return true;
}

void addKind(const MeasuredCurve& curve, Fnv& hash) {
  hash.add(static_cast<uint64_t>(curve.operation));
  hash.add(static_cast<uint64_t>(curve.algorithm));
  hash.add(static_cast<uint64_t>(curve.protocol));
}
void addKind(const MessageCurve& curve, Fnv& hash) {
  hash.add(static_cast<uint64_t>(curve.operation));
  hash.add(static_cast<uint64_t>(curve.path));
}

template <typename Curve>
void addCurves(const std::vector<Curve>& table, Fnv& hash) {
  hash.add(table.size());
  for (const Curve& curve : table) {
    addKind(curve, hash);
    hash.add(static_cast<uint64_t>(curve.nodes));
    hash.add(static_cast<uint64_t>(curve.ranks));
    hash.add(curve.points.size());
    for (const MeasuredPoint& point : curve.points) {
      hash.add(point.bytes);
      hash.add(std::bit_cast<uint64_t>(point.timeUs));
    }
  }
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

  // Adds what the line says to `measurements`.
  void addTo(Measurements& measurements) const {
    const bool isMessage = findMessageOperation(words_[0]) >= 0;
    const bool isNew = isMessage ? addLine(messageCurve(), measurements.messages)
                                 : addLine(collectiveCurve(), measurements.collectives);
    if (!isNew) throw invalidUsage("{}:{} repeats a size of an earlier line", source_, number_);
  }

 private:
  MeasuredCurve collectiveCurve() const {
    const std::string operations = operationNames() + ", " + messageOperationNames();
    return {
        static_cast<Operation>(element(words_[0], "an operation", findOperation, operations)),
        static_cast<Algorithm>(element(words_[1], "an algorithm", findAlgorithm, algorithmNames())),
        static_cast<Protocol>(element(words_[2], "a protocol", findProtocol, protocolNames())),
        nodes(),
        ranks(),
        {point()}};
  }

  MessageCurve messageCurve() const {
    const std::string path = fmt::format("{} {}", words_[1], words_[2]);
    return {static_cast<MessageOperation>(findMessageOperation(words_[0])),
            static_cast<MessagePath>(
                element(path, "a path of messages", findMessagePath, messagePathNames())),
            nodes(),
            ranks(),
            {point()}};
  }

  int nodes() const { return static_cast<int>(number(3, 1, 1 << 20)); }
  int ranks() const { return static_cast<int>(number(4, 2, 1 << 20)); }
  MeasuredPoint point() const { return {static_cast<uint64_t>(number(5, 0, kMaxNumber)), time(6)}; }

  int element(std::string_view name, std::string_view kind, int (*find)(std::string_view),
              const std::string& names) const {
    const int index = find(name);
    if (index < 0) {
      throw invalidUsage("{}:{}: \"{}\" is not {}", source_, number_, name, kind)
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

// Hops between ranks from the first to the last step of a call over FIFOs.
int hopsOf(Operation operation, Algorithm algorithm, int ranks) {
  const bool returns = operation == Operation::allReduce || algorithm == Algorithm::tree;
  return (returns ? 2 : 1) * (ranks - 1);
}

// What `ranks` ranks take longer than those of `curve` for the same traffic.
double addedUs(const MeasuredCurve& curve, int ranks) {
  // Of a hop: all-reduce less all-gather of 8 KB on 2 H200 (docs/results/2026-11-23-steps.md).
  constexpr double kHopUs[device::kProtocols] = {1.4, 1.7, 4.3};
  constexpr double kRankUs = 0.17;  // direct all-reduce of 1 KB, from 2 to 4 H200
  if (curve.algorithm != Algorithm::ring && curve.algorithm != Algorithm::tree) {
    return std::max(kRankUs * (ranks - curve.ranks), 0.0);
  }
  const int hops = hopsOf(curve.operation, curve.algorithm, ranks) -
                   hopsOf(curve.operation, curve.algorithm, curve.ranks);
  return kHopUs[static_cast<size_t>(curve.protocol)] * hops;
}

// The points of `curve` for another number of ranks.
std::vector<MeasuredPoint> scale(const MeasuredCurve& curve, int ranks) {
  const double factor = linkTraffic(curve.operation, curve.algorithm, curve.ranks) /
                        linkTraffic(curve.operation, curve.algorithm, ranks);
  const double more = addedUs(curve, ranks);
  std::vector<MeasuredPoint> points = curve.points;
  for (MeasuredPoint& point : points) {
    point.bytes = static_cast<uint64_t>(static_cast<double>(point.bytes) * factor);
    point.timeUs += more;
  }
  return points;
}

// From the curves of other numbers of ranks, if there are any.
std::vector<MeasuredPoint> pointsOfOthers(std::vector<const MeasuredCurve*> curves, int ranks) {
  if (curves.empty()) return {};
  std::ranges::sort(curves, {}, &MeasuredCurve::ranks);
  const auto upper = std::ranges::upper_bound(curves, ranks, {}, &MeasuredCurve::ranks);
  if (upper == curves.begin()) return scale(**upper, ranks);
  if (upper == curves.end()) return scale(*curves.back(), ranks);
  return interpolate(**std::prev(upper), **upper, ranks);
}

}  // namespace

double linkTraffic(Operation operation, Algorithm algorithm, int ranks) {
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  const bool reducesAll = operation == Operation::allReduce;
  const double others = ranks - 1.0;
  switch (algorithm) {
    case Algorithm::ring:
      return scatters ? others / ranks : reducesAll ? 2 * others / ranks : 1;
    case Algorithm::tree:  // each channel begins its chain at another rank
    case Algorithm::twoShot:
      return 2 * others / ranks;
    default:
      return scatters ? others / ranks : others;
  }
}

const MeasuredTable& builtinMeasurements() {
  // CUDA graphs, float sum, one process per GPU, 2 and 4 H200:
  // docs/results/2026-11-28-wide-kernels.md. From 256 MB on bfloat16, and by the library's own
  // choice: 2 H200 in 2026-11-23-steps.md, 4 H100 in 2026-11-27-h100x4.md.
  struct Times {
    Operation operation;
    Algorithm algorithm;
    int ranks;
    std::vector<double> us;  // of 1, 4, 16, 64, 256 KiB and 1 MiB; over LL128 of 64 KiB to 1 GiB
  };
  constexpr Algorithm kDirect = Algorithm::direct, kTwoShot = Algorithm::twoShot;
  static const Times kLowLatency[] = {
      {Operation::allReduce, kDirect, 2, {1.97, 2.15, 2.31, 2.59, 3.75}},
      {Operation::allReduce, kDirect, 4, {2.28, 2.49, 2.76, 3.76, 7.27}},
      {Operation::allGather, kDirect, 2, {1.94, 2.02, 2.13, 2.38, 2.95}},
      {Operation::reduceScatter, kDirect, 2, {1.95, 2.04, 2.18, 2.40, 2.97}},
      {Operation::broadcast, kDirect, 2, {1.57, 1.69, 1.76, 1.84, 2.52}},
      {Operation::reduce, kDirect, 2, {1.53, 1.65, 1.73, 1.89, 2.53}},
      {Operation::allGather, kDirect, 4, {2.41, 2.48, 2.72, 3.03, 4.03, 7.53}},
      {Operation::reduceScatter, kDirect, 4, {2.23, 2.31, 2.53, 2.83, 3.81, 7.39}},
      {Operation::broadcast, kDirect, 4, {1.90, 1.98, 2.04, 2.30, 5.54}},
      {Operation::reduce, kDirect, 4, {1.68, 1.77, 1.81, 2.22, 4.49}},
  };
  static const Times kLowLatency128[] = {
      {Operation::allReduce, kDirect, 2, {3.07, 3.65, 6.42, 16.45, 55.41, 212.0}},
      {Operation::allReduce, kTwoShot, 2, {3.98, 4.34, 6.03, 15.29, 54.87, 211.6, 809.3, 3186}},
      {Operation::allGather, kDirect, 2, {2.92, 3.25, 4.44, 9.14, 29.82, 103.0, 378.9, 1479}},
      {Operation::reduceScatter, kDirect, 2, {2.97, 3.26, 4.52, 9.80, 30.08, 113.2, 418.9, 1617}},
      {Operation::broadcast, kDirect, 2, {2.42, 2.49, 4.73, 15.05, 52.73, 190.3, 734.9, 2906}},
      {Operation::reduce, kDirect, 2, {2.56, 2.61, 4.65, 13.78, 50.68, 192.6, 738.4, 2901}},
      {Operation::allReduce, kDirect, 4, {4.36, 5.74, 14.58, 46.34, 166.4, 628.6}},
      {Operation::allReduce, kTwoShot, 4, {4.61, 5.32, 8.19, 22.27, 83.07, 317.8, 1343, 5082}},
      {Operation::allGather, kDirect, 4, {3.02, 3.51, 5.48, 13.56, 44.95, 155.4, 581.9, 2278}},
      {Operation::reduceScatter, kDirect, 4, {3.46, 3.96, 5.79, 14.07, 44.48, 166.6, 634, 2441}},
      {Operation::broadcast, kDirect, 4, {2.61, 3.86, 11.56, 40.22, 146.0, 560.5, 2208, 8842}},
      {Operation::reduce, kDirect, 4, {3.07, 3.11, 9.13, 35.98, 150.2, 549.2, 2178, 8598}},
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

std::vector<MeasuredPoint> fifoPoints(Operation operation, Algorithm algorithm, Protocol protocol,
                                      int ranks) {
  struct Times {
    Operation operation;
    Algorithm algorithm;
    Protocol protocol;
    int ranks;
    double us[8];  // by kBytes; 0: not measured
  };
  static constexpr uint64_t kBytes[] = {8 << 10, 64 << 10, 512 << 10, 1 << 20,
                                        4 << 20, 32 << 20, 256 << 20, 1 << 30};
  constexpr Algorithm kRing = Algorithm::ring, kTree = Algorithm::tree;
  constexpr Protocol kLl = Protocol::ll, kLl128 = Protocol::ll128, kSimple = Protocol::simple;
  // As above, on 2 GPUs (docs/results/2026-11-23-steps.md) and on 4. Simple up to 4 MB, and
  // broadcast over Simple from there on: docs/results/2026-11-27-small-blocks.md, 2 and 4 H100.
  // clang-format off
  static constexpr Times kTimes[] = {
      {Operation::allReduce, kRing, kLl, 2, {6.24, 6.621, 8.952, 12.89, 34.42, 226.1, 1643, 6507}},
      {Operation::allReduce, kRing, kLl128, 2, {6.99, 7.381, 7.688, 9.044, 20.64, 130.5, 847, 3216}},
      {Operation::allReduce, kRing, kSimple, 2, {12.13, 14.58, 17.12, 18.01, 32.07, 112.8, 788.6, 3030}},
      {Operation::allReduce, kTree, kLl, 2, {7.415, 8.236, 13.05, 17.02, 43.3, 261.5, 1997, 7947}},
      {Operation::allReduce, kTree, kLl128, 2, {7.029, 7.452, 9.747, 11.98, 24.12, 143.5, 1171, 4704}},
      {Operation::allReduce, kTree, kSimple, 2, {15.04, 18.11, 18.97, 20.2, 30.39, 119.9, 794.8, 3068}},
      {Operation::allGather, kRing, kLl, 2, {4.827, 5.186, 6.931, 9.258, 22.44, 128.7, 920, 3637}},
      {Operation::allGather, kRing, kLl128, 2, {5.265, 5.575, 5.92, 6.99, 14.43, 82.02, 541, 2086}},
      {Operation::allGather, kRing, kSimple, 2, {7.829, 10.86, 11.92, 12.22, 19.7, 66.12, 423.5, 1624}},
      {Operation::reduceScatter, kRing, kLl, 2, {4.919, 5.285, 7.04, 9.562, 23.22, 143.9, 1037, 4104}},
      {Operation::reduceScatter, kRing, kLl128, 2, {5.464, 5.788, 5.984, 7.008, 14.89, 85.94, 513.7, 1939}},
      {Operation::reduceScatter, kRing, kSimple, 2, {8.416, 10.6, 11.65, 12.71, 20.9, 79.57, 530.8, 1941}},
      {Operation::broadcast, kRing, kLl, 2, {3.645, 3.923, 5.902, 9.02, 27.23, 189, 1475, 5870}},
      {Operation::broadcast, kRing, kLl128, 2, {3.822, 4.096, 4.979, 6.849, 16.42, 102.7, 784.4, 3127}},
      {Operation::broadcast, kRing, kSimple, 2, {5.11, 7.239, 7.711, 9.932, 19.53, 102.1, 738.4, 2905}},
      {Operation::reduce, kRing, kLl, 2, {3.838, 4.138, 5.852, 8.956, 27, 187.3, 1495, 5992}},
      {Operation::reduce, kRing, kLl128, 2, {3.839, 4.13, 4.728, 6.69, 15.82, 100.1, 775.1, 3095}},
      {Operation::reduce, kRing, kSimple, 2, {5.333, 7.019, 8.174, 9.083, 18.51, 98.65, 728.1, 2884}},
      {Operation::allReduce, kRing, kLl, 4, {12.6, 12.69, 15.16, 18.73, 43.65, 311.1}},
      {Operation::allReduce, kRing, kLl128, 4, {14.58, 14.76, 15.09, 16.17, 32.39, 182.3, 1337, 5218}},
      {Operation::allReduce, kRing, kSimple, 4, {32, 36.26, 37.5, 38.02, 50.6, 166, 1127, 4411}},
      {Operation::allReduce, kTree, kLl, 4, {14.14, 14.5, 22.45, 27.89, 63.75, 450.5}},
      {Operation::allReduce, kTree, kLl128, 4, {12.01, 12.34, 16.7, 19.08, 34.42, 236.4}},
      {Operation::allReduce, kTree, kSimple, 4, {35.69, 42.67, 48.36, 50.87, 70.91, 211.5, 1314, 5000}},
      {Operation::allGather, kRing, kLl, 4, {7.617, 8.623, 9.704, 11.77, 25.85, 171.5}},
      {Operation::allGather, kRing, kLl128, 4, {8.476, 8.494, 8.65, 9.113, 16.49, 91.19, 648.8, 2440}},
      {Operation::allGather, kRing, kSimple, 4, {18.52, 20.17, 22.4, 22.97, 29.26, 93.06, 590.2, 2263}},
      {Operation::reduceScatter, kRing, kLl, 4, {8.109, 9.111, 10.16, 12.23, 27.07, 184.3}},
      {Operation::reduceScatter, kRing, kLl128, 4, {9.934, 10.06, 10.25, 10.59, 19.32, 102.8, 718.1, 2731}},
      {Operation::reduceScatter, kRing, kSimple, 4, {18.08, 20.72, 21.5, 21.71, 29.58, 95.02, 645.9, 2403}},
      {Operation::broadcast, kRing, kLl, 4, {4.272, 5.084, 6.884, 9.654, 29.28, 193.4}},
      {Operation::broadcast, kRing, kLl128, 4, {3.97, 3.998, 4.786, 6.49, 16.27, 104.6, 790.4, 3124}},
      {Operation::broadcast, kRing, kSimple, 4, {8.178, 9.03, 10.5, 11.78, 23.84, 107.4, 753.1, 2952}},
      {Operation::reduce, kRing, kLl, 4, {4.311, 5.052, 7.218, 10.04, 30.1, 194.8}},
      {Operation::reduce, kRing, kLl128, 4, {4.39, 4.435, 5.216, 7.271, 16.76, 107.3, 809.2, 3200}},
      {Operation::reduce, kRing, kSimple, 4, {8.155, 9.302, 10.7, 11.78, 23.29, 105.4, 745.5, 2925}},
  };
  // clang-format on
  MeasuredTable curves;
  for (const Times& times : kTimes) {
    if (times.operation != operation || times.algorithm != algorithm ||
        times.protocol != protocol) {
      continue;
    }
    MeasuredCurve& curve =
        curves.emplace_back(MeasuredCurve{operation, algorithm, protocol, 1, times.ranks, {}});
    for (size_t i = 0; i < std::size(kBytes) && times.us[i] > 0; i++) {
      curve.points.push_back({kBytes[i], times.us[i]});
    }
    if (times.ranks == ranks) return curve.points;
  }
  std::vector<const MeasuredCurve*> pointers;
  for (const MeasuredCurve& curve : curves) pointers.push_back(&curve);
  return pointsOfOthers(pointers, ranks);
}

Measurements parseMeasurements(std::string_view text, std::string_view source) {
  Measurements measurements;
  for (size_t number = 1; !text.empty(); number++) {
    const size_t length = std::min(text.find('\n'), text.size());
    std::vector<std::string_view> words = wordsOf(text.substr(0, length));
    text.remove_prefix(std::min(length + 1, text.size()));
    if (!words.empty()) LineParser(source, number, std::move(words)).addTo(measurements);
  }
  return measurements;
}

uint64_t hashOf(const Measurements& measurements) {
  Fnv hash;
  addCurves(measurements.collectives, hash);
  addCurves(measurements.messages, hash);
  return hash.value();
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
  return direct && nodes == 1 ? pointsOfOthers(curves, ranks) : std::vector<MeasuredPoint>{};
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
