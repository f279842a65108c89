// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "topology/join.h"
#include "tuning/allowed.h"
#include "tuning/direct.h"
#include "tuning/measured.h"
#include "tuning/registry.h"

// The cost model: what each algorithm and protocol costs on a communicator. The formulas and the
// numbers are those of NCCL 2.30, so that our choices can be compared with its. Where times were
// measured (measured.h), these replace the formulas, and else no call is predicted to take longer
// than a larger one, as NCCL's formulas do in places. Pure.
namespace unisono::tuning {

// The numbers of the model that a tuner plug-in may change (ABI v5 and later): the layout is that
// of the plug-in interface. Times in microseconds, bandwidths in GB/s.
struct CostConstants {
  using ByProtocol = std::array<double, device::kNcclProtocols>;
  using ByAlgorithm = std::array<ByProtocol, device::kNcclAlgorithms>;
  using ByScale = std::array<double, 3>;        // one node, two, more
  using ByGeneration = std::array<ByScale, 4>;  // Volta, Ampere, Hopper, Blackwell

  ByAlgorithm baseLatency;
  std::array<ByAlgorithm, 3> hopLatency;  // NVLink, PCI, network
  ByGeneration llMax;                     // of all channels
  ByGeneration ringLl128PerChannel, treeLl128PerChannel, treePerChannel, nvlsTreePerChannel;

  bool operator==(const CostConstants&) const = default;
};
const CostConstants& defaultConstants();

// The column of a protocol in NCCL's tables. One that NCCL does not have counts as Simple.
constexpr size_t costColumn(Protocol protocol) {
  const auto column = static_cast<size_t>(protocol);
  return column < device::kNcclProtocols ? column : static_cast<size_t>(Protocol::simple);
}

// What the user may set. Plain data; all ranks must have the same. The names are NCCL's variables.
struct TuningSettings {
  static constexpr int kThresholds = 6;
  int64_t threads = 0;       // NCCL_NTHREADS; 0: automatic
  int64_t ll128Threads = 0;  // NCCL_LL128_NTHREADS; 0: automatic
  // NCCL_THREAD_THRESHOLDS: bytes per thread of tree LL, LL128, Simple and ring LL, LL128, Simple;
  // -1: automatic.
  std::array<int64_t, kThresholds> thresholds{-1, -1, -1, -1, -1, -1};
  int64_t netOverheadNs = -1;  // NCCL_NET_OVERHEAD; -1: by processor
  int64_t ll128C2c = 1;        // NCCL_LL128_C2C
  int64_t patEnable = 2;       // NCCL_PAT_ENABLE; 2: with one rank per node
  // NCCL_P2P_LL_THRESHOLD: bytes of a message for each channel of a peer; -1: automatic.
  int64_t p2pLlThreshold = -1;
  int64_t deterministic = 0;  // UNISONO_DETERMINISTIC: only rings reduce

