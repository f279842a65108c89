// SPDX-License-Identifier: Apache-2.0
#include "tuning/model.h"

#include "device/direct_work.h"
#include "tuning_testing.h"

namespace unisono::tuning {
namespace {

using testing::inputOf;

ModelInput ncclInput(const std::string& preset, int nodes) {
  ModelInput input = inputOf(preset, nodes);
  input.registry = &ncclRegistry();
  input.facts.reachAll = false;
  return input;
}

const Estimate& allReduce(const CostModel& model, Algorithm algorithm, Protocol protocol) {
  return model.of(Operation::allReduce, algorithm, protocol);
}

// By hand from the formulas, 8 GPUs on one node: 14 hops of a ring, 7 up and 7 down a tree.
TEST(Model, LatenciesOfOneNode) {
  const CostModel model = makeModel(ncclInput("dgx-h100", 1));
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::ll).latencyUs, 15.0, 1e-9);
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::ll128).latencyUs, 40.6, 1e-9);
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::simple).latencyUs, 56.0, 1e-9);
  EXPECT_NEAR(allReduce(model, Algorithm::tree, Protocol::ll).latencyUs, 15.2, 1e-9);
  EXPECT_NEAR(allReduce(model, Algorithm::tree, Protocol::ll128).latencyUs, 31.5, 1e-9);
  EXPECT_NEAR(allReduce(model, Algorithm::tree, Protocol::simple).latencyUs, 64.4, 1e-9);
  EXPECT_NEAR(model.of(Operation::allGather, Algorithm::ring, Protocol::ll).latencyUs, 10.8, 1e-9);
}

TEST(Model, BandwidthsFollowTheGraphs) {
  ModelInput input = ncclInput("dgx-h100", 1);
  const double bus = topology::toGigabytes(input.facts.ring.speedIntra) * input.facts.ring.channels;
  ASSERT_GT(bus, 300);
  const CostModel model = makeModel(input);
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::simple).bandwidth, bus * 8 / 14, 1e-6);
  EXPECT_NEAR(model.of(Operation::allGather, Algorithm::ring, Protocol::simple).bandwidth,
              bus * 8 / 7, 1e-6);
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::ll).bandwidth, 141.0 * 8 / 14, 1e-6);
  // A user's limit of the channels limits the bandwidth.
  input.facts.channels = 1;
  EXPECT_NEAR(allReduce(makeModel(input), Algorithm::ring, Protocol::simple).bandwidth,
              topology::toGigabytes(input.facts.ring.speedIntra) * 8 / 14, 1e-6);
}

TEST(Model, LatenciesOfSeveralNodes) {
  const ModelInput input = ncclInput("dgx-h100", 8);
  const double network = static_cast<double>(input.facts.ring.latencyInterNs) / 1000;
  const CostModel model = makeModel(input);
  // 126 steps, of which 14 cross nodes; the others cost at least the overhead of the network.
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::ll).latencyUs,
              6.6 + 112 * 1.0 + 14 * (2.7 + network), 1e-6);
  EXPECT_NEAR(allReduce(model, Algorithm::ring, Protocol::simple).latencyUs,
              8.4 + 112 * 3.4 + 14 * (14 + 2 * network), 1e-6);
  EXPECT_NEAR(allReduce(model, Algorithm::tree, Protocol::ll).latencyUs,
              6.8 + 2 * (7 * 0.6 + 3 * (5 + network)), 1e-6);
  // On AMD processors the network costs more.
  ModelInput amd = input;
  amd.facts.machine.cpuVendor = static_cast<int>(topology::CpuVendor::amd);
  EXPECT_NEAR(allReduce(makeModel(amd), Algorithm::ring, Protocol::ll).latencyUs,
              6.6 + 112 * 2.0 + 14 * (2.7 + network), 1e-6);
  amd.settings.netOverheadNs = 500;
  EXPECT_NEAR(allReduce(makeModel(amd), Algorithm::ring, Protocol::ll).latencyUs,
              6.6 + 112 * 0.6 + 14 * (2.7 + network), 1e-6);
}

Exclusion exclusionOf(const ModelInput& input, Algorithm algorithm, Protocol protocol,
                      Operation operation = Operation::allReduce) {
  return makeModel(input).of(operation, algorithm, protocol).exclusion;
}

