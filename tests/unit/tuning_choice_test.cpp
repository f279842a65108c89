// SPDX-License-Identifier: Apache-2.0
#include "tuning/choice.h"

#include <chrono>
#include <random>

#include "support/sanitized.h"
#include "support/seed.h"
#include "tuning_testing.h"

namespace unisono::tuning {
namespace {

using device::DataType;
using device::Reduction;
using testing::inputOf;

constexpr uint64_t kKilo = 1024, kMega = 1 << 20, kGiga = 1 << 30;

Question allReduceOf(uint64_t bytes) {
  return {Operation::allReduce, bytes};
}

ModelInput ncclInput(const std::string& preset, int nodes) {
  ModelInput input = inputOf(preset, nodes);
  input.registry = &ncclRegistry();
  input.facts.reachAll = false;
  return input;
}

std::string namesOf(const Choice& choice) {
  return fmt::format("{} {}", nameOf(choice.algorithm), nameOf(choice.protocol));
}

TEST(Choice, SmallAllReducesGoDirectWhereThatIsPossible) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  const CostModel model = makeModel(input);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(8))), "Direct LL");
  EXPECT_EQ(namesOf(choose(model, allReduceOf(16 * kKilo))), "Direct LL");
  EXPECT_EQ(namesOf(choose(model, allReduceOf(kMega))), "TwoShot LL128");
  EXPECT_EQ(namesOf(choose(model, allReduceOf(kGiga))), "Ring Simple");
  EXPECT_EQ(namesOf(choose(model, {Operation::allGather, 8})), "Direct LL");
  input.allowed = parseAllowed("ring", "");
  EXPECT_EQ(namesOf(choose(makeModel(input), allReduceOf(8))), "Ring LL");
  input.allowed = parseAllowed("", "simple");
  EXPECT_EQ(namesOf(choose(makeModel(input), allReduceOf(8))), "Ring Simple");
}

// Between nodes as NCCL chooses.
TEST(Choice, TreesAndEveryProtocolJoinNodes) {
  for (const int nodes : {2, 8, 64}) {
    ModelInput input = inputOf("dgx-h100", nodes);
    input.facts.network = true;
    ModelInput nccl = ncclInput("dgx-h100", nodes);
    const CostModel model = makeModel(input), ncclModel = makeModel(nccl);
    for (int o = 0; o < kCollectives; o++) {
      for (uint64_t bytes = 8; bytes <= 4 * kGiga; bytes *= 2) {
        const Question question{static_cast<Operation>(o), bytes};
        EXPECT_EQ(namesOf(choose(model, question)), namesOf(choose(ncclModel, question)))
            << nodes << " nodes, " << nameOf(question.operation) << " of " << bytes << " bytes";
      }
    }
    EXPECT_EQ(namesOf(choose(model, allReduceOf(8))), "Tree LL");
    EXPECT_EQ(namesOf(choose(model, allReduceOf(4 * kGiga))), "Ring Simple");
    input.facts.network = false;  // simulated nodes that share memory
    EXPECT_EQ(namesOf(choose(makeModel(input), allReduceOf(kMega))), "Tree LL128");
  }
}

// The proxies take lines apart for sockets, which limits LL. On 2 H200 it was as fast as Simple at
// 32 KB and slower above.
TEST(Choice, LlOverSocketsIsForSmallCalls) {
  ModelInput input = inputOf("dgx-h100", 2);
  input.facts.ranks = 2;
  input.facts.maxRanksPerNode = 1;
  input.facts.network = input.facts.sockets = true;
  input.allowed = parseAllowed("ring", "");
  const auto ranges = choicesBySize(makeModel(input), allReduceOf(0), 1, kGiga);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[0].protocol, Protocol::ll);
  EXPECT_GE(ranges[0].lastBytes, 8 * kKilo);
  EXPECT_LE(ranges[0].lastBytes, 64 * kKilo);
  // One thread of a rank serves all channels.
  const auto channelsOfLl = [&] {
    return choose(makeModel(input), allReduceOf(16 * kKilo)).channels;
  };
  input.allowed = parseAllowed("ring", "LL");
  EXPECT_EQ(channelsOfLl(), 1);
  input.facts.sockets = false;
  EXPECT_GT(channelsOfLl(), 1);
  input.allowed = parseAllowed("ring", "");
  EXPECT_GT(choicesBySize(makeModel(input), allReduceOf(0), 1, kGiga)[0].lastBytes, 128 * kKilo);
}

