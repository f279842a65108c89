// SPDX-License-Identifier: Apache-2.0
#include "proof.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "runtime/host/explorer.h"

// Every protocol in small instances: under schedules that find a bug of a given depth with a known
// probability, under all schedules, and under the weak memory of docs/proof.md.
namespace unisono::protocol {
namespace {

using runtime::host::Explorer;
using runtime::host::Schedule;
using runtime::host::ScheduleCounts;

class Proof : public testing::TestWithParam<Instance> {
 protected:
  void SetUp() override {
    if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
    discardWorlds();
    restartTime();
  }
  // Counts the time of the processor, for others may use the machine.
  void restartTime() { start_ = std::clock(); }
  // Runs the instance under `schedule(seed)` for many seeds.
  template <typename Of>
  uint64_t runMany(uint64_t count, Of scheduleOf) {
    return runMany(count, scheduleOf,
                   [](const Schedule& schedule) { return runInstance(GetParam(), schedule); });
  }
  template <typename Of, typename Run>
  uint64_t runMany(uint64_t count, Of scheduleOf, Run run) {
    uint64_t runs = 0;
    forEachSeed(count, GetParam().name, [&](uint64_t seed, Random&) {
      runs++;
      return run(scheduleOf(static_cast<int64_t>(seed)));
    });
    return runs;
  }
  void runPriorities(int depth);
  void print(const std::string& text, uint64_t runs) const {
    const double time = static_cast<double>(std::clock() - start_) / CLOCKS_PER_SEC;
    fmt::print("{}, {}: {} ({:.1f} s, {:.0f} a second)\n", GetParam().protocol, GetParam().name,
               text, time, static_cast<double>(runs) / time);
  }

