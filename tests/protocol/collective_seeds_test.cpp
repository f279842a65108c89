// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>

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

// Messages over LL up to 256 bytes, over LL128 below 2000, and through FIFOs.
constexpr Geometry kMessages{.name = "messages",
                             .channels = 2,
                             .slots = 4,
                             .slotBytes = 512,
                             .peerChannels = 8,
                             .minBytesPerChannel = 1024,
                             .minBytesPerPart = 1024,
                             .directBytes = 3000,
                             .directLineBits = 7,
                             .wide = {.blocks = 3, .slotLines = 2},
                             .wideOfferBytes = 2000};
// The same inside nodes; between them there are FIFOs only.
constexpr Geometry kMessagesOfNodes = [] {
  Geometry geometry = kMessages;
  geometry.name = "messages of nodes";
  geometry.network = true;
  geometry.ranksPerNode = 3;
  return geometry;
}();
World& messageWorldOf(uint64_t seed) {
  return worldOf(seed / 7 % 3 == 0 ? kMessagesOfNodes : kMessages, 2 + static_cast<int>(seed % 7));
}

TEST(Seeds, MessagesOfAllSizes) {
  forEachSeed(500, "all sizes", [](uint64_t seed, Random& random) {
    World& world = messageWorldOf(seed);
    world.reset(random);
    setSchedule(seed);
    ScenarioOptions options;
    options.first = seed % 4 == 0 ? Call::allToAll : Call::send;
    options.mostBytes = seed % 3 == 0 ? 1500 : 5000;
    options.mostCalls = 12;
    Scenario scenario(world, memories(), random, options);
    return describe(world, scenario, scenario.run());
  });
}

// More streams than a block has teams: each block of the FIFOs is two of the launch.
static_assert(2 * kMostRanks - 1 > device::kMaxTeams);
TEST(Seeds, MessagesOfManyPeers) {
  forEachSeed(30, "many peers", [](uint64_t seed, Random& random) {
    World& world = worldOf(kMessages, kMostRanks);
    world.reset(random);
    setSchedule(seed);
    ScenarioOptions options;
    options.first = Call::allToAll;
    options.mostBytes = 1999;
    options.mostCalls = 2;
    Scenario scenario(world, memories(), random, options);
    return describe(world, scenario, scenario.run());
  });
}

// What a rank sends and receives in one group its peers receive and send one by one, in any order
// of the two directions.
TEST(Seeds, MessagesOfAllSizesWaitForNoOrder) {
  forEachSeed(600, "any order", [](uint64_t seed, Random& random) {
    World& world = messageWorldOf(seed);
    world.reset(random);
    setSchedule(seed);
    const auto ranks = static_cast<size_t>(world.ranks());
    for (size_t rank = 0; rank < ranks; rank++) {
      memories()[rank].clear(static_cast<std::byte>(below(random, 256)));
    }
    // [rank][direction]: the calls of the group are those of rank 0.
    std::vector<std::array<std::deque<plan::Task>, 2>> single(ranks);
    std::vector<plan::Task> group;
    constexpr device::ReductionSpec kBytes{device::DataType::uint8, device::Reduction::sum, false,
                                           0};
    const uint64_t few = 1 + below(random, 12), many = 1 + below(random, 80);
    for (uint64_t i = below(random, 2) == 0 ? few : many; i > 0; i--) {
      static constexpr uint64_t kMost[] = {256, 2000, 2000, 6000};
      const uint64_t bytes = 1 + below(random, kMost[below(random, 4)]);
      const size_t peer = 1 + below(random, ranks - 1);
      const bool toPeer = below(random, 2) == 0;
      const size_t from = toPeer ? 0 : peer, to = toPeer ? peer : 0;
      RankMemory &source = memories()[from], &target = memories()[to];
      const size_t input = source.take(bytes, 1, random), output = target.take(bytes, 1, random);
      std::vector<std::byte> data(bytes);
      for (std::byte& byte : data) byte = static_cast<std::byte>(random());
      source.set(input, data.data(), bytes);
      std::memcpy(target.expected(output), data.data(), bytes);
      const plan::Task send{plan::Call::send, source.at(input),    nullptr, bytes,
                            kBytes,           static_cast<int>(to)};
      const plan::Task receive{plan::Call::receive,    nullptr, target.at(output), bytes, kBytes,
                               static_cast<int>(from), true};
      group.push_back(toPeer ? send : receive);
      single[peer][toPeer ? 1 : 0].push_back(toPeer ? receive : send);
    }
    world.enqueue(0, group);
    for (size_t rank = 1; rank < ranks; rank++) {
      auto& calls = single[rank];
      const size_t preferred = below(random, 2);
      const bool mixes = below(random, 2) == 0;
      while (!calls[0].empty() || !calls[1].empty()) {
        size_t direction = mixes ? below(random, 2) : preferred;
        if (calls[direction].empty()) direction = 1 - direction;
        world.enqueue(static_cast<int>(rank), {calls[direction].front()});
        calls[direction].pop_front();
      }
    }
    std::string wrong;
    const std::vector<std::string> errors = world.synchronize();
    for (size_t rank = 0; rank < ranks; rank++) {
      const std::string difference =
          errors[rank].empty() ? memories()[rank].compare() : errors[rank];
      if (!difference.empty()) wrong += " rank " + std::to_string(rank) + ": " + difference + ";";
    }
    return wrong;
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
