// SPDX-License-Identifier: Apache-2.0
#include "tuning/model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/fnv.h"
#include "base/math.h"
#include "device/direct_work.h"

namespace unisono::tuning {
namespace {

using topology::CpuArchitecture;
using topology::CpuVendor;
using topology::GraphFacts;
using topology::MachineFacts;
using topology::PathType;
using topology::toGigabytes;

constexpr size_t kNvlink = 0, kPci = 1, kNetwork = 2;  // of CostConstants::hopLatency
using device::kWarpThreads;
using device::kWorkerThreads;
constexpr int kFewestThreads = 2 * kWarpThreads;  // that a user may set
constexpr double kSlowRing = 12;                  // GB/s up to which half the threads do
constexpr int kMaxCollnetRanksPerNode = 8, kMaxNvlsRanksPerNode = 32;

template <typename Enum>
constexpr size_t at(Enum value) {
  return static_cast<size_t>(value);
}

size_t generationOf(int sm) {
  return sm >= 100 ? 3 : sm >= 90 ? 2 : sm >= 80 ? 1 : 0;
}

// The part of its bandwidth that NVLS reaches.
double nvlsEfficiency(int sm) {
  constexpr double kEfficiency[] = {0, 0, 0.85, 0.74};
  return kEfficiency[generationOf(sm)];
}

int log2Floor(uint64_t value) {
  return value == 0 ? -1 : std::bit_width(value) - 1;
}

const GraphFacts& graphOf(const CommFacts& facts, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::tree:
    case Algorithm::directTree:
    case Algorithm::pat:
      return facts.tree;
    case Algorithm::collNetDirect:
      return facts.collnetDirect;
    case Algorithm::collNetChain:
      return facts.collnetChain;
    case Algorithm::nvls:
    case Algorithm::nvlsTree:
      return facts.nvls;
    default:
      return facts.ring;
  }
}

// The costs by NCCL's formulas, for one communicator.
class Formulas {
 public:
  Formulas(const ModelInput& input)
      : facts_(input.facts),
        constants_(input.constants),
        settings_(input.settings),
        generation_(generationOf(input.facts.machine.lowestSm)),
        scale_(static_cast<size_t>(std::clamp(input.facts.nodes, 1, 3)) - 1),
        ranksPerNode_(static_cast<double>(input.facts.ranks) / input.facts.nodes) {
    if (facts_.machine.cpuArchitecture == static_cast<int>(CpuArchitecture::power)) {
      constants_.hopLatency[kPci][at(Algorithm::tree)][at(Protocol::simple)] =
          constants_.hopLatency[kPci][at(Algorithm::ring)][at(Protocol::simple)];
    }
  }

  void estimate(Operation operation, Algorithm algorithm, Protocol protocol,
                Estimate& result) const {
    result.bandwidth = algorithmBandwidth(operation, algorithm, protocol);
    result.latencyUs = latency(operation, algorithm, protocol);
  }

 private:
  // Steps that the data of one rank make around a ring.
  int steps(Operation operation) const {
    switch (operation) {
      case Operation::allReduce:
        return 2 * (facts_.ranks - 1);
      case Operation::allGather:
      case Operation::reduceScatter:
        return facts_.ranks - 1;
      default:
        return facts_.ranks;
    }
  }

  double channelSpeed(Operation operation, Algorithm algorithm, const GraphFacts& graph) const {
    const double intra = toGigabytes(graph.speedIntra), inter = toGigabytes(graph.speedInter);
    const bool collnet =
        algorithm == Algorithm::collNetDirect || algorithm == Algorithm::collNetChain;
    if (algorithm != Algorithm::nvls && algorithm != Algorithm::nvlsTree) {
      return facts_.nodes <= 2 || collnet ? intra : inter;
    }
    if (graph.channels < 2) return 0;
    double inside =
        intra * nvlsEfficiency(facts_.machine.lowestSm) * (graph.channels - 1) / graph.channels;
    // An all-reduce moves data up and down at once.
    inside *= operation == Operation::allReduce ? 2 : (ranksPerNode_ - 1) / ranksPerNode_;
    const bool tree = algorithm == Algorithm::nvlsTree;
    const double outside = inter * (facts_.nodes <= 2 && tree ? 2 : 1);
    const double cap = tree ? constants_.nvlsTreePerChannel[generation_][scale_]
                            : std::numeric_limits<double>::max();
    return std::min({inside, outside, cap});
  }

