// SPDX-License-Identifier: Apache-2.0
#include "tuning/model.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/fnv.h"
#include "base/math.h"
#include "device/direct_work.h"
#include "tuning/formulas.h"

namespace unisono::tuning {
namespace {

using topology::PathType;
using topology::toGigabytes;

using device::kWarpThreads;
using device::kWorkerThreads;
constexpr int kFewestThreads = 2 * kWarpThreads;  // that a user may set
constexpr double kSlowRing = 12;                  // GB/s up to which half the threads do
constexpr int kMaxCollnetRanksPerNode = 8, kMaxNvlsRanksPerNode = 32;

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