// Rails need the same number of ranks on each node, which reach each other over NVLink.
TEST(Model, SaysWhyThereAreNoRails) {
  const ModelInput two = inputOf("dgx-h100", 2);
  const auto simple = Protocol::simple;
  const auto exclusion = [](const ModelInput& input) {
    return exclusionOf(input, Algorithm::directTree, Protocol::simple);
  };
  EXPECT_EQ(exclusion(inputOf("dgx-h100", 1)), Exclusion::oneNode);
  EXPECT_EQ(exclusion(two), Exclusion::none);
  EXPECT_FALSE(makeModel(two).of(Operation::allReduce, Algorithm::directTree, simple).preferred);
  EXPECT_EQ(exclusionOf(two, Algorithm::directTree, simple, Operation::reduce),
            Exclusion::operation);
  ModelInput other = two;
  other.facts.ranks--;
  EXPECT_EQ(exclusion(other), Exclusion::unequalNodes);
  other = two;
  other.facts.maxRanksPerNode = 1;
  EXPECT_EQ(exclusion(other), Exclusion::unequalNodes);
  other = two;
  other.facts.maxRanksPerNode = device::kDirectMaxRanks + 1;
  other.facts.ranks = 2 * other.facts.maxRanksPerNode;
  EXPECT_EQ(exclusion(other), Exclusion::tooManyRanks);
  other = two;
  other.facts.reachNode = false;
  EXPECT_EQ(exclusion(other), Exclusion::unreachable);
  other = two;
  other.facts.ring.typeIntra = static_cast<int>(topology::PathType::phb);
  EXPECT_EQ(exclusion(other), Exclusion::splitLines);
}

// Less time than a tree, as the shares of the ranks of a node move at once, and no more bandwidth
// than the tree between the nodes.
TEST(Model, PredictsRails) {
  const CostModel model = makeModel(inputOf("dgx-h100", 2));
  for (const Protocol protocol : {Protocol::ll, Protocol::ll128, Protocol::simple}) {
    const Estimate& rails = allReduce(model, Algorithm::directTree, protocol);
    const Estimate& tree = allReduce(model, Algorithm::tree, protocol);
    EXPECT_GT(rails.latencyUs, 0);
    EXPECT_LT(rails.latencyUs, tree.latencyUs);
    EXPECT_GT(rails.bandwidth, 0);
    EXPECT_LT(rails.bandwidth, tree.bandwidth);
  }
}

TEST(Model, SaysWhyAnAlgorithmIsExcluded) {
  ModelInput one = inputOf("dgx-h100", 1), two = inputOf("dgx-h100", 2);
  const auto simple = Protocol::simple;
  EXPECT_EQ(exclusionOf(one, Algorithm::ring, simple), Exclusion::none);
  EXPECT_EQ(exclusionOf(one, Algorithm::direct, Protocol::ll), Exclusion::none);
  EXPECT_EQ(exclusionOf(two, Algorithm::direct, Protocol::ll), Exclusion::severalNodes);
  EXPECT_EQ(exclusionOf(one, Algorithm::nvls, simple), Exclusion::noMulticast);
  EXPECT_EQ(exclusionOf(one, Algorithm::nvlsTree, simple), Exclusion::oneNode);
  EXPECT_EQ(exclusionOf(one, Algorithm::collNetDirect, simple), Exclusion::noCollnet);
  EXPECT_EQ(exclusionOf(one, Algorithm::pat, simple), Exclusion::operation);
  EXPECT_EQ(exclusionOf(two, Algorithm::pat, simple, Operation::allGather),
            Exclusion::ranksPerNode);
  two.settings.patEnable = 0;
  EXPECT_EQ(exclusionOf(two, Algorithm::pat, simple, Operation::allGather), Exclusion::patDisabled);
  EXPECT_EQ(exclusionOf(one, Algorithm::nvls, Protocol::ll), Exclusion::protocol);
  EXPECT_EQ(exclusionOf(one, Algorithm::tree, simple, Operation::reduce), Exclusion::operation);
  two.facts.multicast = true;
  EXPECT_EQ(exclusionOf(two, Algorithm::nvls, simple), Exclusion::noCollnet);
  EXPECT_EQ(exclusionOf(two, Algorithm::nvlsTree, simple), Exclusion::none);
  EXPECT_EQ(exclusionOf(two, Algorithm::nvlsTree, simple, Operation::allGather),
            Exclusion::operation);
  EXPECT_EQ(exclusionOf(two, Algorithm::collNetChain, simple), Exclusion::noCollnet);
  two.facts.collnet = true;
  EXPECT_EQ(exclusionOf(two, Algorithm::nvls, simple), Exclusion::none);
  two.facts.collnetHeads = 8;
  for (const auto operation : {Operation::allGather, Operation::reduceScatter}) {
    // Every rank has to be a head, and a slot has room for a vector of each node.
    ModelInput few = two;
    EXPECT_EQ(exclusionOf(few, Algorithm::nvls, simple, operation), Exclusion::none);
    few.facts.headSlotBytes = 16;
    EXPECT_EQ(exclusionOf(few, Algorithm::nvls, simple, operation), Exclusion::tooLarge);
    few.facts.headSlotBytes = 32;
    EXPECT_EQ(exclusionOf(few, Algorithm::nvls, simple, operation), Exclusion::none);
    few.facts.nvlsHeads = 7;
    EXPECT_EQ(exclusionOf(few, Algorithm::nvls, simple, operation), Exclusion::tooManyRanks);
    EXPECT_EQ(exclusionOf(few, Algorithm::nvls, simple), Exclusion::none);
    few.facts.collnetDirect = few.facts.nvls;
    EXPECT_EQ(exclusionOf(few, Algorithm::collNetDirect, simple, operation), Exclusion::none);
    few.facts.collnetHeads = 7;
    EXPECT_EQ(exclusionOf(few, Algorithm::collNetDirect, simple, operation),
              Exclusion::tooManyRanks);
    EXPECT_EQ(exclusionOf(few, Algorithm::collNetDirect, simple), Exclusion::none);
    few.facts.machine.switches = 0;
    EXPECT_EQ(exclusionOf(few, Algorithm::collNetDirect, simple), Exclusion::noSwitch);
  }
  EXPECT_EQ(exclusionOf(two, Algorithm::collNetChain, simple), Exclusion::noChannels);
  two.facts.collnetChain = two.facts.tree;
  EXPECT_EQ(exclusionOf(two, Algorithm::collNetChain, simple), Exclusion::none);
  one.facts.reachAll = false;
  EXPECT_EQ(exclusionOf(one, Algorithm::direct, Protocol::ll), Exclusion::unreachable);
  one.facts.reachAll = true;
  one.facts.ranks = device::kDirectMaxRanks + 1;
  EXPECT_EQ(exclusionOf(one, Algorithm::direct, Protocol::ll), Exclusion::tooManyRanks);
}