  // What passes each link, in GB/s.
  double busBandwidth(Operation operation, Algorithm algorithm, Protocol protocol) const {
    const GraphFacts& graph = graphOf(facts_, algorithm);
    const bool limited = algorithm == Algorithm::ring || algorithm == Algorithm::tree;
    const double channels = limited ? std::min(graph.channels, facts_.channels) : graph.channels;
    const double speed = channelSpeed(operation, algorithm, graph);
    double bus = channels * speed;
    const bool allReduce = operation == Operation::allReduce;
    switch (algorithm) {
      case Algorithm::ring:
        if (protocol == Protocol::ll) return std::min({llMax(), bus * 0.5, proxyLines(graph)});
        if (protocol == Protocol::ll128) {
          return std::min(bus * 0.92,
                          channels * constants_.ringLl128PerChannel[generation_][scale_]);
        }
        return bus;
      case Algorithm::tree:
        if (allReduce) {
          bus = std::min(bus * 0.92, channels * constants_.treePerChannel[generation_][scale_]);
        }
        if (protocol == Protocol::ll) bus = std::min({bus / 3.8, llMax(), proxyLines(graph)});
        if (protocol == Protocol::ll128) {
          bus = std::min(bus * (facts_.nodes == 1 ? 7.0 / 9.0 : 120.0 / 128.0),
                         channels * constants_.treeLl128PerChannel[generation_][scale_]);
        }
        return facts_.plainTrees ? bus * 0.85 : bus;
      case Algorithm::pat:
        return bus * 0.75;
      case Algorithm::collNetDirect: {
        if (!allReduce) {
          return ranksPerNode_ *
                 std::min(toGigabytes(graph.speedIntra), toGigabytes(graph.speedInter) * 0.9);
        }
        // Slower where GPUs share a port.
        double share = ranksPerNode_ / channels;
        share -= (share - 1) / 2;
        return bus / share * (facts_.machine.lowestSm >= 90 ? 0.85 : 1);
      }
      default:
        return bus;
    }
  }

  // Bytes of the call by time.
  double algorithmBandwidth(Operation operation, Algorithm algorithm, Protocol protocol) const {
    if (algorithm == Algorithm::directTree) {
      // Inside nodes first, then between them. Each rank sends all shares but its own twice.
      const double links = toGigabytes(facts_.ring.speedIntra) * facts_.ring.channels;
      const double inside = links * ranksPerNode_ / (2 * (ranksPerNode_ - 1));
      const double outside = algorithmBandwidth(operation, Algorithm::tree, protocol);
      return inside > 0 && outside > 0 ? 1 / (1 / inside + 1 / outside) : 0;
    }
    const double bus = busBandwidth(operation, algorithm, protocol);
    const bool scatters =
        operation == Operation::allGather || operation == Operation::reduceScatter;
    if (algorithm != Algorithm::ring && scatters) return bus;
    if (algorithm == Algorithm::ring || algorithm == Algorithm::nvls ||
        algorithm == Algorithm::nvlsTree) {
      return bus * facts_.ranks / steps(operation);
    }
    return bus * 0.5;
  }

  double llMax() const {
    // Inside a node by GPU, between nodes by processor.
    const bool amd = facts_.machine.cpuVendor == static_cast<int>(CpuVendor::amd) ||
                     facts_.machine.cpuVendor == MachineFacts::kMixed;
    const size_t row = facts_.nodes == 1 ? generation_ : amd ? 1 : 0;
    return constants_.llMax[row][scale_];
  }

  // What the proxies of a node move over LL through sockets, in GB/s: they take the data out of
  // lines and put them into others. Measured (docs/results/2026-11-23-clusters.md, all-reduces of 4
  // and 32 KB).
  double proxyLines(const GraphFacts& graph) const {
    constexpr double kOfOneRank = 0.9;
    if (!facts_.network || !facts_.sockets) return std::numeric_limits<double>::max();
    const double ranks = facts_.nodes == 1 ? 1 : std::min<double>(ranksPerNode_, graph.channels);
    return kOfOneRank * ranks;
  }

