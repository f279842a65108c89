// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.h"

#include <fmt/format.h>

#include <chrono>
#include <random>

#include "base/error.h"
#include "plan_testing.h"
#include "support/sanitized.h"

namespace unisono::plan {
namespace {

using device::DataType;

constexpr Call kCollectives[] = {Call::allReduce, Call::allGather, Call::reduceScatter,
                                 Call::broadcast, Call::reduce};

// Each element of each collective belongs to exactly one channel, and each channel of a launch
// runs.
void expectWholeCover(const CommConfig& config, const std::vector<Task>& tasks, const Plan& plan) {
  size_t next = 0;
  for (const Launch& launch : plan.launches) {
    const auto& collective = std::get<CollectiveLaunch>(launch);
    ASSERT_GE(collective.arguments.works, 1);
    ASSERT_LE(collective.arguments.works, device::kMaxCollectiveWorks);
    ASSERT_LE(collective.blocks, config.channels);
    int blocks = 0;
    for (int w = 0; w < collective.arguments.works; w++) {
      const device::CollectiveWork& work = collective.arguments.work[w];
      while (tasks[next].count == 0) next++;
      ASSERT_EQ(work.count, tasks[next].count);
      ASSERT_EQ(work.input, tasks[next].input);
      ASSERT_GE(work.channels, 1);
      uint64_t covered = work.low;
      if (work.channels > 1) covered += (work.channels - 2u) * work.middle + work.high;
      ASSERT_EQ(covered, work.count);
      ASSERT_LE(work.low, work.count);
      ASSERT_LE(work.high, work.count);
      const auto size = device::elementBytes(work.reduction.type);
      if (work.channels > 1) {
        ASSERT_GT(work.low, 0u) << "the first channel has nothing to do";
        ASSERT_GT(work.high, 0u) << "the last channel has nothing to do";
        ASSERT_EQ(work.low * size % 16, 0u);
        ASSERT_EQ(work.middle * size % 16, 0u);
      }
      ASSERT_LE(work.chunkElements * size,
                uint64_t{config.slotBytes[indexOf(work.protocol)]} * config.slicesPerChunk);
      ASSERT_GT(work.chunkElements, 0u);
      blocks = std::max(blocks, work.firstChannel + work.channels);
      next++;
    }
    ASSERT_EQ(collective.blocks, blocks);
    ASSERT_EQ(plan.needs.rings, config.ranks > 1);
  }
  while (next < tasks.size() && tasks[next].count == 0) next++;
  ASSERT_EQ(next, tasks.size()) << "calls are missing from the plan";
}

// So that eager calls in steady state allocate nothing.
TEST(Plan, OfOneCollectiveUsesTheMemoryOfAnEarlierOne) {
  const CommConfig config = configOf(0, 4, 8);
  const std::vector<Task> tasks = {taskOf(Call::allReduce, 1000)};
  Plan plan = makePlan(config, tasks);
  const void* memory = plan.launches.data();
  for (int i = 0; i < 3; i++) {
    plan = makePlan(config, tasks, std::move(plan.launches));
    EXPECT_EQ(plan.launches.size(), 1u);
    EXPECT_EQ(plan.launches.data(), memory);
    expectWholeCover(config, tasks, plan);
  }
}

TEST(Plan, ChannelsCoverEveryElementOnceInRandomGroups) {
  for (unsigned seed = 0; seed < 2000; seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int ranks = 1 + static_cast<int>(random() % 9);
    CommConfig config = configOf(0, ranks, 1 + static_cast<int>(random() % 64));
    testing::setModel(config, {.minBytesPerChannel = uint64_t{512} << random() % 9});
    std::vector<Task> tasks;
    for (uint64_t i = random() % 90; i > 0; i--) {
      const auto type = static_cast<DataType>(random() % device::kDataTypes);
      const uint64_t count = random() % (uint64_t{1} << random() % 36);
      tasks.push_back(taskOf(kCollectives[random() % std::size(kCollectives)], count, type,
                             static_cast<int>(random() % static_cast<unsigned>(ranks))));
    }
    const Plan plan = makePlan(config, tasks);
    expectWholeCover(config, tasks, plan);
    if (HasFatalFailure()) return;
    // The same on every rank.
    config.rank = ranks - 1;
    const Plan other = makePlan(config, tasks);
    ASSERT_EQ(other.launches.size(), plan.launches.size());
    for (size_t l = 0; l < plan.launches.size(); l++) {
      const auto& a = std::get<CollectiveLaunch>(plan.launches[l]);
      const auto& b = std::get<CollectiveLaunch>(other.launches[l]);
      ASSERT_EQ(a.blocks, b.blocks);
      for (int w = 0; w < a.arguments.works; w++) {
        ASSERT_TRUE(a.arguments.work[w] == b.arguments.work[w]);
      }
    }
  }
}

// How many channels `tasks` take when there are more than enough of them and each needs 16 KiB.
int blocksOf(const std::vector<Task>& tasks) {
  constexpr int kRanks = 4;
  CommConfig config = configOf(0, kRanks, 64);
  testing::setModel(config, {.minBytesPerChannel = 16384});
  const Plan plan = makePlan(config, tasks);
  EXPECT_EQ(plan.launches.size(), 1u);
  return std::get<CollectiveLaunch>(plan.launches.front()).blocks;
}

// A ring sends every byte of an all-reduce twice, and in an all-gather or reduce-scatter the block
// of every rank.
TEST(Plan, ChannelsFollowTheTrafficOfTheCall) {
  constexpr uint64_t kBytes = 65536;
  EXPECT_EQ(blocksOf({taskOf(Call::broadcast, kBytes)}), 8);
  EXPECT_EQ(blocksOf({taskOf(Call::reduce, kBytes)}), 8);
  EXPECT_EQ(blocksOf({taskOf(Call::allReduce, kBytes)}), 16);
  EXPECT_EQ(blocksOf({taskOf(Call::allGather, kBytes)}), 32);
  EXPECT_EQ(blocksOf({taskOf(Call::reduceScatter, kBytes)}), 32);
  EXPECT_EQ(blocksOf({taskOf(Call::broadcast, kBytes, DataType::float32)}), 32);
  EXPECT_EQ(blocksOf({taskOf(Call::broadcast, kBytes), taskOf(Call::allReduce, kBytes)}), 24);
}

// Calls of one launch share its channels in proportion to their traffic.
TEST(Plan, CallsShareChannelsByTraffic) {
  const uint64_t count = uint64_t{1} << 24;
  const CommConfig config = configOf(0, 4, 12);
  const Plan plan =
      makePlan(config, {taskOf(Call::allReduce, count), taskOf(Call::broadcast, count)});
  ASSERT_EQ(plan.launches.size(), 1u);
  const auto& launch = std::get<CollectiveLaunch>(plan.launches.front());
  ASSERT_EQ(launch.arguments.works, 2);
  EXPECT_EQ(launch.arguments.work[0].channels, 8);
  EXPECT_EQ(launch.arguments.work[1].channels, 4);
}

// Rings over LL128 copy in a kernel of their own.
TEST(Plan, CallsShareALaunchIfTheyHaveTheSameKernel) {
  const auto launches = [](const char* protocol) {
    CommConfig config = configOf(0, 3);
    testing::setModel(config, {.algorithms = "ring", .protocols = protocol});
    const std::vector<Task> tasks{taskOf(Call::allGather, 999), taskOf(Call::broadcast, 999),
                                  taskOf(Call::allReduce, 999), taskOf(Call::reduceScatter, 999)};
    return makePlan(config, tasks).launches.size();
  };
  EXPECT_EQ(launches("LL"), 1u);
  EXPECT_EQ(launches("LL128"), 2u);
  EXPECT_EQ(launches("Simple"), 1u);
}

// What is left of the channel after the first call is less than an element of the second one moves.
TEST(Plan, NoChannelOfACallIsEmpty) {
  CommConfig config = configOf(0, 6, 3);
  testing::setModel(config, {.minBytesPerChannel = 2048});
  const std::vector<Task> tasks{taskOf(Call::allGather, 697, DataType::int64),
                                taskOf(Call::allGather, 1395, DataType::int64)};
  const Plan plan = makePlan(config, tasks);
  expectWholeCover(config, tasks, plan);
  EXPECT_EQ(std::get<CollectiveLaunch>(plan.launches.at(0)).arguments.work[1].firstChannel, 0);
}

TEST(Plan, LargestCount) {
  const CommConfig config = configOf(0, 8, 24);
  const std::vector<Task> tasks = {taskOf(Call::allReduce, uint64_t{1} << 60)};
  expectWholeCover(config, tasks, makePlan(config, tasks));
}

TEST(Plan, CallsOfNothingLeaveNoTrace) {
  std::vector<Task> tasks;
  for (int call = 0; call <= static_cast<int>(Call::scatter); call++) {
    tasks.push_back(taskOf(static_cast<Call>(call), 0));
  }
  for (int ranks : {1, 3}) {
    const Plan plan = makePlan(configOf(0, ranks), tasks);
    EXPECT_TRUE(plan.launches.empty());
    EXPECT_TRUE(plan.needs.peers.empty());
    EXPECT_FALSE(plan.needs.rings);
    EXPECT_EQ(plan.needs.direct, 0u);
  }
}

TEST(Plan, OneRankNeedsNoConnection) {
  const Plan plan =
      makePlan(configOf(0, 1), {taskOf(Call::allReduce, 100'000), taskOf(Call::allToAll, 5)});
  EXPECT_FALSE(plan.needs.rings);
  EXPECT_TRUE(plan.needs.peers.empty());
  ASSERT_EQ(plan.launches.size(), 2u);
  EXPECT_EQ(std::get<CollectiveLaunch>(plan.launches[0]).arguments.work[0].operation,
            device::Operation::local);
}

TEST(Plan, ManyCallsAreSeveralLaunches) {
  const std::vector<Task> tasks(3 * device::kMaxCollectiveWorks + 1, taskOf(Call::broadcast, 9));
  const Plan plan = makePlan(configOf(0, 2), tasks);
  ASSERT_EQ(plan.launches.size(), 4u);
  EXPECT_EQ(std::get<CollectiveLaunch>(plan.launches.back()).arguments.works, 1);
}

// A call runs with the algorithm, protocol, channels and threads that `unisono explain` names.
TEST(Plan, DoesWhatExplainSays) {
  struct Lists {
    const char* algorithms;
    const char* protocols;
  };
  for (const Lists& lists :
       {Lists{"", ""}, Lists{"ring", ""}, Lists{"twoshot", "LL128"}, Lists{"^direct", "LL128"},
        Lists{"tree", "LL"}, Lists{"allreduce:tree;broadcast:ring", "Simple"}}) {
    for (const int ranks : {1, 2, 8, 17}) {
      CommConfig config = configOf(0, ranks, 24);
      config.slotBytes = {64 << 10, 128 << 10, 1 << 20};
      if (ranks <= device::kDirectMaxRanks) {
        config.directLineBits = tuning::directLineBits(ranks);
        config.wide = tuning::wideGeometry(ranks);
        config.wide.offerBytes = 32 << 20;
      }
      testing::setModel(config, {.minBytesPerChannel = 32 << 10,
                                 .lowLatencyTraffic = std::nullopt,
                                 .algorithms = lists.algorithms,
                                 .protocols = lists.protocols});
      for (const Call call : kCollectives) {
        for (uint64_t count = 1; count <= uint64_t{1} << 28; count *= 4) {
          const Task task = taskOf(call, count, DataType::float32);
          const auto operation = static_cast<tuning::Operation>(call);
          const bool scatters = call == Call::allGather || call == Call::reduceScatter;
          const uint64_t bytes = count * 4 * static_cast<uint64_t>(scatters ? ranks : 1);
          const tuning::Choice choice = tuning::explain(*config.model, {operation, bytes}).choice;
          SCOPED_TRACE(fmt::format("NCCL_ALGO={} NCCL_PROTO={} {} ranks {} {} bytes",
                                   lists.algorithms, lists.protocols, ranks,
                                   tuning::nameOf(operation), bytes));
          const Plan plan = makePlan(config, {task});
          ASSERT_EQ(plan.launches.size(), 1u);
          if (const auto* launch = std::get_if<WideLaunch>(&plan.launches[0])) {
            EXPECT_EQ(choice.protocol, device::Protocol::ll128);
            EXPECT_EQ(launch->arguments.twoShot, choice.algorithm == device::Algorithm::twoShot);
            EXPECT_EQ(launch->blocks, choice.channels);
            continue;
          }
          if (choice.algorithm == device::Algorithm::direct) {
            const auto& launch = std::get<DirectLaunch>(plan.launches[0]);
            EXPECT_EQ(launch.blocks, choice.channels);
            EXPECT_EQ(launch.threads, choice.threads);
            continue;
          }
          const auto& launch = std::get<CollectiveLaunch>(plan.launches[0]);
          const device::CollectiveWork& work = launch.arguments.work[0];
          EXPECT_EQ(work.algorithm, choice.algorithm);
          EXPECT_EQ(work.protocol, choice.protocol);
          EXPECT_EQ(work.channels, choice.channels);
          EXPECT_EQ(launch.threads, choice.threads);
          EXPECT_EQ(work.chunkElements * 4, choice.chunkBytes);
        }
      }
    }
  }
}

// A tuner plug-in decides on what runs.
TEST(Plan, FollowsATunerPlugIn) {
  struct Plugin : tuning::Advisor {
    int advise(const tuning::Question& question, tuning::TimeTable& times) const override {
      if (question.bytes < 1000) return 0;
      times[static_cast<size_t>(device::Algorithm::tree)][indexOf(device::Protocol::ll128)] = 0;
      return 3;
    }
    uint64_t adviseChunk(const tuning::Question&, const tuning::Choice&) const override {
      return 1100;
    }
  };
  CommConfig config = configOf(0, 4, 8);
  config.advisor = std::make_shared<Plugin>();
  const Plan plan =
      makePlan(config, {taskOf(Call::allReduce, 999), taskOf(Call::allReduce, 1 << 20)});
  ASSERT_EQ(plan.launches.size(), 2u);
  const auto& own = std::get<CollectiveLaunch>(plan.launches[0]).arguments.work[0];
  EXPECT_EQ(own.algorithm, device::Algorithm::ring);
  EXPECT_EQ(own.protocol, device::Protocol::simple);
  const auto& advised = std::get<CollectiveLaunch>(plan.launches[1]).arguments.work[0];
  EXPECT_EQ(advised.algorithm, device::Algorithm::tree);
  EXPECT_EQ(advised.protocol, device::Protocol::ll128);
  EXPECT_EQ(advised.channels, 3);
  EXPECT_EQ(advised.chunkElements, 1024u) << "a whole number of grains";
}

// It may keep state.
TEST(Plan, AsksATunerPlugInOnceForEachCall) {
  struct Plugin : tuning::Advisor {
    int advise(const tuning::Question&, tuning::TimeTable& times) const override {
      const auto fastest = asked++ % 2 == 0 ? device::Algorithm::tree : device::Algorithm::ring;
      times[static_cast<size_t>(fastest)][indexOf(device::Protocol::ll128)] = 0;
      return 0;
    }
    uint64_t adviseChunk(const tuning::Question&, const tuning::Choice& choice) const override {
      return choice.chunkBytes;
    }
    mutable int asked = 0;
  };
  CommConfig config = configOf(0, 4, 8);
  const auto plugin = std::make_shared<Plugin>();
  config.advisor = plugin;
  for (const bool inGroup : {false, true}) {
    std::vector<Task> tasks(inGroup ? 2 : 1, taskOf(Call::allReduce, 64 << 20));
    for (Task& task : tasks) {
      plugin->asked = 0;
      choose(config, task);
      buffersOffered(config, task);
    }
    const Plan plan = makePlan(config, tasks);
    EXPECT_EQ(plugin->asked, 1);
    const auto& work = std::get<CollectiveLaunch>(plan.launches[0]).arguments.work[0];
    EXPECT_EQ(work.algorithm, device::Algorithm::tree);
    EXPECT_EQ(work.protocol, device::Protocol::ll128);
  }
  // Messages need no choice, and a reduction in a fixed order is made of other calls.
  Task send = taskOf(Call::send, 100);
  choose(config, send);
  EXPECT_FALSE(send.choice);
  config.fixedOrder = true;
  Task reduction = taskOf(Call::allReduce, 100);
  choose(config, reduction);
  ASSERT_TRUE(reduction.choice);
  const Plan ordered = makePlan(config, {reduction});
  EXPECT_EQ(std::get<CollectiveLaunch>(ordered.launches[0]).arguments.work[0].operation,
            device::Operation::reduce);
}

TEST(Plan, OfOneCallIsMadeQuickly) {
  if (!test::kTimesCount) GTEST_SKIP() << "times count in a release build only";
  for (const int ranks : {2, 8, 64, 1024}) {
    CommConfig config = configOf(0, ranks, 24);
    config.directLineBits = ranks <= device::kDirectMaxRanks ? tuning::directLineBits(ranks) : 0;
    testing::setModel(config, {.lowLatencyTraffic = std::nullopt});
    for (const uint64_t bytes : {uint64_t{1} << 10, uint64_t{64} << 20}) {
      const std::vector<Task> tasks = {taskOf(Call::allReduce, bytes)};
      constexpr int kCalls = 20'000;
      double best = 1e9;
      for (int repeat = 0; repeat < 5; repeat++) {
        size_t launches = 0;
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < kCalls; i++) launches += makePlan(config, tasks).launches.size();
        const std::chrono::duration<double, std::nano> time =
            std::chrono::steady_clock::now() - begin;
        ASSERT_EQ(launches, size_t{kCalls});
        best = std::min(best, time.count() / kCalls);
      }
      fmt::print("{} ranks, all-reduce of {} bytes: {:.0f} ns per plan\n", ranks, bytes, best);
      EXPECT_LT(best, 3000) << "with room for busy machines";
    }
  }
}

}  // namespace
}  // namespace unisono::plan