TEST(Model, Ll128OnlyWhereItsLinesArriveWhole) {
  const auto ll128 = Protocol::ll128;
  ModelInput input = ncclInput("dgx-h100", 1);
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::none);
  input.facts.ring.typeIntra = static_cast<int>(topology::PathType::phb);
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::splitLines);
  EXPECT_EQ(exclusionOf(input, Algorithm::tree, ll128), Exclusion::none) << "its own graph counts";
  // Forced by name, with a warning.
  input.allowed = parseAllowed("ring", "LL128");
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::none);
  const auto warnings = warningsOf(input, makeModel(input));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("may be split"), std::string::npos) << warnings[0];
  // Between nodes as NCCL: before Hopper, paths through another GPU to a NIC are too far.
  input = ncclInput("dgx-h100", 2);
  input.facts.ring.typeInter = static_cast<int>(topology::PathType::pxn);
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::none);
  input.settings.ll128C2c = 0;
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::farPorts);
  input.settings.ll128C2c = 1;
  input.facts.machine.lowestSm = input.facts.machine.highestSm = 80;
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::farPorts);
  // Forced it is right all the same: a line is read when all of its slot is there.
  input.allowed = parseAllowed("ring", "LL128");
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::none);
  EXPECT_TRUE(warningsOf(input, makeModel(input)).empty());
  input.allowed = {};
  input.facts.ring.typeInter = static_cast<int>(topology::PathType::pxb);
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::none);
  input.facts.machine.highestSm = 86;
  EXPECT_EQ(exclusionOf(input, Algorithm::ring, ll128), Exclusion::splitLines);
}