  double networkOverhead() const {
    if (settings_.netOverheadNs >= 0) return static_cast<double>(settings_.netOverheadNs) * 0.001;
    const bool amd = facts_.machine.cpuArchitecture == static_cast<int>(CpuArchitecture::x86) &&
                     facts_.machine.cpuVendor == static_cast<int>(CpuVendor::amd);
    return amd ? 2.0 : 1.0;
  }

  double latency(Operation operation, Algorithm algorithm, Protocol protocol) const {
    const GraphFacts& graph = graphOf(facts_, algorithm);
    const size_t p = costColumn(protocol);
    const auto hop = [&](size_t hardware, Algorithm of) {
      return constants_.hopLatency[hardware][at(of)][p];
    };
    const size_t inside = graph.typeIntra == static_cast<int>(PathType::nvl) ? kNvlink : kPci;
    const Algorithm row = algorithm == Algorithm::directTree ? Algorithm::tree : algorithm;
    const double base = constants_.baseLatency[at(row)][p];
    double intra = hop(inside, row);
    // With one rank per node nothing hides the network.
    double inter = hop(kNetwork, ranksPerNode_ == 1 ? Algorithm::tree : row);
    const double network = static_cast<double>(graph.latencyInterNs) * 0.001;
    // Simple also flushes, and so does LL128 here: its slots pass by their tails.
    const bool flushes =
        protocol == Protocol::simple || (protocol == Protocol::ll128 && facts_.network);
    inter += flushes ? 2 * network : network;
    const int others = facts_.ranks / facts_.nodes - 1;
    const int levels = log2Floor(static_cast<uint64_t>(facts_.nodes));
    switch (algorithm) {
      case Algorithm::tree:
        return base + 2 * (others * intra + levels * inter);
      case Algorithm::directTree: {
        // A direct launch before the tree and one after it, of small calls inside a node
        // (docs/results/2026-11-22-direct.md).
        constexpr double kDirectUs = 2.5;
        return base + 2 * (kDirectUs + levels * inter);
      }
      case Algorithm::ring: {
        const size_t hardware = facts_.nodes == 1 ? inside : kNetwork;
        if (operation == Operation::broadcast || operation == Operation::reduce) {
          if (graph.sameChannels != 0) return base + hop(hardware, Algorithm::ring);
          const bool simple = protocol == Protocol::simple;
          return base + steps(operation) * hop(hardware, simple ? Algorithm::tree : algorithm);
        }
        double overhead = 0;
        if (facts_.nodes > 1) overhead = networkOverhead() * (protocol == Protocol::simple ? 3 : 1);
        intra = std::max(intra, overhead);
        const int crossings = facts_.nodes == 1                   ? 0
                              : operation == Operation::allReduce ? 2 * (facts_.nodes - 1)
                                                                  : facts_.nodes - 1;
        return base + (steps(operation) - crossings) * intra + crossings * inter;
      }
      case Algorithm::collNetDirect:
        return base + 2 * (std::min(1, others) * intra + others * 0.4) + inter;
      case Algorithm::collNetChain:
        return base + 2 * others * intra + inter;
      case Algorithm::nvls:
        return intra + (facts_.nodes > 1 ? inter : 0);
      case Algorithm::nvlsTree:
        return base + intra + 2 * levels * inter;
      case Algorithm::pat:
        return base + levels * (inter / 3.5) + facts_.ranks * 2.8;
      default:
        return 0;
    }
  }