 private:
  std::clock_t start_ = 0;
};

// Probabilistic concurrency testing, of which each run finds a bug of depth d with a probability of
// at least p = 1 / (n k^(d-1)). Races of plain accesses are looked for in every run.
void Proof::runPriorities(int depth) {
  Schedule schedule{.seed = 0, .memory = Schedule::Memory::sequential};
  ScheduleCounts counts = measure(GetParam(), schedule);
  schedule.depth = depth;
  // Where tasks wait for many words at once, these schedules have more steps than random walks.
  schedule.steps = counts.steps;
  counts.steps = std::max(counts.steps, measure(GetParam(), schedule).steps);
  schedule.steps = 2 * counts.steps;
  uint64_t steps = 0;
  restartTime();
  const uint64_t runs = runMany(1000, [&](int64_t seed) {
    steps = std::max(steps, testRuntime().scheduleCounts().steps);
    schedule.seed = seed;
    return schedule;
  });
  // Else the bound does not hold.
  EXPECT_LE(steps, schedule.steps);
  const double p = 1 / (static_cast<double>(counts.tasks) *
                        std::pow(static_cast<double>(schedule.steps), depth - 1));
  print(fmt::format("{} priority schedules, n = {}, k = {}, d = {}: a bug of that depth is found "
                    "with probability {:.6f} or more",
                    runs, counts.tasks, schedule.steps, depth,
                    -std::expm1(static_cast<double>(runs) * std::log1p(-p))),
        runs);
}

TEST_P(Proof, Priorities) {
  runPriorities(2);
}

TEST_P(Proof, PrioritiesOfDepth3) {
  runPriorities(3);
}

// Loads return old stores, groups are split into the roles of a GPU's warps.
TEST_P(Proof, WeakMemory) {
  uint64_t stale = 0;
  const Schedule walk{.seed = 0, .memory = Schedule::Memory::weak, .splitsGroups = true};
  const uint64_t steps = measure(GetParam(), walk).steps;
  const uint64_t runs = runMany(500, [&](int64_t seed) {
    stale += testRuntime().scheduleCounts().staleLoads;
    Schedule schedule = walk;
    schedule.seed = seed;
    schedule.depth = seed % 3 == 0 ? 0 : static_cast<int>(1 + seed % 3);
    schedule.steps = steps;
    schedule.splitsGroups = seed % 4 != 0;
    return schedule;
  });
  EXPECT_GT(stale, 0u);
  print(fmt::format("{} runs with weak memory, k = {}, {} loads of old stores", runs, steps, stale),
        runs);
}

// An abort of all ranks at some moment ends every role of every group, without a data race.
TEST_P(Proof, Abort) {
  const Instance& instance = GetParam();
  const Schedule weak{.seed = 0, .memory = Schedule::Memory::weak, .splitsGroups = true};
  const uint64_t steps = measure(instance, weak).steps;
  const uint64_t runs = runMany(
      60,
      [&](int64_t seed) {
        Schedule schedule = weak;
        schedule.seed = seed;
        return schedule;
      },
      [&](const Schedule& schedule) {
        discardWorlds();
        return runAborted(instance, schedule, steps);
      });
  print(fmt::format("{} aborted runs with weak memory", runs), runs);
}

// A launch that begins after an abort touches no buffer of the user.
TEST_P(Proof, LaunchAfterAbort) {
  const Instance& instance = GetParam();
  runMany(
      20,
      [](int64_t seed) {
        return Schedule{.seed = seed, .memory = Schedule::Memory::weak, .splitsGroups = true};
      },
      [&](const Schedule& schedule) {
        discardWorlds();
        return runAborted(instance, schedule, 0);
      });
}

// Flags of LL repeat after 2^31 steps. Long slices after short ones find lines of any age in their
// slots, and must not take one of the period before for theirs.
TEST(Wrap, LinesOfThePeriodBefore) {
  if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
  forEachSeed(400, "wrap", [](uint64_t seed, Random& random) {
    struct Kind {
      const char* geometry;
      plan::Call call;
    };
    static constexpr Kind kKinds[] = {{"tree LL", plan::Call::allReduce},
                                      {"LL", plan::Call::allReduce},
                                      {"LL", plan::Call::broadcast},
                                      {"network LL", plan::Call::broadcast},
                                      {"network LL", plan::Call::send}};
    const Kind& kind = kKinds[seed % std::size(kKinds)];
    World& world = worldOf(proofGeometry(kind.geometry), 2 + static_cast<int>(seed % 2));
    world.reset(random, Past::beforeTheWrap);
    ScenarioOptions options;
    options.first = kind.call;
    options.groups = 6;
    options.count = 16;  // two slots
    options.countsDiffer = true;
    Scenario scenario(world, memories(), random, options);
    startSchedule({.seed = static_cast<int64_t>(seed),
                   .memory = Schedule::Memory::weak,
                   .splitsGroups = seed % 4 == 0});
    return scenario.run();
  });
}

// Else the name of an instance would not say what it shows.
TEST(Instances, UseTheirAlgorithm) {
  for (const auto* list : {&instances(), &cores()}) {
    for (const Instance& instance : *list) {
      const Geometry& geometry = proofGeometry(instance.geometry);
      if (*geometry.algorithms == '\0') continue;
      const plan::Task task{instance.call,
                            nullptr,
                            nullptr,
                            instance.count,
                            {device::DataType::int32, device::Reduction::sum, false, 0},
                            0};
      const auto algorithm =
          plan::choiceOf(worldOf(geometry, instance.ranks).shape(0), task).algorithm;
      EXPECT_STRCASEEQ(std::string(device::nameOf(algorithm)).c_str(), geometry.algorithms)
          << instance.name;
    }
  }
}

class Core : public Proof {
 protected:
  // Runs the instance under every schedule, but for such as differ only in the order of independent
  // steps; under the first `most` if there are more. Returns whether those were all.
  bool explore(uint64_t most, Schedule::Memory memory) {
    Explorer explorer;
    bool more = true;
    while (more && explorer.runs() < most) {
      const std::string wrong =
          runInstance(GetParam(), {.seed = 0, .explorer = &explorer, .memory = memory});
      if (!wrong.empty()) {
        ADD_FAILURE() << "run " << explorer.runs() << " of the exploration: " << wrong;
        discardWorlds();
        return false;
      }
      more = explorer.next();
    }
    print(fmt::format("{} {} schedules{}, {} of them found to repeat others",
                      more ? "the first" : "all", explorer.runs(),
                      memory == Schedule::Memory::weak ? " and choices of loads" : "",
                      explorer.repeatedRuns()),
          explorer.runs());
    return !more;
  }
};

TEST_P(Core, EverySchedule) {
  EXPECT_TRUE(explore(100000, Schedule::Memory::sequential));
}

TEST_P(Core, EveryScheduleAndLoad) {
  explore(seedRange(2000).count, Schedule::Memory::weak);
}

INSTANTIATE_TEST_SUITE_P(All, Core, testing::ValuesIn(cores()),
                         [](const auto& tested) { return tested.param.name; });

INSTANTIATE_TEST_SUITE_P(All, Proof, testing::ValuesIn(instances()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace unisono::protocol