  bool operator==(const TuningSettings&) const = default;
};

// What the model knows of a communicator; the same on every rank.
struct CommFacts {
  int ranks = 1, nodes = 1;
  int maxRanksPerNode = 1;
  int channels = 1;  // of rings and trees
  topology::GraphFacts ring{}, tree{}, collnetDirect{}, collnetChain{}, nvls{};
  bool plainTrees = false;  // some node has all its network traffic at the first GPU of its tree
  int nvlsChannels = 0;     // blocks of NVLS
  int collnetHeads = 0, nvlsHeads = 0;  // of each node
  uint32_t headSlotBytes = ~uint32_t{0};
  topology::MachineFacts machine;
  bool multicast = false;  // NVLink multicast is there and allowed
  bool collnet = false;    // the network reduces, and the user wants it
  // What it can do: the bits of types and operators (collnetBit), and other operations.
  uint64_t collnetReductions = ~uint64_t{0};
  bool collnetAllGather = true, collnetReduceScatter = true;
  // The ranks of each node map each other's memory, and there are not too many.
  bool reachNode = false;
  bool reachAll = false;     // the same, and all ranks are on one node
  bool network = false;      // some ranks exchange data over the network
  bool sockets = false;      // that network is TCP sockets
  bool slotsOfHost = false;  // some connections have their slots in memory of the host
  DirectLimits direct;
  WideGeometry wide;
  // The payload of a chunk, by protocol; 0: unknown.
  std::array<uint64_t, device::kProtocols> chunkBytes{};
};
// Sums, products, largest and smallest; what scales is a sum of scaled operands.
inline constexpr int kCollnetReductions = 4;
constexpr uint64_t collnetBit(device::DataType type, device::Reduction reduction) {
  const int number = reduction <= device::Reduction::min ? static_cast<int>(reduction) : 0;
  return uint64_t{1} << (static_cast<int>(type) * kCollnetReductions + number);
}
// The bits of those for which `can(type, reduction)` holds.
template <typename Can>
uint64_t collnetBits(const Can& can) {
  uint64_t bits = 0;
  for (int t = 0; t < device::kDataTypes; t++) {
    for (int r = 0; r < kCollnetReductions; r++) {
      const auto type = static_cast<device::DataType>(t);
      const auto reduction = static_cast<device::Reduction>(r);
      if (can(type, reduction)) bits |= collnetBit(type, reduction);
    }
  }
  return bits;
}
CommFacts factsOf(const topology::Joined& joined);

// Adds the limits of this library's own code. `reachNode`: the ranks of each node map each other's
// memory; `mostBlocks`: the blocks that a rank may launch at a time.
void setLimits(bool reachNode, CommFacts& facts, int mostBlocks = device::kWideMaxBlocks);

// The cost of an operation by one algorithm and protocol.
struct Estimate {
  Exclusion exclusion = Exclusion::operation;
  bool preferred = false;               // else it runs only where nothing else is allowed
  bool allowed = false;                 // by NCCL_ALGO and NCCL_PROTO
  double latencyUs = 0;                 // of a call of no bytes
  double bandwidth = 0;                 // GB/s; bytes / time of a long call
  std::vector<MeasuredPoint> measured;  // replaces both where not empty
};

// The costs of everything on one communicator.
struct CostModel {
  CommFacts facts;
  CostConstants constants{};
  std::array<std::array<std::array<Estimate, device::kProtocols>, device::kAlgorithms>,
             kCollectives>
      estimates;
  int maxThreads[device::kAlgorithms][device::kProtocols] = {};  // that move data
  int smallRingThreads = 0;  // those of rings over Simple in copies and small reductions
  int64_t bytesPerThread[device::kAlgorithms][device::kProtocols] = {};
  Allowed allowed;
  bool formulasOnly = false;  // of NCCL: its choices, with all their steps
  // By operation, what the communicator can run, of descending preference where times are equal.
  struct Candidate {
    Algorithm algorithm;
    Protocol protocol;
    bool preferred;
    bool allowedAlgorithm, allowedProtocol;
    bool allowed() const { return allowedAlgorithm && allowedProtocol; }
  };
  std::array<std::vector<Candidate>, kCollectives> candidates;
  // By protocol: why the direct family carries no messages inside nodes, whatever the settings.
  std::array<Exclusion, device::kProtocols> messages{};

  // Whether calls over FIFOs may use a protocol.
  bool mayUse(Protocol protocol) const;
  const Estimate& of(Operation operation, Algorithm algorithm, Protocol protocol) const {
    return estimates[static_cast<size_t>(operation)][static_cast<size_t>(algorithm)]
                    [static_cast<size_t>(protocol)];
  }
};

struct ModelInput {
  CommFacts facts;
  Allowed allowed;
  TuningSettings settings;
  CostConstants constants = defaultConstants();
  const Registry* registry = &libraryRegistry();
  MeasuredTable measured = builtinMeasurements();
};
CostModel makeModel(const ModelInput& input);

// Texts for the user about NCCL_ALGO and NCCL_PROTO: operations for which they leave nothing that
// can run here (something else carries them), and LL128 forced where its lines may be split.
std::vector<std::string> warningsOf(const ModelInput& input, const CostModel& model);

// Changes with everything that a choice depends on.
uint64_t hashOf(const CostModel& model);

}  // namespace unisono::tuning