TEST(Choice, NoSizeTakesLongerThanALargerOne) {
  for (const std::string& preset : topology::presetNames()) {
    for (const int nodes : {1, 2, 8}) {
      ModelInput input = inputOf(preset, nodes);
      if (nodes > 1 && input.facts.ring.speedInter < 1000) continue;
      for (const bool network : {false, true}) {
        input.facts.network = network && nodes > 1;
        const CostModel model = makeModel(input);
        for (int o = 0; o < kCollectives; o++) {
          const auto operation = static_cast<Operation>(o);
          double before = 0;
          for (uint64_t bytes = 1; bytes < 16 * kGiga; bytes += 1 + bytes / 50) {
            // Sizes around a power of two, where the formulas have steps.
            for (const uint64_t at : {bytes, std::bit_ceil(bytes) - 1, std::bit_ceil(bytes)}) {
              if (at < bytes || at > bytes + bytes / 50) continue;
              const double time = choose(model, {operation, at}).timeUs;
              ASSERT_GE(time, before * (1 - 1e-9)) << preset << ", " << nodes << " nodes, "
                                                   << nameOf(operation) << " of " << at << " bytes";
              before = time;
            }
          }
        }
      }
    }
  }
}

// What was measured on NVSwitch machines, where the formulas say otherwise: the direct family over
// LL, then over LL128, and rings for large sizes. Without it, rings with LL, LL128 and Simple.
TEST(Choice, FollowsWhatWasMeasuredOnH200) {
  for (const char* preset : {"hgx-h200x4", "hgx-h200x8", "dgx-h100"}) {
    for (int ranks : {2, 4, 8}) {
      ModelInput input = inputOf(preset, 1);
      input.facts.ranks = input.facts.maxRanksPerNode = ranks;
      setLimits(true, input.facts);
      const CostModel model = makeModel(input);
      input.allowed = parseAllowed("ring", "");
      const CostModel rings = makeModel(input);
      for (int o = 0; o < kCollectives; o++) {
        const auto operation = static_cast<Operation>(o);
        SCOPED_TRACE(fmt::format("{} {} ranks {}", preset, ranks, nameOf(operation)));
        const auto ranges = choicesBySize(model, {operation}, 1, kGiga);
        ASSERT_GE(ranges.size(), 2u);
        EXPECT_EQ(ranges[0].algorithm, Algorithm::direct);
        EXPECT_EQ(ranges[0].protocol, Protocol::ll);
        EXPECT_EQ(ranges[1].protocol, Protocol::ll128);
        for (size_t i = 1; i < ranges.size(); i++) {
          // The largest calls use the peers' buffers, so they may be direct again.
          EXPECT_NE(ranges[i].algorithm, Algorithm::tree);
          // Of 2 ranks, which were measured, rings are as fast from a few megabytes on.
          EXPECT_TRUE(ranks > 2 || ranges[i].algorithm != Algorithm::ring ||
                      ranges[i].firstBytes > 4 * kMega)
              << ranges[i].firstBytes;
        }
        const auto without = choicesBySize(rings, {operation}, 1, kGiga);
        EXPECT_GE(without.size(), 2u);
        for (size_t i = 0; i < without.size(); i++) {
          EXPECT_EQ(without[i].algorithm, Algorithm::ring);
          EXPECT_TRUE(i == 0 || without[i].protocol != Protocol::ll);
        }
        EXPECT_GT(without[0].lastBytes, 8 * kKilo);
        // Of 4 ranks LL128 was as fast for the smallest broadcasts and reductions.
        EXPECT_TRUE(without[0].protocol == Protocol::ll ? without[0].lastBytes < 4 * kMega
                                                        : ranks >= 4);
        EXPECT_NE(without[0].protocol, Protocol::simple);
      }
    }
  }
}

