// SPDX-License-Identifier: Apache-2.0
#include "proof.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace unisono::protocol {

using plan::Call;
using runtime::host::Schedule;
using runtime::host::ScheduleCounts;

// Slots of 512 bytes hold 128 integers. Every connection of a ring passes more slices than it has
// slots, direct streams go round or wait for an acknowledgment.
const std::vector<Instance>& instances() {
  static const std::vector<Instance> kInstances = {
      {"AllReduce2", "ring Simple", Call::allReduce, 2, "two slots", 512},
      {"AllReduce3", "ring Simple", Call::allReduce, 3, "two slots", 384},
      {"AllGather2", "ring Simple", Call::allGather, 2, "two slots", 384},
      {"ReduceScatter2", "ring Simple", Call::reduceScatter, 2, "two slots", 384},
      {"Broadcast3", "ring Simple", Call::broadcast, 3, "two slots", 384},
      {"Reduce3", "ring Simple", Call::reduce, 3, "two slots", 384},
      {"TwoLaunches2", "ring Simple", Call::allReduce, 2, "two slots", 200, 2},
      {"TwoWorks2", "ring Simple", Call::allReduce, 2, "two slots", 130, 1, 2},
      // Results go straight into the outputs.
      {"DirectAllReduce2", "ring Simple, direct", Call::allReduce, 2, "one process", 512},
      {"DirectAllReduce3", "ring Simple, direct", Call::allReduce, 3, "one process", 384},
      {"DirectAllGather3", "ring Simple, direct", Call::allGather, 3, "one process", 256},
      {"DirectBroadcast3", "ring Simple, direct", Call::broadcast, 3, "one process", 384},
      {"DirectTwoLaunches2", "ring Simple, direct", Call::allGather, 2, "one process", 130, 2},
      {"DirectTwoWorks2", "ring Simple, direct", Call::allReduce, 2, "one process", 130, 1, 2},
      {"LlAllReduce2", "ring LL", Call::allReduce, 2, "LL", 16},
      {"LlAllReduce3", "ring LL", Call::allReduce, 3, "LL", 12},
      {"LlAllGather3", "ring LL", Call::allGather, 3, "LL", 20},
      {"LlReduceScatter2", "ring LL", Call::reduceScatter, 2, "LL", 24},
      {"LlBroadcast3", "ring LL", Call::broadcast, 3, "LL", 24},
      {"LlReduce3", "ring LL", Call::reduce, 3, "LL", 24},
      {"LlTwoLaunches2", "ring LL", Call::allReduce, 2, "LL", 10, 2},
      {"LlTwoWorks2", "ring LL", Call::allReduce, 2, "LL", 10, 1, 2},
      {"Ll128AllReduce2", "ring LL128", Call::allReduce, 2, "LL128", 80},
      {"Ll128AllReduce3", "ring LL128", Call::allReduce, 3, "LL128", 33},
      {"Ll128AllGather2", "ring LL128", Call::allGather, 2, "LL128", 90},
      {"Ll128ReduceScatter2", "ring LL128", Call::reduceScatter, 2, "LL128", 45},
      {"Ll128Reduce3", "ring LL128", Call::reduce, 3, "LL128", 60},
      {"Ll128Broadcast3", "ring LL128", Call::broadcast, 3, "LL128", 90},
      {"Ll128TwoLaunches2", "ring LL128", Call::allReduce, 2, "LL128", 31, 2},
      {"InTurns2", "ring LL and Simple", Call::allReduce, 2, "in turns", 10, 2, 2},
      {"Tree2", "tree Simple", Call::allReduce, 2, "tree Simple", 384},
      {"Tree3", "tree Simple", Call::allReduce, 3, "tree Simple", 384},
      {"TreeTwoWorks3", "tree Simple", Call::allReduce, 3, "tree Simple", 130, 1, 2},
      {"DirectTree3", "tree Simple, direct", Call::allReduce, 3, "direct tree", 384},
      // Two nodes of two ranks: what every rank has, a share of each, and both.
      {"RailsOfPairs", "DirectTree", Call::allReduce, 4, "rails", 40},
      {"RailShares", "DirectTree", Call::allReduce, 4, "rails", 192},
      {"RailSharesAndRest", "DirectTree", Call::allReduce, 4, "rails", 70},
      {"RailsTwoLaunches", "DirectTree", Call::allReduce, 4, "rails", 66, 2},
      {"TreeLl3", "tree LL", Call::allReduce, 3, "tree LL", 24},
      {"TreeLlTwoLaunches3", "tree LL", Call::allReduce, 3, "tree LL", 10, 2},
      {"TreeLl128Of3", "tree LL128", Call::allReduce, 3, "tree LL128", 80},
      // Slots of 64 bytes hold 16 integers.
      {"Nvls2", "NVLS", Call::allReduce, 2, "NVLS", 96},
      {"Nvls3", "NVLS", Call::allReduce, 3, "NVLS", 130},
      {"NvlsAllGather2", "NVLS", Call::allGather, 2, "NVLS", 60},
      {"NvlsAllGather3", "NVLS", Call::allGather, 3, "NVLS", 40},
      {"NvlsReduceScatter2", "NVLS", Call::reduceScatter, 2, "NVLS", 60},
      {"NvlsReduceScatter3", "NVLS", Call::reduceScatter, 3, "NVLS", 40},
      {"NvlsTwoLaunches2", "NVLS", Call::allReduce, 2, "NVLS", 40, 2},
      {"NvlsTwoWorks3", "NVLS", Call::allReduce, 3, "NVLS", 40, 1, 2},
      // Nodes of one rank; then two nodes with two heads each, and with one.
      {"NvlsTree2", "NVLSTree", Call::allReduce, 2, "NVLS tree", 96},
      {"NvlsTree3", "NVLSTree", Call::allReduce, 3, "NVLS tree", 96},
      {"NvlsTree4", "NVLSTree", Call::allReduce, 4, "NVLS tree", 40},
      {"NvlsTreeOfPairs", "NVLSTree", Call::allReduce, 4, "NVLS tree of pairs", 80},
      {"NvlsTreeOneHead", "NVLSTree", Call::allReduce, 3, "NVLS tree of pairs", 48},
      {"NvlsTreeTwoLaunches2", "NVLSTree", Call::allReduce, 2, "NVLS tree", 24, 2},
      {"NvlsTreeTwoWorks2", "NVLSTree", Call::allReduce, 2, "NVLS tree", 24, 1, 2},
      // Nodes of one rank, then of two.
      {"Chain2", "CollNet chain", Call::allReduce, 2, "CollNet chain", 384},
      {"ChainOfPairs", "CollNet chain", Call::allReduce, 4, "CollNet chain of pairs", 384},
      {"ChainTwoLaunches3", "CollNet chain", Call::allReduce, 3, "CollNet chain of pairs", 130, 2},
      {"ChainTwoWorks3", "CollNet chain", Call::allReduce, 3, "CollNet chain of pairs", 130, 1, 2},
      {"DirectChainOfPairs", "CollNet chain, direct", Call::allReduce, 4, "direct chain", 384},
      {"NvlsNetwork2", "NVLS with CollNet", Call::allReduce, 2, "NVLS and network", 96},
      {"NvlsNetworkOfPairs", "NVLS with CollNet", Call::allReduce, 4, "NVLS pairs and network", 80},
      {"NvlsNetworkOneHead", "NVLS with CollNet", Call::allReduce, 3, "NVLS pairs and network", 24,
       1, 2},
      {"NvlsNetworkAllGatherOfPairs", "NVLS with CollNet", Call::allGather, 4,
       "NVLS pairs and network", 20},
      {"NvlsNetworkReduceScatterOfPairs", "NVLS with CollNet", Call::reduceScatter, 4,
       "NVLS pairs and network", 20},
      {"CollNetDirect2", "CollNet direct", Call::allReduce, 2, "CollNet direct", 96},
      {"CollNetDirectOfPairs", "CollNet direct", Call::allReduce, 4, "CollNet direct of pairs", 80},
      {"CollNetDirectOneHead", "CollNet direct", Call::allReduce, 3, "CollNet direct of pairs", 24,
       1, 2},
      {"CollNetDirectTwoLaunches", "CollNet direct", Call::allReduce, 3, "CollNet direct of pairs",
       24, 2},
      {"CollNetDirectAllGatherOfPairs", "CollNet direct", Call::allGather, 4,
       "CollNet direct of pairs", 20},
      {"CollNetDirectReduceScatterOfPairs", "CollNet direct", Call::reduceScatter, 4,
       "CollNet direct of pairs", 20},
      // Streams of 16 lines, of which a launch moves 4; positions begin anywhere.
      {"Line2", "direct", Call::allReduce, 2, "direct", 2},
      {"Lines2", "direct", Call::allReduce, 2, "direct", 6},
      {"FourCalls2", "direct", Call::allReduce, 2, "direct", 1, 4},
      {"FiveCalls2", "direct", Call::allReduce, 2, "direct", 7, 5},
      {"ThreeCalls3", "direct", Call::allReduce, 3, "direct", 2, 3},
      {"GatherLines2", "direct", Call::allGather, 2, "direct", 3, 2},
      {"ScatterLines2", "direct", Call::reduceScatter, 2, "direct", 3, 2},
      {"BroadcastLines2", "direct", Call::broadcast, 2, "direct", 8, 6},
      {"BroadcastLines3", "direct", Call::broadcast, 3, "direct", 8, 5},
      {"ReduceLines3", "direct", Call::reduce, 3, "direct", 8, 5},
      {"SendLines", "direct", Call::send, 2, "direct", 8, 6},
      {"AllToAllGroup2", "direct", Call::allToAll, 2, "direct", 3, 2, 2},
      {"SendLines3", "direct", Call::send, 3, "direct", 8, 6},
      {"AllToAllLines3", "direct", Call::allToAll, 3, "direct", 3, 2},
      // More than one launch may move.
      {"LongGroup2", "direct", Call::allToAll, 2, "direct", 8, 1, 6},
      {"LongGroups2", "direct", Call::allToAll, 2, "direct", 6, 2, 3},
      {"LongGroup3", "direct", Call::allToAll, 3, "direct", 8, 1, 3},
      {"LongSends2", "direct", Call::send, 2, "direct", 8, 2, 5},
      {"GroupOfTwo2", "direct", Call::allReduce, 2, "direct", 3, 2, 2},
      {"GatherToRoot3", "direct", Call::gather, 3, "direct", 3, 2},
      {"ScatterFromRoot3", "direct", Call::scatter, 3, "direct", 3, 2},
      // FIFOs of 4 slots with a line of 30 integers each, or with two lines.
      {"Wide2", "direct LL128", Call::allReduce, 2, "direct LL128", 170},
      {"Wide3", "direct LL128", Call::allReduce, 3, "direct LL128", 80},
      {"WideFourCalls2", "direct LL128", Call::allReduce, 2, "direct LL128", 31, 4},
      {"WideGather3", "direct LL128", Call::allGather, 3, "direct LL128", 80},
      {"WideBroadcast2", "direct LL128", Call::broadcast, 2, "direct LL128", 100, 3},
      {"WideReduce3", "direct LL128", Call::reduce, 3, "direct LL128", 100, 2},
      {"WideBlocks2", "direct LL128", Call::broadcast, 2, "wide blocks", 800},
      {"TwoShot2", "two-shot LL128", Call::allReduce, 2, "two-shot LL128", 300},
      {"TwoShot3", "two-shot LL128", Call::allReduce, 3, "two-shot LL128", 200},
      {"TwoShotThreeCalls2", "two-shot LL128", Call::allReduce, 2, "two-shot LL128", 62, 3},
      // The last rank has no part.
      {"TwoShotShort3", "two-shot LL128", Call::allReduce, 3, "two-shot LL128", 40, 2},
      // Messages: of several passes in one FIFO, and in two.
      {"WideSend2", "messages LL128", Call::send, 2, "wide messages", 200, 2},
      {"WideSends2", "messages LL128", Call::send, 2, "wide messages", 31, 1, 5},
      {"WideSend3", "messages LL128", Call::send, 3, "wide messages", 70, 4},
      {"WideSendBlocks2", "messages LL128", Call::send, 2, "wide message blocks", 400, 2},
      // Ranks that use each other's buffers.
      {"InPlace2", "direct in place", Call::allReduce, 2, "two-shot in place", 68},
      {"InPlace3", "direct in place", Call::allReduce, 3, "two-shot in place", 40},
      {"InPlaceTwoCalls2", "direct in place", Call::allReduce, 2, "two-shot in place", 36, 2},
      {"InPlaceGather3", "direct in place", Call::allGather, 3, "direct in place", 8},
      {"InPlaceScatter3", "direct in place", Call::reduceScatter, 3, "direct in place", 8},
      {"InPlaceBroadcast2", "direct in place", Call::broadcast, 2, "direct in place", 8, 3},
      {"InPlaceReduce3", "direct in place", Call::reduce, 3, "direct in place", 8, 2},
      // Slots of 64 bytes, with a network between the ranks, which passes lines in another order.
      {"NetworkLl2", "ring LL, network", Call::allReduce, 2, "network LL", 16},
      {"NetworkLl3", "ring LL, network", Call::allReduce, 3, "network LL", 12},
      {"NetworkLlBroadcast3", "ring LL, network", Call::broadcast, 3, "network LL", 24},
      {"NetworkLlTwoLaunches2", "ring LL, network", Call::allReduce, 2, "network LL", 10, 2},
      {"NetworkTreeLl3", "tree LL, network", Call::allReduce, 3, "network tree LL", 24},
      {"NetworkSimple2", "ring Simple, network", Call::allReduce, 2, "network Simple", 384},
      {"NetworkLl128Of2", "ring LL128, network", Call::allReduce, 2, "network LL128", 130},
      {"NetworkLl128Of3", "ring LL128, network", Call::allReduce, 3, "network LL128", 33},
      {"NetworkLl128TwoLaunches2", "ring LL128, network", Call::allReduce, 2, "network LL128", 31,
       2},
      {"NetworkTreeLl128Of3", "tree LL128, network", Call::allReduce, 3, "network tree LL128", 80},
      {"NetworkLines", "send and receive, network", Call::send, 2, "network LL", 40, 2},
      {"NetworkAllToAll2", "send and receive, network", Call::allToAll, 2, "network LL", 12},
      {"NetworkStaged", "send and receive, network", Call::send, 2, "network Simple", 384},
      {"Direct", "send and receive", Call::send, 2, "one process", 256},
      {"TwoDirect", "send and receive", Call::send, 2, "one process", 64, 2},
      {"Staged", "send and receive", Call::send, 2, "apart", 384},
      {"TwoStaged", "send and receive", Call::send, 2, "apart", 256, 2},
      {"TwoMessages", "send and receive", Call::send, 2, "one process", 64, 1, 2},
      {"TwoSenders3", "send and receive", Call::send, 3, "one process", 64, 2},
      {"AllToAll2", "send and receive", Call::allToAll, 2, "apart", 128},
      {"Gather3", "send and receive", Call::gather, 3, "apart", 96},
      {"Scatter3", "send and receive", Call::scatter, 3, "one process", 96},
  };
  return kInstances;
}

