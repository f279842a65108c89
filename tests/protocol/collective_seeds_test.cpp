// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "seeds.h"

// Every collective under seeded schedules.
//
// What these tests are worth was tried by breaking the device code in one place at a time:
//   one slot too much credit; the tail, or the head, published ahead of the copy; the step kept
//   modulo the slots: every collective fails within the first seeds
//   the offer's count ahead of its address: Send crashes (a message goes to the address before)
//   only the first flag of a line looked at: AllReduce, and all of Direct
//   positions of the launch's own blocks only: Direct.AllSizes and ManyCallsInFlight
//   tail, head or offer stored relaxed, or data or credit not acquired: right on x86, and each one
//   a data race under ThreadSanitizer
//   a rank that publishes after its abort: Stuck.AnAbortedRankPublishesNothing and AtAnyMoment
namespace unisono::protocol {
namespace {

using plan::Call;

constexpr uint64_t kRounds = 16;  // through all worlds, for each call

std::string describe(const World& world, const Scenario& scenario, const std::string& wrong) {
  return wrong.empty() ? wrong
                       : std::to_string(world.ranks()) + " ranks, geometry " +
                             world.geometry().name + ", calls" + scenario.text() + ":" + wrong;
}

std::string runSeed(uint64_t seed, Random& random, const ScenarioOptions& options, int ranks) {
  const Geometry& geometry = geometries()[seed / 7 % geometries().size()];
  World& world = worldOf(geometry, ranks);
  world.reset(random);
  setSchedule(seed);
  Scenario scenario(world, memories(), random, options);
  return describe(world, scenario, scenario.run());
}

class CollectiveSeeds : public testing::TestWithParam<Call> {};

TEST_P(CollectiveSeeds, GivesTheReferencesResult) {
  const Call call = GetParam();
  forEachSeed(kRounds * 7 * geometries().size(), nameOf(call),
              [call](uint64_t seed, Random& random) {
                ScenarioOptions options;
                options.first = call;
                return runSeed(seed, random, options, 2 + static_cast<int>(seed % 7));
              });
}

INSTANTIATE_TEST_SUITE_P(All, CollectiveSeeds,
                         testing::Values(Call::allReduce, Call::allGather, Call::reduceScatter,
                                         Call::broadcast, Call::reduce, Call::send, Call::allToAll,
                                         Call::gather, Call::scatter),
                         [](const auto& tested) { return nameOf(tested.param); });

// With CollNet, every type and operator.
TEST(Seeds, NetworkReduces) {
  forEachSeed(600, "network", [](uint64_t seed, Random& random) {
    static constexpr const char* kGeometries[] = {"CollNet chain", "CollNet chains on links",
                                                  "CollNet direct", "CollNet direct on links"};
    static constexpr Call kCalls[] = {Call::allReduce, Call::allGather, Call::reduceScatter};
    World& world = worldOf(geometryOf(kGeometries[seed % 4]), 4 + static_cast<int>(seed % 5));
    world.reset(random);
    setSchedule(seed);
    ScenarioOptions options;
    options.mostBytes = 1024;
    options.first = kCalls[seed / 4 % 3];
    Scenario scenario(world, memories(), random, options);
    return describe(world, scenario, scenario.run());
  });
}

TEST(Seeds, OneRankAlone) {
  forEachSeed(200, "alone", [](uint64_t seed, Random& random) {
    ScenarioOptions options;
    options.first = static_cast<Call>(seed % 5);
    return runSeed(seed, random, options, 1);
  });
}

// More calls than one launch holds, in groups that follow each other closely.
TEST(Seeds, LargeGroups) {
  forEachSeed(60, "large groups", [](uint64_t seed, Random& random) {
    ScenarioOptions options;
    options.first = seed % 2 == 0 ? Call::send : Call::allReduce;
    options.mostBytes = 1024;
    options.mostCalls = 90;
    return runSeed(seed, random, options, 2 + static_cast<int>(seed % 7));
  });
}

// Slots are in the receiver's memory, in the sender's where receivers read, and, along with the
// counters, in that of an intermediate rank where neither reaches the other.
TEST(Links, MemoryLiesWhereTheLinkSays) {
  constexpr int kRanks = 5;
  World& world = worldOf(geometryOf("links"), kRanks);
  const auto deviceOf = [](const void* address) { return testRuntime().inspect(address).device; };
  int read = 0, through = 0;
  for (int rank = 0; rank < kRanks; rank++) {
    const device::DeviceCommunicator& tables = world.tables(rank);
    const auto check = [&](const device::Fifo& send, int peer) {
      const transport::PeerLink link = world.link(rank, peer);
      read += link.read;
      through += link.through >= 0;
      EXPECT_EQ(deviceOf(send.slots), link.through >= 0 ? link.through : link.read ? rank : peer);
      EXPECT_EQ(deviceOf(send.head), link.through >= 0 ? link.through : rank);
      EXPECT_EQ(deviceOf(send.tail), link.through >= 0 ? link.through : peer);
    };
    for (int channel = 0; channel < world.geometry().channels; channel++) {
      const device::Channel& made = tables.channels[channel];
      const device::Connection& next = made.connections[made.ring.next];
      EXPECT_EQ(next.peer, made.ring.order[1]);
      for (const device::Fifo& fifo : next.send) check(fifo, next.peer);
    }
    for (int peer = 0; peer < kRanks; peer++) {
      for (int channel = 0; channel < world.geometry().peerChannels; channel++) {
        const device::Fifo& send = tables.send[peer * world.geometry().peerChannels + channel];
        if (send.slots != nullptr) check(send, peer);
      }
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(through, 0);
}

// Else the seeds of this geometry would say nothing of NVLS.
TEST(Seeds, NvlsCarriesWhatItCan) {
  for (const int ranks : {2, 3, 4, 8}) {
    const plan::CommConfig& config = worldOf(geometryOf("NVLS"), ranks).shape(0);
    for (const Call call : {Call::allReduce, Call::allGather, Call::reduceScatter}) {
      for (const auto type : {device::DataType::float32, device::DataType::int8}) {
        const plan::Task task{call, nullptr, nullptr, 100, {type, device::Reduction::sum, false, 0},
                              0};
        const plan::Needs needs = plan::makePlan(config, {task}).needs;
        const bool carries = call == Call::allGather || type == device::DataType::float32;
        EXPECT_EQ(needs.multicast, carries) << ranks << " ranks, " << nameOf(call);
        EXPECT_EQ(needs.rings, !carries);
      }
    }
  }
}

TEST(Seeds, NvlsTreeCarriesAllReduceBetweenNodes) {
  for (const int ranks : {3, 4, 8}) {
    const plan::CommConfig& config = worldOf(geometryOf("NVLS tree"), ranks).shape(0);
    const plan::Task task{Call::allReduce,
                          nullptr,
                          nullptr,
                          100,
                          {device::DataType::bfloat16, device::Reduction::sum, false, 0},
                          0};
    EXPECT_EQ(plan::choiceOf(config, task).algorithm, device::Algorithm::nvlsTree) << ranks;
  }
}

TEST(Seeds, CollNetDirectCarriesWhatItCan) {
  for (const int ranks : {4, 5, 6, 8}) {
    const plan::CommConfig& config = worldOf(geometryOf("CollNet direct"), ranks).shape(0);
    for (const Call call : {Call::allReduce, Call::allGather, Call::reduceScatter}) {
      const plan::Task task{
          call, nullptr, nullptr, 100, {device::DataType::int8, device::Reduction::prod, false, 0},
          0};
      const bool carries = call == Call::allReduce || ranks % 2 == 0;
      EXPECT_EQ(plan::makePlan(config, {task}).needs.collnetDirect, carries)
          << ranks << " ranks, " << nameOf(call);
    }
  }
}

TEST(Seeds, ASeedReplaysExactly) {
  if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
  forEachSeed(32, "replay", [](uint64_t seed, Random& random) {
    const ScenarioOptions options;
    Random again = random;
    std::string wrong = runSeed(seed, random, options, 5);
    const uint64_t hash = testRuntime().scheduleHash();
    // Whatever ran in between.
    Random other = randomOf(seed, "in between");
    wrong += runSeed(seed + 1000, other, options, 5);
    wrong += runSeed(seed, again, options, 5);
    if (testRuntime().scheduleHash() != hash) wrong += "the schedule differs";
    return wrong;
  });
}

}  // namespace
}  // namespace unisono::protocol