TEST(Choice, SomethingCarriesEveryCallWhateverTheUserSets) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  const auto chosen = [&](const char* algorithms, const char* protocols, uint64_t bytes) {
    input.allowed = parseAllowed(algorithms, protocols);
    const Choice choice = choose(makeModel(input), allReduceOf(bytes));
    return namesOf(choice) + (choice.allowed ? "" : ", not allowed");
  };
  EXPECT_EQ(chosen("nvls", "", 8), "Direct LL, not allowed");
  EXPECT_EQ(chosen("nvls", "", kMega), "TwoShot LL128, not allowed");
  EXPECT_EQ(chosen("direct", "", 8 * kGiga), "Ring Simple, not allowed") << "too large";
  EXPECT_EQ(chosen("direct,tree", "", 8 * kGiga).substr(0, 4), "Tree") << "what is left is allowed";
  EXPECT_EQ(chosen("ring", "LL", 8), "Ring LL");
  EXPECT_EQ(chosen("ring", "LL", kGiga), "Ring LL") << "also where it is slow";
  EXPECT_EQ(chosen("ring", "LL128", 8), "Ring LL128");
  EXPECT_EQ(chosen("", "LL128", kMega), "TwoShot LL128");
  EXPECT_EQ(chosen("ring", "LL,simple", kMega), "Ring LL");
  EXPECT_EQ(chosen("ring", "LL,simple", 64 * kMega), "Ring Simple");
  EXPECT_EQ(chosen("ring", "^simple", 8), "Ring LL");
  EXPECT_EQ(chosen("collnetdirect", "LL", kMega), "Ring LL, not allowed") << "the protocol is kept";
  EXPECT_EQ(chosen("nvls", "simple", 8), "Ring Simple, not allowed") << "the protocol is kept";
  EXPECT_EQ(chosen("^ring,direct,twoshot", "LL128", 8), "Tree LL128");
  EXPECT_EQ(chosen("broadcast:ring", "", 8), "Direct LL");
  EXPECT_EQ(chosen("ring;allreduce:tree", "allreduce:simple", 8), "Tree Simple");
  EXPECT_EQ(chosen("ring,nvls", "", 8), "Ring LL");
  input.facts.ranks = 1;
  EXPECT_EQ(chosen("tree", "", 8), "Ring Simple, not allowed");
  EXPECT_EQ(chosen("", "", 8), "Ring Simple");
}

// Known winners of NCCL: trees for small calls between nodes, rings for large ones on few nodes,
// NVLS on one node of NVSwitches.
TEST(Choice, NcclsAlgorithmsWinWhereTheyDoInNccl) {
  ModelInput input = ncclInput("dgx-h100", 1);
  CostModel model = makeModel(input);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(8))), "Ring LL");
  EXPECT_EQ(namesOf(choose(model, allReduceOf(kGiga))), "Ring Simple");
  input.facts.multicast = true;
  EXPECT_EQ(namesOf(choose(makeModel(input), allReduceOf(kGiga))), "NVLS Simple");
  model = makeModel(ncclInput("dgx-h100", 8));
  EXPECT_EQ(namesOf(choose(model, allReduceOf(8))), "Tree LL");
  EXPECT_EQ(choose(model, allReduceOf(kMega)).algorithm, Algorithm::tree);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(4 * kGiga))), "Ring Simple");
}

TEST(Choice, WhatMulticastCannotReduceGoesElsewhere) {
  ModelInput input = ncclInput("dgx-h100", 1);
  input.facts.multicast = true;
  const CostModel model = makeModel(input);
  const auto chosen = [&](DataType type, Reduction reduction) {
    return choose(model, {Operation::allReduce, kGiga, type, reduction}).algorithm;
  };
  EXPECT_EQ(chosen(DataType::float32, Reduction::sum), Algorithm::nvls);
  EXPECT_EQ(chosen(DataType::float32, Reduction::max), Algorithm::ring);
  EXPECT_EQ(chosen(DataType::bfloat16, Reduction::max), Algorithm::nvls);
  EXPECT_EQ(chosen(DataType::bfloat16, Reduction::prod), Algorithm::ring);
  EXPECT_EQ(chosen(DataType::int8, Reduction::sum), Algorithm::ring);
  // An all-gather reduces nothing.
  const auto gathers = explain(model, {Operation::allGather, kGiga, DataType::int8}).candidates;
  EXPECT_TRUE(std::any_of(gathers.begin(), gathers.end(), [](const CandidateReport& row) {
    return row.algorithm == Algorithm::nvls && row.exclusion == Exclusion::none;
  }));
}