const std::vector<Instance>& cores() {
  static const std::vector<Instance> kCores = {
      {"AllReduce", "ring Simple", Call::allReduce, 2, "two slots", 256},
      {"AllGather", "ring Simple", Call::allGather, 2, "two slots", 128},
      {"AllGatherLong", "ring Simple", Call::allGather, 2, "two slots", 256},
      {"ReduceScatter", "ring Simple", Call::reduceScatter, 2, "two slots", 128},
      {"Broadcast", "ring Simple", Call::broadcast, 2, "two slots", 384},
      {"Reduce", "ring Simple", Call::reduce, 2, "two slots", 384},
      {"DirectAllReduce", "ring Simple, direct", Call::allReduce, 2, "one process", 128},
      {"DirectAllGather", "ring Simple, direct", Call::allGather, 2, "one process", 128},
      {"DirectBroadcast", "ring Simple, direct", Call::broadcast, 2, "one process", 256},
      {"LlAllReduce", "ring LL", Call::allReduce, 2, "LL", 4},
      {"LlAllGather", "ring LL", Call::allGather, 2, "LL", 4},
      {"LlBroadcast", "ring LL", Call::broadcast, 2, "LL", 4},
      {"Tree", "tree Simple", Call::allReduce, 2, "tree Simple", 128},
      {"TreeLl", "tree LL", Call::allReduce, 2, "tree LL", 4},
      {"Nvls", "NVLS", Call::allReduce, 2, "NVLS", 16},
      {"NvlsAllGather", "NVLS", Call::allGather, 2, "NVLS", 16},
      {"NvlsReduceScatter", "NVLS", Call::reduceScatter, 2, "NVLS", 16},
      {"NvlsTree", "NVLSTree", Call::allReduce, 2, "NVLS tree", 16},
      {"Chain", "CollNet chain", Call::allReduce, 2, "CollNet chain", 128},
      {"CollNetDirectReduceScatter", "CollNet direct", Call::reduceScatter, 2, "CollNet direct", 8},
      {"Line", "direct", Call::allReduce, 2, "direct", 2},
      {"Lines", "direct", Call::allReduce, 2, "direct", 4},
      {"TwoCalls", "direct", Call::allReduce, 2, "direct", 2, 2},
      {"ThreeCalls", "direct", Call::allReduce, 2, "direct", 2, 3},
      {"Laps", "direct", Call::broadcast, 2, "narrow direct", 2, 3},
      {"LongSends", "direct", Call::send, 2, "narrow direct", 2, 1, 2},
      {"InPlace2", "direct in place", Call::allReduce, 2, "two-shot in place", 8},
      {"InPlaceTwoCalls2", "direct in place", Call::allReduce, 2, "two-shot in place", 8, 2},
      {"InPlaceGather2", "direct in place", Call::allGather, 2, "direct in place", 4, 2},
      {"InPlaceReduce3", "direct in place", Call::reduce, 3, "direct in place", 4, 2},
      {"Direct", "send and receive", Call::send, 2, "one process", 256},
      {"TwoDirect", "send and receive", Call::send, 2, "one process", 64, 1, 2},
      {"Staged", "send and receive", Call::send, 2, "apart", 384},
      {"AllToAll", "send and receive", Call::allToAll, 2, "apart", 128},
  };
  return kCores;
}

