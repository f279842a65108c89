// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <regex>

#include "seeds.h"

// Ranks that wait for data that never arrives: an abort ends every wait, wherever it finds
// the ranks, and without one the wait is reported with who waits for whom.
namespace unisono::protocol {
namespace {

using device::DataType;
using device::Reduction;
using plan::Call;
using plan::Task;

constexpr int kRanks = 4;
constexpr uint64_t kCount = 6000;

// Any call, with buffers that are large enough.
Task taskOf(Call call, int rank, int peer, uint64_t count = kCount) {
  RankMemory& memory = memories()[static_cast<size_t>(rank)];
  return {call, memory.at(0), memory.at(1 << 20), count, {DataType::int8, Reduction::sum, false, 0},
          peer, true};
}

class Stuck : public testing::Test {
 protected:
  void SetUp() override {
    if (!runsFibers()) GTEST_SKIP() << "threads take seconds to see that nothing moves";
  }
  ~Stuck() override { discardWorlds(); }

  World& world(const Geometry& geometry, int ranks = kRanks) {
    World& made = worldOf(geometry, ranks);
    setSchedule(0);
    return made;
  }

  // Every rank but `missing` makes `call`; returns what the ranks report.
  static std::vector<std::string> runWithout(World& world, int missing, Call call, int root = 0) {
    for (int rank = 0; rank < world.ranks(); rank++) {
      if (rank != missing) world.enqueue(rank, {taskOf(call, rank, root)});
    }
    return world.synchronize();
  }
};

const Geometry& mixed() {
  return geometries()[1];
}

TEST_F(Stuck, AMissingRankIsNamed) {
  for (Call call : {Call::allReduce, Call::allGather, Call::reduceScatter}) {
    SCOPED_TRACE(nameOf(call));
    const auto errors = runWithout(world(mixed()), 2, call);
    EXPECT_EQ(errors[2], "");
    // In the first ring rank 3 hears from rank 2, and nobody can go on without it.
    EXPECT_NE(errors[3].find("rank 3 waits for rank 2 (data, channel 0"), std::string::npos)
        << errors[3];
    discardWorlds();
  }
}

// The second call waits for one step more than the first call has brought.
TEST_F(Stuck, TheReportSaysHowFarThePeerGot) {
  World& tested = world(mixed());
  for (int rank = 0; rank < kRanks; rank++) {
    tested.enqueue(rank, {taskOf(Call::allGather, rank, 0)});
  }
  for (const std::string& error : tested.synchronize()) ASSERT_EQ(error, "");
  const auto errors = runWithout(tested, 2, Call::allGather);
  const std::regex report("rank 3 waits for rank 2 \\(data, channel 0, wanted (\\d+), seen (\\d+)");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(errors[3], match, report)) << errors[3];
  EXPECT_GT(std::stoi(match[2]), 0) << errors[3];
  EXPECT_EQ(std::stoi(match[1]), std::stoi(match[2]) + 1) << errors[3];
}

TEST_F(Stuck, AMissingRankOfADirectCallIsReported) {
  World& tested = world(mixed());
  for (int rank = 0; rank < kRanks; rank++) {
    if (rank != 1) tested.enqueue(rank, {taskOf(Call::allReduce, rank, 0, 100)});
  }
  const auto errors = tested.synchronize();
  EXPECT_EQ(errors[1], "");
  EXPECT_NE(errors[0].find("rank 0 waits (lines of its peers"), std::string::npos) << errors[0];
}

// One sender, one receiver: each is named.
TEST_F(Stuck, AMissingEndOfADirectMessageIsNamed) {
  World& receiver = world(mixed());
  receiver.enqueue(0, {taskOf(Call::receive, 0, 3, 100)});
  const auto errors = receiver.synchronize();
  EXPECT_NE(errors[0].find("rank 0 waits for rank 3 (lines of its peers"), std::string::npos)
      << errors[0];
  discardWorlds();

  World& sender = world(mixed());
  for (int call = 0; call < 100; call++) sender.enqueue(3, {taskOf(Call::send, 3, 1, 2000)});
  const auto full = sender.synchronize();
  EXPECT_NE(full[3].find("rank 3 waits for rank 1 (room in the window"), std::string::npos)
      << full[3];
}

TEST_F(Stuck, AMissingSendIsNamed) {
  World& tested = world(mixed());
  tested.enqueue(0, {taskOf(Call::receive, 0, 3)});
  const auto errors = tested.synchronize();
  EXPECT_NE(errors[0].find("rank 0 waits for rank 3 (data, channel"), std::string::npos)
      << errors[0];
}

TEST_F(Stuck, AMissingReceiveIsNamed) {
  World& tested = world(mixed());
  tested.enqueue(3, {taskOf(Call::send, 3, 1)});
  const auto errors = tested.synchronize();
  EXPECT_NE(errors[3].find("rank 3 waits for rank 1 (an offer, channel"), std::string::npos)
      << errors[3];
  discardWorlds();

  World& apart = world(geometries()[3]);
  apart.enqueue(3, {taskOf(Call::send, 3, 1, 100000)});
  const auto full = apart.synchronize();
  EXPECT_NE(full[3].find("rank 3 waits for rank 1 (a free slot, channel"), std::string::npos)
      << full[3];
}

TEST_F(Stuck, TwoThatWaitForEachOtherAreACycle) {
  World& tested = world(mixed());
  tested.enqueue(0, {taskOf(Call::receive, 0, 1)});
  tested.enqueue(0, {taskOf(Call::send, 0, 1)});
  tested.enqueue(1, {taskOf(Call::receive, 1, 0)});
  tested.enqueue(1, {taskOf(Call::send, 1, 0)});
  const auto errors = tested.synchronize();
  EXPECT_NE(errors[0].find("cycle of ranks 0 -> 1 -> 0"), std::string::npos) << errors[0];
}

TEST_F(Stuck, ARankThatCallsSomethingElseIsNamed) {
  World& tested = world(mixed());
  for (int rank = 0; rank < kRanks; rank++) {
    tested.enqueue(rank,
                   {rank == 1 ? taskOf(Call::receive, rank, 0) : taskOf(Call::allGather, rank, 0)});
  }
  const auto errors = tested.synchronize();
  EXPECT_NE(errors[1].find("rank 1 waits for rank 0 (data, channel"), std::string::npos)
      << errors[1];
  EXPECT_NE(errors[1].find("rank 2 waits for rank 1 (data, channel"), std::string::npos)
      << errors[1];
}

// Whoever is aborted before it has begun passes nothing on: its peers must not take an empty slot
// for data.
TEST_F(Stuck, AnAbortedRankPublishesNothing) {
  for (Call call : {Call::allReduce, Call::allGather, Call::reduceScatter, Call::broadcast,
                    Call::reduce, Call::allToAll}) {
    SCOPED_TRACE(nameOf(call));
    World& tested = world(mixed());
    tested.raiseAbort(1);
    for (int rank = 0; rank < kRanks; rank++) {
      const int root = call == Call::broadcast ? 1 : 2;
      tested.enqueue(rank, {taskOf(call, rank, root)});
    }
    const auto errors = tested.synchronize();
    EXPECT_EQ(errors[1], "");
    EXPECT_NE(errors[2].find("waits"), std::string::npos) << "rank 2 took what was never sent";
    discardWorlds();
  }
}

// An abort of all ranks at some moment of a random group, in any order: every stream ends, and no
// store is outside of the outputs.
TEST_F(Stuck, AnAbortAtAnyMomentEndsEverything) {
  forEachSeed(600, "abort", [](uint64_t seed, Random& random) {
    discardWorlds();
    World& tested =
        worldOf(geometries()[seed % geometries().size()], 2 + static_cast<int>(seed % 7));
    tested.reset(random);
    setSchedule(seed);
    ScenarioOptions options;
    options.first = static_cast<Call>(seed % 5);
    options.mostGroups = 2;
    Scenario scenario(tested, memories(), random, options);
    std::vector<std::shared_ptr<void>> streams;
    for (int rank = 0; rank < tested.ranks(); rank++) {
      streams.push_back(testRuntime().createStream(rank));
      tested.enqueueAbort(rank, below(random, 4000), streams.back().get());
    }
    scenario.enqueue();
    std::string wrong;
    for (const std::string& error : tested.synchronize()) wrong += error;
    for (const auto& stream : streams) testRuntime().synchronize(stream.get());
    return wrong + scenario.compareGuards();
  });
}

// The receiver of a message that the sender may write straight into its buffer is aborted at some
// moment. Once its stream has ended, the buffer is the user's again: whatever the sender does, it
// must not write there any more.
TEST(Offers, AreWithdrawnByAnAbort) {
  int untouched = 0, complete = 0;
  forEachSeed(200, "withdrawn offers", [&](uint64_t seed, Random& random) -> std::string {
    discardWorlds();
    constexpr int kReceiver = 0, kSender = 1;
    World& tested = worldOf(geometryOf("usual"), 2);
    tested.reset(random);
    setSchedule(seed);
    const uint64_t bytes = 4096 + below(random, kCount - 4096);  // one part, offered
    RankMemory& memory = memories()[kReceiver];
    auto* input = static_cast<std::byte*>(memories()[kSender].at(0));
    auto* output = static_cast<std::byte*>(memory.at(1 << 20));
    std::fill_n(input, bytes, std::byte{1});
    std::fill_n(output, bytes, std::byte{2});

    const auto streams =
        std::array{testRuntime().createStream(kReceiver), testRuntime().createStream(kSender)};
    tested.enqueueAbort(kReceiver, below(random, 600), streams[0].get());
    tested.enqueue(kReceiver, {taskOf(Call::receive, kReceiver, kSender, bytes)});
    tested.enqueueDelay(kSender, below(random, 600));
    tested.enqueue(kSender, {taskOf(Call::send, kSender, kReceiver, bytes)});
    testRuntime().synchronize(tested.stream(kReceiver));
    const auto arrived = static_cast<uint64_t>(std::count(output, output + bytes, std::byte{1}));
    std::fill_n(output, bytes, std::byte{3});

    tested.enqueueAbort(kSender, below(random, 600), streams[1].get());
    std::string wrong;
    for (const std::string& error : tested.synchronize()) wrong += error;
    for (const auto& stream : streams) testRuntime().synchronize(stream.get());
    untouched += arrived == 0 ? 1 : 0;
    complete += arrived == bytes ? 1 : 0;
    if (arrived != 0 && arrived != bytes) {
      wrong += " " + std::to_string(arrived) + " of " + std::to_string(bytes) +
               " bytes had arrived when the receiver's kernel ended";
    }
    if (static_cast<uint64_t>(std::count(output, output + bytes, std::byte{3})) != bytes) {
      wrong += " the sender wrote after the receiver's kernel had ended";
    }
    return wrong;
  });
  if (runsFibers() && std::getenv("UNISONO_TEST_SEED") == nullptr) {
    EXPECT_GT(untouched, 0) << "no abort came before the sender";
    EXPECT_GT(complete, 0) << "no abort came after the sender";
  }
  discardWorlds();
}

}  // namespace
}  // namespace unisono::protocol