TEST(Choice, LongRingsOfFloat8AreAvoided) {
  const CostModel model = makeModel(ncclInput("dgx-h100", 2));
  EXPECT_EQ(choose(model, {Operation::allReduce, kGiga, DataType::float8e4m3}).algorithm,
            Algorithm::tree);
  EXPECT_EQ(choose(model, {Operation::allReduce, 4 * kGiga, DataType::float16}).algorithm,
            Algorithm::ring);
}

TEST(Choice, LargeReducesOfOneByteTypesAvoidSimple) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.facts.ranks = input.facts.maxRanksPerNode = 2;
  setLimits(true, input.facts);
  const CostModel model = makeModel(input);
  const auto chosen = [&](Operation operation, DataType type) {
    return namesOf(choose(model, {operation, kGiga, type}));
  };
  EXPECT_EQ(chosen(Operation::reduce, DataType::float8e5m2), "Direct LL128");
  EXPECT_EQ(chosen(Operation::reduce, DataType::int8), "Direct LL128");
  EXPECT_EQ(chosen(Operation::reduce, DataType::bfloat16), "Ring Simple");
  EXPECT_EQ(chosen(Operation::broadcast, DataType::int8),
            chosen(Operation::broadcast, DataType::bfloat16));
}

TEST(Choice, ChannelsAndThreadsGrowWithTheBytes) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.allowed = parseAllowed("ring", "simple");
  const CostModel model = makeModel(input);
  const auto shape = [&](uint64_t bytes, Operation operation = Operation::broadcast) {
    const Choice choice = choose(model, {operation, bytes});
    return std::pair(choice.channels, choice.threads);
  };
  EXPECT_EQ(shape(0), std::pair(1, 64 + 64)) << "two warps, one that waits and one that posts";
  EXPECT_EQ(shape(8 * kKilo), std::pair(1, 128 + 64));
  EXPECT_EQ(shape(16 * kKilo), std::pair(1, 256 + 64));
  EXPECT_EQ(shape(32 * kKilo), std::pair(2, 256 + 64));
  EXPECT_EQ(shape(96 * kKilo), std::pair(6, 256 + 64));
  EXPECT_EQ(shape(kGiga), std::pair(model.facts.channels, 256 + 64));
  EXPECT_EQ(shape(~uint64_t{0}).first, model.facts.channels);
  // All-reduce moves each byte twice around the ring.
  EXPECT_EQ(choose(model, allReduceOf(96 * kKilo)).channels, 12);
  // Reductions are bound by their threads when they are large.
  EXPECT_EQ(shape(8 << 20, Operation::reduce), std::pair(model.facts.channels, 256 + 64));
  EXPECT_EQ(shape((8 << 20) + 1, Operation::reduce), std::pair(model.facts.channels, 512 + 64));
  // What the user sets counts.
  input.settings.threads = 512;
  const Choice set = choose(makeModel(input), {Operation::broadcast, kGiga});
  EXPECT_EQ(set.threads, 512 + 64);
}

TEST(Choice, MeasuredTimesReplaceThoseOfTheModel) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.measured =
      replaceCurves(builtinMeasurements(), parseMeasurements("AllReduce Ring Simple 1 8 1024 1.0\n"
                                                             "AllReduce Ring Simple 1 8 16384 16.0",
                                                             "file")
                                               .collectives);
  const CostModel model = makeModel(input);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(kKilo))), "Ring Simple");
  EXPECT_EQ(choose(model, allReduceOf(kKilo)).timeUs, 1.0);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(16 * kKilo))), "Direct LL");
}