const Geometry& proofGeometry(const std::string& name) {
  static const std::vector<Geometry> kGeometries = {
      {.name = "two slots"},
      {.name = "LL", .slotBytes = 64, .protocols = "LL"},
      {.name = "LL128", .slotBytes = 128, .protocols = "LL128"},
      {.name = "in turns", .lowLatencyMaxBytes = 100},
      {.name = "tree Simple", .algorithms = "tree", .protocols = "Simple"},
      {.name = "direct tree", .directBytes = 1, .algorithms = "tree", .protocols = "Simple"},
      {.name = "rails",
       .directLineBits = 7,
       .wide = {.blocks = 1, .slotLines = 1},
       .ranksPerNode = 2,
       .algorithms = "DirectTree",
       .protocols = "Simple"},
      {.name = "tree LL", .slotBytes = 64, .algorithms = "tree", .protocols = "LL"},
      {.name = "tree LL128", .slotBytes = 128, .algorithms = "tree", .protocols = "LL128"},
      {.name = "NVLS", .slotBytes = 64, .multicast = true, .algorithms = "NVLS"},
      {.name = "NVLS tree",
       .slotBytes = 64,
       .multicast = true,
       .ranksPerNode = 1,
       .algorithms = "NVLSTree"},
      {.name = "NVLS tree of pairs",
       .slotBytes = 64,
       .multicast = true,
       .ranksPerNode = 2,
       .algorithms = "NVLSTree"},
      {.name = "NVLS and network",
       .slotBytes = 64,
       .multicast = true,
       .collnet = true,
       .ranksPerNode = 1,
       .algorithms = "NVLS"},
      {.name = "NVLS pairs and network",
       .slotBytes = 64,
       .multicast = true,
       .collnet = true,
       .ranksPerNode = 2,
       .algorithms = "NVLS"},
      {.name = "CollNet direct",
       .slotBytes = 64,
       .collnet = true,
       .ranksPerNode = 1,
       .algorithms = "CollNetDirect"},
      {.name = "CollNet direct of pairs",
       .slotBytes = 64,
       .collnet = true,
       .ranksPerNode = 2,
       .algorithms = "CollNetDirect"},
      {.name = "CollNet chain", .collnet = true, .ranksPerNode = 1, .algorithms = "CollNetChain"},
      {.name = "CollNet chain of pairs",
       .collnet = true,
       .ranksPerNode = 2,
       .algorithms = "CollNetChain"},
      {.name = "direct chain",
       .directBytes = 1,
       .collnet = true,
       .ranksPerNode = 2,
       .algorithms = "CollNetChain"},
      {.name = "network LL",
       .slotBytes = 64,
       .network = true,
       .peerLineBytes = 400,
       .ranksPerNode = 1,
       .protocols = "LL"},
      {.name = "network tree LL",
       .slotBytes = 64,
       .network = true,
       .ranksPerNode = 1,
       .algorithms = "tree",
       .protocols = "LL"},
      {.name = "network LL128",
       .slotBytes = 128,
       .network = true,
       .ranksPerNode = 1,
       .protocols = "LL128"},
      {.name = "network tree LL128",
       .slotBytes = 128,
       .network = true,
       .ranksPerNode = 1,
       .algorithms = "tree",
       .protocols = "LL128"},
      {.name = "network Simple", .network = true, .ranksPerNode = 1, .protocols = "Simple"},
      {.name = "direct", .directLineBits = 4},
      {.name = "narrow direct", .directLineBits = 2},
      {.name = "direct LL128",
       .directLineBits = 2,
       .wide = {.blocks = 1, .slotLines = 1},
       .algorithms = "Direct",
       .protocols = "LL128"},
      {.name = "wide blocks",
       .directLineBits = 2,
       .wide = {.blocks = 2, .slotLines = 2},
       .algorithms = "Direct",
       .protocols = "LL128"},
      {.name = "wide messages", .directLineBits = 2, .wide = {.blocks = 1, .slotLines = 1}},
      {.name = "wide message blocks", .directLineBits = 2, .wide = {.blocks = 2, .slotLines = 2}},
      {.name = "two-shot LL128",
       .directLineBits = 2,
       .wide = {.blocks = 1, .slotLines = 1},
       .algorithms = "TwoShot",
       .protocols = "LL128"},
      {.name = "direct in place",
       .directLineBits = 2,
       .wide = {.blocks = 1, .slotLines = 2},
       .wideOfferBytes = 1,
       .algorithms = "Direct",
       .protocols = "LL128"},
      {.name = "two-shot in place",
       .directLineBits = 2,
       .wide = {.blocks = 1, .slotLines = 2},
       .wideOfferBytes = 1,
       .algorithms = "TwoShot",
       .protocols = "LL128"},
      {.name = "one process", .directBytes = 1},
      {.name = "apart", .oneProcess = false},
  };
  for (const Geometry& geometry : kGeometries) {
    if (geometry.name == name) return geometry;
  }
  throw std::invalid_argument(name);
}