  const CommFacts& facts_;
  CostConstants constants_;
  const TuningSettings& settings_;
  size_t generation_, scale_;
  double ranksPerNode_;
};

// Whether stores of 128 bytes arrive whole on all paths of the algorithm, by NCCL's rule.
bool keepsLinesWhole(const CommFacts& facts, Algorithm algorithm) {
  return graphOf(facts, algorithm).typeIntra <= static_cast<int>(PathType::nvb) &&
         facts.machine.lowestSm >= 70 &&
         (facts.machine.lowestSm == facts.machine.highestSm || facts.machine.lowestSm >= 90);
}

// The same between nodes, where NCCL relies on adapters to write lines as one. Here a line is read
// when all of its slot is there (device/protocol/lines.h); host memory makes that slow.
bool reachesPorts(const CommFacts& facts, const TuningSettings& settings, Algorithm algorithm) {
  const bool throughPeers = facts.machine.lowestSm >= 90 && settings.ll128C2c != 0;
  const PathType farthest = throughPeers ? PathType::pxn : PathType::pxb;
  const bool isNear = graphOf(facts, algorithm).typeInter <= static_cast<int>(farthest);
  return isNear && !(facts.network && facts.sockets);
}

// Why heads cannot carry an all-gather or reduce-scatter between nodes: every rank has to be one,
// and a slot holds whole vectors of all nodes.
Exclusion sharesExclusion(const CommFacts& facts, Operation operation, int heads) {
  constexpr uint64_t kVectorBytes = 16;
  const bool gathers = operation == Operation::allGather;
  if (!(gathers ? facts.collnetAllGather : facts.collnetReduceScatter)) {
    return Exclusion::networkOperation;
  }
  if (facts.maxRanksPerNode > heads) return Exclusion::tooManyRanks;
  const bool fits = kVectorBytes * static_cast<uint64_t>(facts.nodes) <= facts.headSlotBytes;
  return fits ? Exclusion::none : Exclusion::tooLarge;
}

// Why a communicator cannot run an algorithm, whatever the call.
Exclusion machineExclusion(const ModelInput& input, Operation operation, Algorithm algorithm) {
  const CommFacts& facts = input.facts;
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  const bool copies = device::isCopy(operation);
  if (input.settings.deterministic != 0 && algorithm != Algorithm::ring && !copies) {
    return Exclusion::order;
  }
  Exclusion shares = Exclusion::none;
  switch (algorithm) {
    case Algorithm::ring:
      return Exclusion::none;
    case Algorithm::collNetDirect:
    case Algorithm::collNetChain:
      if (!facts.collnet) return Exclusion::noCollnet;
      if (algorithm == Algorithm::collNetDirect && facts.machine.switches == 0) {
        return Exclusion::noSwitch;
      }
      if (facts.maxRanksPerNode > kMaxCollnetRanksPerNode) return Exclusion::tooManyRanks;
      if (scatters) shares = sharesExclusion(facts, operation, facts.collnetHeads);
      break;
    case Algorithm::nvls:
    case Algorithm::nvlsTree:
      if (algorithm == Algorithm::nvlsTree && facts.nodes == 1) return Exclusion::oneNode;
      if (!facts.multicast) return Exclusion::noMulticast;
      if (algorithm == Algorithm::nvls && facts.nodes > 1 && !facts.collnet) {
        return Exclusion::noCollnet;
      }
      if (facts.nvls.channels < 2) return Exclusion::noChannels;
      if (scatters && facts.maxRanksPerNode > kMaxNvlsRanksPerNode) {
        return Exclusion::tooManyRanks;
      }
      if (scatters && facts.nodes > 1) {
        shares = sharesExclusion(facts, operation, std::min(facts.collnetHeads, facts.nvlsHeads));
      }
      break;
    case Algorithm::pat:
      if (input.settings.patEnable == 0 || facts.machine.lowestSm < 60) {
        return Exclusion::patDisabled;
      }
      if (input.settings.patEnable != 1 && facts.nodes != facts.ranks) {
        return Exclusion::ranksPerNode;
      }
      break;
    case Algorithm::direct:
    case Algorithm::twoShot:
      if (facts.nodes > 1) return Exclusion::severalNodes;
      if (facts.ranks > device::kDirectMaxRanks) return Exclusion::tooManyRanks;
      return facts.reachAll ? Exclusion::none : Exclusion::unreachable;
    case Algorithm::directTree:
      if (facts.nodes == 1) return Exclusion::oneNode;
      if (facts.maxRanksPerNode < 2 || facts.maxRanksPerNode * facts.nodes != facts.ranks) {
        return Exclusion::unequalNodes;
      }
      if (facts.maxRanksPerNode > device::kDirectMaxRanks) return Exclusion::tooManyRanks;
      if (!facts.reachNode || facts.wide.blocks == 0) return Exclusion::unreachable;
      // Its launches inside nodes use LL128 with every protocol.
      if (!keepsLinesWhole(facts, Algorithm::direct)) return Exclusion::splitLines;
      break;
    case Algorithm::tree:
      break;
  }
  return graphOf(facts, algorithm).channels < 1 ? Exclusion::noChannels : shares;
}

// Messages follow what holds for an all-reduce.
Exclusion messageExclusion(const ModelInput& input, Protocol protocol) {
  const CommFacts& facts = input.facts;
  if (facts.maxRanksPerNode < 2) return Exclusion::oneRank;
  if (facts.maxRanksPerNode > device::kDirectMaxRanks) return Exclusion::tooManyRanks;
  if (!facts.reachNode) return Exclusion::unreachable;
  const bool mayBeSplit = protocol == Protocol::ll128 &&
                          !input.allowed.forces(Operation::allReduce, protocol) &&
                          !keepsLinesWhole(facts, Algorithm::direct);
  return mayBeSplit ? Exclusion::splitLines : Exclusion::none;
}

bool isAllPairs(Algorithm algorithm) {
  return algorithm == Algorithm::direct || algorithm == Algorithm::twoShot;
}

// The points were measured on H200: what the channels are slower than those of NVLink there is
// added.
void adaptToLinks(const CommFacts& facts, Operation operation, Algorithm algorithm,
                  Protocol protocol, std::vector<MeasuredPoint>& points) {
  constexpr double kMeasuredBus = 360;  // GB/s
  // Of a byte of data: lines of LL are twice as long, those of LL128 a fifteenth longer.
  constexpr double kBytesOnLink[device::kProtocols] = {2, 16.0 / 15, 1};
  if (facts.ring.speedIntra <= 0 || facts.ring.channels == 0) return;
  const bool nvlink = facts.ring.typeIntra <= static_cast<int>(PathType::nvl);
  // The direct algorithms do not follow the channels.
  const int channels =
      isAllPairs(algorithm) ? facts.ring.channels : std::min(facts.ring.channels, facts.channels);
  const double bus = toGigabytes(facts.ring.speedIntra) * channels;
  const double slower = 1 / bus - (nvlink ? 1 / kMeasuredBus : 0);
  if (slower <= 0) return;
  const double bytesOnLink =
      kBytesOnLink[at(protocol)] * linkTraffic(operation, algorithm, facts.ranks);
  for (MeasuredPoint& point : points) {
    point.timeUs +=
        (nvlink ? 0.0 : 1.0) + bytesOnLink * static_cast<double>(point.bytes) / 1000 * slower;
  }
}

// Whether rings and trees take as long as inside a node of H200, but for slower links.
bool hasMeasuredFifos(const CommFacts& facts) {
  return facts.nodes == 1 && !facts.network && !facts.slotsOfHost && facts.machine.switches > 0 &&
         facts.ring.typeIntra <= static_cast<int>(PathType::nvl);
}

// What the user has measured here, or what was measured for this library.
std::vector<MeasuredPoint> measuredPoints(const ModelInput& input, Operation operation,
                                          Algorithm algorithm, Protocol protocol) {
  const CommFacts& facts = input.facts;
  const auto pointsOf = [&](const MeasuredTable& table) {
    return pointsFor(table, operation, algorithm, protocol, facts.nodes, facts.ranks);
  };
  std::vector<MeasuredPoint> points = pointsOf(input.measured);
  if (points.empty() && !input.registry->formulasOnly && hasMeasuredFifos(facts)) {
    points = fifoPoints(operation, algorithm, protocol, facts.ranks);
  } else if (points != pointsOf(builtinMeasurements())) {
    return points;
  }
  adaptToLinks(facts, operation, algorithm, protocol, points);
  limitToLargerSizes(points);
  return points;
}

Estimate estimateOf(const ModelInput& input, const Formulas& formulas, Operation operation,
                    Algorithm algorithm, Protocol protocol) {
  const CommFacts& facts = input.facts;
  Estimate estimate;
  const bool forced = input.allowed.forces(operation, protocol);
  estimate.allowed =
      input.allowed.allows(operation, algorithm) && input.allowed.allows(operation, protocol);
  estimate.exclusion = definitionOf(operation, algorithm, protocol);
  if (estimate.exclusion != Exclusion::none) return estimate;
  if (facts.ranks == 1) {
    const bool local = algorithm == Algorithm::ring && protocol == Protocol::simple;
    estimate.exclusion = local ? Exclusion::none : Exclusion::oneRank;
    estimate.preferred = local;
    return estimate;
  }
  estimate.exclusion = machineExclusion(input, operation, algorithm);
  if (estimate.exclusion == Exclusion::none && protocol == Protocol::ll128) {
    // PCIe splits stores of 128 bytes as it likes.
    if (facts.slotsOfHost || (!forced && !keepsLinesWhole(facts, algorithm))) {
      estimate.exclusion = Exclusion::splitLines;
    } else if (!forced && !reachesPorts(facts, input.settings, algorithm)) {
      estimate.exclusion = Exclusion::farPorts;
    }
  }
  const bool has = input.registry->has(operation, algorithm, protocol);
  if (estimate.exclusion == Exclusion::none && !has &&
      !input.registry->hasForced(operation, algorithm, protocol)) {
    estimate.exclusion = Exclusion::notImplemented;
  }
  estimate.measured = measuredPoints(input, operation, algorithm, protocol);
  // What runs only where it is forced was never measured, unless the user has done so.
  estimate.preferred = has || !estimate.measured.empty();
  if (!isAllPairs(algorithm)) {
    formulas.estimate(operation, algorithm, protocol, estimate);
    if (estimate.exclusion == Exclusion::none && !(estimate.bandwidth > 0) &&
        estimate.measured.empty()) {
      estimate.exclusion = Exclusion::noChannels;
    }
  } else if (estimate.measured.empty() && estimate.exclusion == Exclusion::none) {
    estimate.exclusion = Exclusion::notMeasured;
  }
  return estimate;
}

// Blocks of half the threads begin and take turns sooner. With them broadcasts and all-gathers over
// rings are as fast at every size and up to a quarter faster when small, reductions up to 8 MiB (2
// and 4 H100, docs/results/2026-11-27-small-blocks.md).
constexpr int kSmallRingThreads = 256;

// A number of threads that the user may have set.
int threadsOf(int64_t wanted, int lowest, int highest, int automatic) {
  if (wanted <= 0) return automatic;
  if (wanted % kWarpThreads != 0) return highest;
  return static_cast<int>(std::clamp<int64_t>(wanted, lowest, highest));
}

void setThreads(const ModelInput& input, CostModel& model) {
  const CommFacts& facts = input.facts;
  const int64_t wanted = input.settings.threads;
  const double ring = toGigabytes(facts.ring.speedIntra) * facts.ring.channels;
  const int ringThreads = facts.ranks > 1 && ring <= kSlowRing ? 256 : kWorkerThreads;
  for (int a = 0; a < device::kAlgorithms; a++) {
    const auto algorithm = static_cast<Algorithm>(a);
    int* threads = model.maxThreads[a];
    int64_t* bytes = model.bytesPerThread[a];
    threads[at(Protocol::ll)] = threadsOf(wanted, kFewestThreads, kWorkerThreads, kWorkerThreads);
    threads[at(Protocol::ll128)] =
        threadsOf(input.settings.ll128Threads, kFewestThreads, kWorkerThreads, kWorkerThreads);
    int simple = kWorkerThreads;
    if (algorithm == Algorithm::ring || algorithm == Algorithm::tree) {
      simple = threadsOf(wanted, kFewestThreads, kWorkerThreads,
                         algorithm == Algorithm::ring ? ringThreads : kWorkerThreads);
    }
    threads[at(Protocol::simple)] = simple;
    const bool collnet =
        algorithm == Algorithm::collNetDirect || algorithm == Algorithm::collNetChain;
    bytes[at(Protocol::ll)] = algorithm == Algorithm::ring ? 8 * int64_t{facts.ranks} : 8;
    bytes[at(Protocol::ll128)] = 8;
    bytes[at(Protocol::simple)] = collnet ? 512 : 64;
    for (int p = device::kNcclProtocols; p < device::kProtocols; p++) {
      threads[p] = simple;
      bytes[p] = bytes[at(Protocol::simple)];
    }
  }
  const int ofRings = model.maxThreads[at(Algorithm::ring)][at(Protocol::simple)];
  model.smallRingThreads = wanted > 0 ? ofRings : std::min(ofRings, kSmallRingThreads);
  for (int i = 0; i < TuningSettings::kThresholds; i++) {
    const int64_t value = input.settings.thresholds[static_cast<size_t>(i)];
    // Trees first, then rings, as device::Algorithm numbers them.
    if (value >= 0)
      model.bytesPerThread[i / device::kNcclProtocols][i % device::kNcclProtocols] = value;
  }
}

void listCandidates(CostModel& model) {
  for (size_t o = 0; o < kCollectives; o++) {
    const auto operation = static_cast<Operation>(o);
    for (int a = 0; a < device::kAlgorithms; a++) {
      for (int p = 0; p < device::kProtocols; p++) {
        const auto algorithm = static_cast<Algorithm>(a);
        const auto protocol = static_cast<Protocol>(p);
        const Estimate& estimate = model.of(operation, algorithm, protocol);
        if (estimate.exclusion != Exclusion::none) continue;
        model.candidates[o].push_back({algorithm, protocol, estimate.preferred,
                                       model.allowed.allows(operation, algorithm),
                                       model.allowed.allows(operation, protocol)});
      }
    }
  }
}

}  // namespace