TEST(Choice, WhatIsOnlyForcedIsChosenWhereItWasMeasured) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.facts.multicast = true;
  EXPECT_EQ(namesOf(choose(makeModel(input), allReduceOf(kGiga))), "Ring Simple");
  input.measured =
      replaceCurves(builtinMeasurements(),
                    parseMeasurements("AllReduce NVLS Simple 1 8 1048576 5.0", "file").collectives);
  const CostModel model = makeModel(input);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(kMega))), "NVLS Simple");
}

TEST(Choice, RailsCarryWhatTheirLaunchesHold) {
  ModelInput input = inputOf("dgx-h100", 2);
  input.allowed = parseAllowed("DirectTree", "");
  const CostModel model = makeModel(input);
  for (const uint64_t bytes : {uint64_t{4}, uint64_t{8192}, uint64_t{8193}, kMega, 8 * kGiga}) {
    EXPECT_EQ(choose(model, allReduceOf(bytes)).algorithm, Algorithm::directTree) << bytes;
  }
  EXPECT_NE(choose(model, allReduceOf(8 * kGiga + 1024)).algorithm, Algorithm::directTree);
  // A small call is the same on every rail, a large one has a share for each rank and a rest.
  const DirectLimits& limits = model.facts.direct;
  EXPECT_EQ(railParts(limits, 8192, 8).share, 0u);
  EXPECT_EQ(railParts(limits, 8192, 8).rest, 8192u);
  EXPECT_EQ(railParts(limits, 8193, 8).share, 1024u);
  EXPECT_EQ(railParts(limits, 8193, 8).rest, 1u);
  DirectLimits narrow = limits;
  narrow.shareBytes[static_cast<size_t>(Protocol::ll)] = 512;
  EXPECT_EQ(railParts(narrow, 600, 2).share, 256u);
  EXPECT_EQ(railParts(narrow, 600, 2).rest, 88u);
}

TEST(Choice, ExplainsEveryCandidate) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  const Explanation all = explain(makeModel(input), allReduceOf(kMega));
  ASSERT_FALSE(all.candidates.empty());
  EXPECT_TRUE(all.candidates[0].chosen);
  EXPECT_EQ(namesOf(all.choice), "TwoShot LL128");
  int chosen = 0;
  for (const CandidateReport& row : all.candidates) {
    chosen += row.chosen ? 1 : 0;
    EXPECT_EQ(row.reason.empty(), row.chosen);
    if (row.algorithm == Algorithm::direct && row.protocol == Protocol::ll) {
      EXPECT_EQ(row.reason, "more bytes than its buffers hold");
      EXPECT_TRUE(row.measured);
    }
    if (row.algorithm == Algorithm::tree) {
      EXPECT_NE(row.reason.find("times the time of the choice"), std::string::npos);
      EXPECT_GT(row.timeUs, all.choice.timeUs);
      EXPECT_TRUE(row.measured);
    }
    if (row.algorithm == Algorithm::nvls) {
      EXPECT_EQ(row.reason, "no NVLink multicast");
    }
  }
  EXPECT_EQ(chosen, 1);
  input.allowed = parseAllowed("ring", "");
  const Explanation ring = explain(makeModel(input), allReduceOf(8));
  EXPECT_EQ(ring.candidates[1].reason, "excluded by NCCL_ALGO or NCCL_PROTO");
  const Explanation lost = explain(makeModel(inputOf("hgx-h200x8", 1)), allReduceOf(8));
  EXPECT_NE(lost.candidates[1].reason.find("times the time of the choice"), std::string::npos);
}

TEST(Choice, BordersAreFoundToTheByte) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.allowed = parseAllowed("direct,ring", "LL,simple");
  input.measured = replaceCurves(
      input.measured, parseMeasurements("AllReduce Ring LL 1 8 8 1e9", "file").collectives);
  const CostModel model = makeModel(input);
  const auto ranges = choicesBySize(model, allReduceOf(0), 1, 8 * kGiga);
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[0].firstBytes, 1u);
  EXPECT_EQ(ranges[0].lastBytes, 128 * kKilo);
  EXPECT_EQ(ranges[1].firstBytes, 128 * kKilo + 1);
  EXPECT_EQ(ranges[1].lastBytes, 8 * kGiga);
  EXPECT_EQ(ranges[1].lastChannels, model.facts.channels);
  EXPECT_EQ(choicesBySize(model, allReduceOf(0), 5, 5).size(), 1u);
}