// Of rings and trees on NVSwitches too. Slower links take longer; what a user has measured stays.
TEST(Model, MeasuredTimesFollowTheLinks) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  const auto points = [&](Algorithm algorithm, Protocol protocol) {
    return makeModel(input).of(Operation::allReduce, algorithm, protocol).measured;
  };
  constexpr Algorithm kEach[] = {Algorithm::ring, Algorithm::tree, Algorithm::direct};
  const topology::Bandwidth speed = input.facts.ring.speedIntra;
  for (const Algorithm algorithm : kEach) {
    input.facts.ring.speedIntra = speed;
    const auto usual = points(algorithm, Protocol::ll128);
    ASSERT_FALSE(usual.empty());
    input.facts.ring.speedIntra = speed / 4;
    const auto slower = points(algorithm, Protocol::ll128);
    ASSERT_EQ(slower.size(), usual.size());
    EXPECT_GT(slower.back().timeUs, 2 * usual.back().timeUs);
  }
  // A user's limit of the channels limits the bandwidth.
  const double slow = points(Algorithm::ring, Protocol::simple).back().timeUs;
  input.facts.channels = 1;
  EXPECT_GT(points(Algorithm::ring, Protocol::simple).back().timeUs, 2 * slow);
  input.measured = parseMeasurements(
                       "AllReduce Direct LL128 1 8 1048576 5.0\n"
                       "AllReduce Ring LL128 1 8 1048576 6.0\n",
                       "file")
                       .collectives;
  EXPECT_EQ(points(Algorithm::direct, Protocol::ll128).front().timeUs, 5);
  EXPECT_EQ(points(Algorithm::ring, Protocol::ll128).front().timeUs, 6);
  // Elsewhere rings and trees have NCCL's formulas.
  const auto isMeasured = [&] { return !points(Algorithm::tree, Protocol::ll).empty(); };
  EXPECT_TRUE(isMeasured());
  input.facts.slotsOfHost = true;
  EXPECT_FALSE(isMeasured());
  input.facts.slotsOfHost = false;
  input.facts.machine.switches = 0;
  EXPECT_FALSE(isMeasured());
  input.facts.machine.switches = 1;
  input.registry = &ncclRegistry();
  EXPECT_FALSE(isMeasured());
}

TEST(Model, WarnsOfOperationsWithoutACandidate) {
  ModelInput input = inputOf("dgx-h100", 1);
  EXPECT_TRUE(warningsOf(input, makeModel(input)).empty());
  input.allowed = parseAllowed("nvls;broadcast:ring", "");
  auto warnings = warningsOf(input, makeModel(input));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("AllReduce, AllGather, ReduceScatter, Reduce here"), std::string::npos)
      << warnings[0];
  input.facts.ranks = 1;
  EXPECT_TRUE(warningsOf(input, makeModel(input)).empty());
}

TEST(Model, ThreadsAndThresholdsFollowTheSettings) {
  ModelInput input = inputOf("dgx-h100", 1);
  const auto ring = static_cast<size_t>(Algorithm::ring);
  const auto tree = static_cast<size_t>(Algorithm::tree);
  const auto ll = static_cast<size_t>(Protocol::ll), ll128 = static_cast<size_t>(Protocol::ll128);
  const auto simple = static_cast<size_t>(Protocol::simple);
  const auto ringThreads = [&](int64_t wanted) {
    input.settings.threads = wanted;
    return makeModel(input).maxThreads[ring][simple];
  };
  EXPECT_EQ(ringThreads(0), 512);
  EXPECT_EQ(ringThreads(128), 128);
  EXPECT_EQ(ringThreads(32), 64);
  EXPECT_EQ(ringThreads(1024), 512);
  EXPECT_EQ(ringThreads(100), 512) << "not a multiple of a warp";
  input.settings.ll128Threads = 320;
  input.settings.thresholds = {1, -1, 3, 4, 5, -1};
  const CostModel model = makeModel(input);
  EXPECT_EQ(model.maxThreads[tree][ll128], 320);
  EXPECT_EQ(model.bytesPerThread[tree][ll], 1);
  EXPECT_EQ(model.bytesPerThread[tree][ll128], 8);
  EXPECT_EQ(model.bytesPerThread[tree][simple], 3);
  EXPECT_EQ(model.bytesPerThread[ring][ll], 4);
  EXPECT_EQ(model.bytesPerThread[ring][ll128], 5);
  EXPECT_EQ(model.bytesPerThread[ring][simple], 64);
  EXPECT_EQ(makeModel(inputOf("a100-pcie-x4", 1)).bytesPerThread[ring][ll], 32);
}

TEST(Model, HashChangesWithWhatTheChoiceDependsOn) {
  const ModelInput input = inputOf("dgx-h100", 1);
  const uint64_t hash = hashOf(makeModel(input));
  EXPECT_EQ(hash, hashOf(makeModel(input)));
  ModelInput other = input;
  other.settings.threads = 256;
  EXPECT_NE(hash, hashOf(makeModel(other)));
  other = input;
  other.allowed = parseAllowed("^direct", "");
  EXPECT_NE(hash, hashOf(makeModel(other)));
  other = input;
  other.measured.front().points.front().timeUs += 1;
  EXPECT_EQ(hash, hashOf(makeModel(input)));
  other.facts.direct.shareBytes[0]++;
  EXPECT_NE(hash, hashOf(makeModel(other)));
}

}  // namespace
}  // namespace unisono::tuning