const CostConstants& defaultConstants() {
  static const CostConstants constants = {
      // Rows: tree, ring, CollNet direct, CollNet chain, NVLS, NVLS tree, PAT; columns: LL, LL128,
      // Simple.
      .baseLatency = {{{6.8, 14, 8.4}, {6.6, 14, 8.4}, {}, {}, {}, {}, {8, 8, 8}}},
      .hopLatency = {{{{{0.6, 1.25, 4},
                        {0.6, 1.9, 3.4},
                        {0, 0, 3.7},
                        {0, 0, 2.8},
                        {0, 0, 25},
                        {0, 0, 25},
                        {0, 0, 4}}},
                      {{{1, 1.9, 4}, {1, 2.5, 5.7}, {0, 0, 3.7}, {0, 0, 2.8}, {}, {}, {0, 0, 4}}},
                      {{{5, 8.5, 14},
                        {2.7, 4, 14},
                        {0, 0, 31},
                        {0, 0, 30},
                        {0, 0, 18},
                        {0, 0, 20.9},
                        {0, 0, 14}}}}},
      .llMax = {{{39, 39, 20.4}, {87.7, 22.5, 19}, {141, 45, 35}, {282, 90, 70}}},
      .ringLl128PerChannel = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {40, 40, 40}}},
      .treeLl128PerChannel = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 29}, {55.6, 31.67, 20}}},
      .treePerChannel = {{{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 36}, {70, 42.8, 24}}},
      .nvlsTreePerChannel = {{{26.5, 18.5, 10}, {24, 23.6, 17.8}, {0, 57.7, 45.5}, {0, 96, 80}}},
  };
  return constants;
}