class FixedAdvisor : public Advisor {
 public:
  int advise(const Question&, TimeTable& times) const override {
    for (size_t a = 0; a < times.size(); a++) {
      for (size_t p = 0; p < device::kProtocols; p++) {
        if (times[a][p] == kExcluded) continue;
        seen++;
        if (a == algorithm && p == protocol) times[a][p] = 0;
      }
    }
    return channels;
  }
  uint64_t adviseChunk(const Question&, const Choice& choice) const override {
    return choice.chunkBytes * 2;
  }
  size_t algorithm = static_cast<size_t>(Algorithm::ring);
  size_t protocol = static_cast<size_t>(Protocol::simple);
  int channels = 3;
  mutable int seen = 0;
};

TEST(Choice, AnAdvisorChangesTheTimes) {
  ModelInput input = inputOf("hgx-h200x8", 1);
  input.facts.chunkBytes.fill(1000);
  const CostModel model = makeModel(input);
  FixedAdvisor advisor;
  const Choice choice = choose(model, allReduceOf(8), &advisor);
  EXPECT_EQ(namesOf(choice), "Ring Simple");
  EXPECT_EQ(advisor.seen, 6) << "rings and trees: only what can run is offered";
  EXPECT_EQ(choice.channels, 3);
  EXPECT_EQ(choice.chunkBytes, 1000u) << "not more than the buffer";
  advisor.channels = 1000;
  EXPECT_EQ(choose(model, allReduceOf(8), &advisor).channels, model.facts.channels);
  // What the library does not choose by itself.
  advisor.algorithm = static_cast<size_t>(Algorithm::tree);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(8), &advisor)), "Tree Simple");
  // What cannot run stays out.
  advisor.algorithm = static_cast<size_t>(Algorithm::nvls);
  EXPECT_EQ(namesOf(choose(model, allReduceOf(8), &advisor)), "Direct LL");
}

TEST(ChoiceCache, ChoosesTheSame) {
  const CostModel model = makeModel(inputOf("dgx-h100", 2));
  ChoiceCache cache;
  std::mt19937_64 random(test::seed());
  // Few sizes, so that some questions repeat, and more than the cache holds.
  std::vector<Question> questions;
  for (int i = 0; i < 200; i++) {
    questions.push_back({.operation = static_cast<Operation>(random() % kCollectives),
                         .bytes = random() % (uint64_t{1} << random() % 34),
                         .type = random() % 2 == 0 ? DataType::float32 : DataType::float8e4m3,
                         .reduction = random() % 2 == 0 ? Reduction::sum : Reduction::preMulSum,
                         .calls = 1 + static_cast<int>(random() % 3)});
  }
  for (int i = 0; i < 5000; i++) {
    const Question& question = questions[random() % questions.size()];
    const Choice kept = cache.choose(model, question), own = choose(model, question);
    ASSERT_EQ(namesOf(kept), namesOf(own)) << question.bytes;
    ASSERT_EQ(kept.channels, own.channels) << question.bytes;
    ASSERT_EQ(kept.threads, own.threads) << question.bytes;
    ASSERT_EQ(kept.timeUs, own.timeUs) << question.bytes;
  }
}

TEST(Choice, IsCheap) {
  if (!test::kTimesCount) GTEST_SKIP() << "times count in a release build only";
  const CostModel model = makeModel(ncclInput("dgx-h100", 64));
  constexpr int kCalls = 20'000;
  double best = 1e9, sink = 0;
  for (int repeat = 0; repeat < 5; repeat++) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; i++) {
      sink += choose(model, allReduceOf(static_cast<uint64_t>(i) * 1000)).timeUs;
    }
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    best = std::min(best, time.count() / kCalls);
  }
  EXPECT_GT(sink, 0);
  RecordProperty("nanoseconds", static_cast<int>(best));
  EXPECT_LT(best, 3000) << "ns per choice, with room for busy machines";
}

}  // namespace
}  // namespace unisono::tuning