namespace {

ScenarioOptions optionsOf(const Instance& instance) {
  ScenarioOptions options;
  options.first = instance.call;
  options.groups = instance.groups;
  options.calls = instance.calls;
  options.count = instance.count;
  return options;
}

std::string withSteps(std::string wrong) {
  if (!wrong.empty() && wrong.find("The last steps") == std::string::npos) {
    wrong += " The last steps of each task:\n" + testRuntime().lastSteps();
  }
  return wrong;
}

}  // namespace

std::string runInstance(const Instance& instance, const Schedule& schedule) {
  World& world = worldOf(proofGeometry(instance.geometry), instance.ranks);
  Random random = randomOf(0, instance.name);
  world.reset(random);
  Scenario scenario(world, memories(), random, optionsOf(instance));
  startSchedule(schedule);
  return withSteps(scenario.run());
}

std::string runAborted(const Instance& instance, const Schedule& schedule, uint64_t steps) {
  World& world = worldOf(proofGeometry(instance.geometry), instance.ranks);
  Random random = randomOf(static_cast<uint64_t>(schedule.seed), instance.name);
  world.reset(random);
  Scenario scenario(world, memories(), random, optionsOf(instance));
  startSchedule(schedule);
  std::vector<std::shared_ptr<void>> streams;
  for (int rank = 0; rank < world.ranks(); rank++) {
    streams.push_back(testRuntime().createStream(rank));
    if (steps > 0) {
      world.enqueueAbort(rank, below(random, steps), streams.back().get());
    } else {
      world.raiseAbort(rank);
    }
  }
  scenario.enqueue();
  for (int rank = 0; rank < world.ranks(); rank++) {
    const RankMemory& memory = memories()[static_cast<size_t>(rank)];
    runtime::Stream stream =
        steps > 0 ? world.stream(rank) : streams[static_cast<size_t>(rank)].get();
    world.enqueueTouch(memory.at(0), memory.used(), stream);
  }
  std::string wrong;
  for (const std::string& error : world.synchronize()) wrong += error;
  for (const auto& stream : streams) {
    try {
      testRuntime().synchronize(stream.get());
    } catch (const std::exception& error) {
      wrong += error.what();
    }
  }
  return withSteps(wrong + scenario.compareGuards());
}

ScheduleCounts measure(const Instance& instance, Schedule schedule) {
  constexpr int64_t kRuns = 100;
  ScheduleCounts largest;
  for (int64_t seed = 0; seed < kRuns; seed++) {
    schedule.seed = seed;
    if (!runInstance(instance, schedule).empty()) {
      discardWorlds();
      break;
    }
    const ScheduleCounts counts = testRuntime().scheduleCounts();
    largest.tasks = std::max(largest.tasks, counts.tasks);
    largest.steps = std::max(largest.steps, counts.steps);
  }
  return largest;
}

}  // namespace unisono::protocol