CommFacts factsOf(const topology::Joined& joined) {
  CommFacts facts;
  facts.ranks = joined.ranks();
  facts.nodes = joined.nodes();
  for (int node = 0; node < facts.nodes; node++) {
    facts.maxRanksPerNode = std::max(facts.maxRanksPerNode, joined.ranksOf(node));
    facts.plainTrees |= joined.treePattern(node) == topology::Pattern::tree;
  }
  facts.channels = joined.channels();
  facts.ring = joined.ring();
  facts.tree = joined.tree();
  facts.collnetDirect = joined.collnetDirect();
  facts.collnetChain = joined.collnetChain();
  facts.nvls = joined.nvls();
  facts.collnetHeads = static_cast<int>(joined.collnetHeads().size());
  facts.nvlsHeads = static_cast<int>(joined.nvlsHeads().size());
  facts.machine = joined.machine();
  // As many blocks as fill the links.
  const bool blackwell = facts.machine.lowestSm >= 100;
  facts.nvlsChannels = !blackwell ? 16 : facts.nodes > 1 ? 32 : 24;
  return facts;
}

void setLimits(bool reachNode, CommFacts& facts, int mostBlocks) {
  facts.reachNode = reachNode && facts.maxRanksPerNode <= device::kDirectMaxRanks;
  facts.reachAll = facts.reachNode && facts.nodes == 1;
  if (!facts.reachNode) return;
  facts.direct = directLimits(directLineBits(facts.maxRanksPerNode));
  facts.direct.blocks = std::min(facts.direct.blocks, mostBlocks);
  facts.wide = wideGeometry(facts.maxRanksPerNode, std::min(mostBlocks, device::kWideMaxBlocks));
}

