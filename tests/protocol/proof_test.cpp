#include "proof.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

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
    start_ = std::chrono::steady_clock::now();
  }
  // Runs the instance under `schedule(seed)` for many seeds.
  template <typename Of>
  uint64_t runMany(uint64_t count, Of scheduleOf) {
    const Instance& instance = GetParam();
    uint64_t runs = 0;
    forEachSeed(count, instance.name, [&](uint64_t seed, Random&) {
      runs++;
      return runInstance(instance, scheduleOf(static_cast<int64_t>(seed)));
    });
    return runs;
  }
  void print(const std::string& text, uint64_t runs) const {
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start_;
    fmt::print("{}, {}: {} ({:.0f} a second)\n", GetParam().protocol, GetParam().name, text,
               static_cast<double>(runs) / time.count());
  }

 private:
  std::chrono::steady_clock::time_point start_;
};

// Probabilistic concurrency testing, of which each run finds a bug of depth d with a probability of
// at least p = 1 / (n k^(d-1)). Races of plain accesses are looked for in every run.
TEST_P(Proof, Priorities) {
  for (int depth : {2, 3}) {
    Schedule schedule{.seed = 0, .memory = Schedule::Memory::sequential};
    const ScheduleCounts counts = measure(GetParam(), schedule);
    schedule.depth = depth;
    schedule.steps = counts.steps;
    const uint64_t runs = runMany(1000, [&](int64_t seed) {
      schedule.seed = seed;
      return schedule;
    });
    const double p = 1 / (static_cast<double>(counts.tasks) *
                          std::pow(static_cast<double>(counts.steps), depth - 1));
    print(fmt::format("{} priority schedules, n = {}, k = {}, d = {}: a bug of that depth is found "
                      "with probability {:.6f} or more",
                      runs, counts.tasks, counts.steps, depth,
                      -std::expm1(static_cast<double>(runs) * std::log1p(-p))),
          runs);
  }
}

// Loads return old stores, groups are split into the roles of a GPU's warps.
TEST_P(Proof, WeakMemory) {
  uint64_t stale = 0;
  const Schedule walk{.seed = 0, .memory = Schedule::Memory::weak, .splitsGroups = true};
  const uint64_t steps = measure(GetParam(), walk).steps;
  const uint64_t runs = runMany(1000, [&](int64_t seed) {
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

INSTANTIATE_TEST_SUITE_P(All, Proof, testing::ValuesIn(instances()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace unisono::protocol