CostModel makeModel(const ModelInput& input) {
  CostModel model;
  model.facts = input.facts;
  model.constants = input.constants;
  model.allowed = input.allowed;
  model.formulasOnly = input.registry->formulasOnly;
  const Formulas formulas(input);
  for (size_t o = 0; o < kCollectives; o++) {
    for (size_t a = 0; a < device::kAlgorithms; a++) {
      for (size_t p = 0; p < device::kProtocols; p++) {
        model.estimates[o][a][p] = estimateOf(input, formulas, static_cast<Operation>(o),
                                              static_cast<Algorithm>(a), static_cast<Protocol>(p));
      }
    }
  }
  for (size_t p = 0; p < device::kProtocols; p++) {
    model.messages[p] = messageExclusion(input, static_cast<Protocol>(p));
  }
  setThreads(input, model);
  listCandidates(model);
  return model;
}

bool CostModel::mayUse(Protocol protocol) const {
  for (size_t o = 0; o < kCollectives; o++) {
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree}) {
      if (of(static_cast<Operation>(o), algorithm, protocol).exclusion == Exclusion::none) {
        return true;
      }
    }
  }
  return false;
}

std::vector<std::string> warningsOf(const ModelInput& input, const CostModel& model) {
  std::vector<std::string> warnings;
  if (input.facts.ranks == 1) return warnings;
  std::vector<std::string_view> without, split;
  for (size_t o = 0; o < kCollectives; o++) {
    const auto operation = static_cast<Operation>(o);
    const auto any = [&](auto fits) {
      return std::any_of(model.candidates[o].begin(), model.candidates[o].end(),
                         [&](const CostModel::Candidate& candidate) {
                           return candidate.allowed() && fits(candidate);
                         });
    };
    if (!any([](const auto&) { return true; })) without.push_back(nameOf(operation));
    if (!input.allowed.forces(operation, Protocol::ll128)) continue;
    if (any([&](const auto& candidate) {
          return candidate.protocol == Protocol::ll128 &&
                 !keepsLinesWhole(input.facts, candidate.algorithm);
        })) {
      split.push_back(nameOf(operation));
    }
  }
  if (!without.empty()) {
    warnings.push_back(
        fmt::format("NCCL_ALGO and NCCL_PROTO leave nothing that can carry {} here; what they do "
                    "not allow is used. `unisono explain` shows the reasons",
                    fmt::join(without, ", ")));
  }
  if (!split.empty()) {
    warnings.push_back(
        fmt::format("NCCL_PROTO forces LL128 for {}, but stores of 128 bytes may be split on the "
                    "paths of this communicator: results may be wrong",
                    fmt::join(split, ", ")));
  }
  return warnings;
}

uint64_t hashOf(const CostModel& model) {
  Fnv hash;
  const auto add = [&](double value) { hash.add(std::bit_cast<uint64_t>(value)); };
  for (const auto& byAlgorithm : model.estimates) {
    for (const auto& byProtocol : byAlgorithm) {
      for (const Estimate& estimate : byProtocol) {
        hash.add(static_cast<uint64_t>(estimate.exclusion));
        hash.add(estimate.allowed ? 1 : 0);
        hash.add(estimate.preferred ? 1 : 0);
        add(estimate.latencyUs);
        add(estimate.bandwidth);
        for (const MeasuredPoint& point : estimate.measured) {
          hash.add(point.bytes);
          add(point.timeUs);
        }
      }
    }
  }
  for (int a = 0; a < device::kAlgorithms; a++) {
    for (int p = 0; p < device::kProtocols; p++) {
      hash.add(static_cast<uint64_t>(model.maxThreads[a][p]));
      hash.add(static_cast<uint64_t>(model.bytesPerThread[a][p]));
    }
  }
  hash.add(static_cast<uint64_t>(model.smallRingThreads));
  for (const Exclusion exclusion : model.messages) hash.add(static_cast<uint64_t>(exclusion));
  for (const uint64_t bytes : model.facts.direct.shareBytes) hash.add(bytes);
  hash.add(model.facts.direct.messageBytes);
  for (const uint64_t bytes : model.facts.direct.fasterMessageBytes) hash.add(bytes);
  hash.add(static_cast<uint64_t>(model.facts.direct.blocks));
  hash.add(static_cast<uint64_t>(model.facts.wide.blocks));
  hash.add(model.facts.wide.slotLines);
  hash.add(model.facts.wide.offerBytes);
  for (const uint64_t bytes : model.facts.chunkBytes) hash.add(bytes);
  return hash.value();
}

}  // namespace unisono::tuning
