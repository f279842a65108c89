// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <set>
#include <thread>

#include "base/error.h"
#include "runtime/host/sanitizer.h"
#include "runtime_host_testing.h"

namespace unisono::runtime::host {
namespace {

struct RingArguments {
  uint64_t* mine;  // a counter that the rank before raises
  uint64_t* next;
  int rank;
  int ranks;
  uint64_t steps;
};

// A token goes around; rank 0 starts it.
void ring(const void* raw, const HostGroupContext& context) {
  const auto& arguments = *static_cast<const RingArguments*>(raw);
  std::atomic_ref<uint64_t> mine(arguments.mine[context.block]);
  std::atomic_ref<uint64_t> next(arguments.next[context.block]);
  for (uint64_t step = 1; step <= arguments.steps; step++) {
    if (arguments.rank == 0) next.store(step, std::memory_order_release);
    schedulePoint();
    while (mine.load(std::memory_order_acquire) < step) {
      poll({.what = "token",
            .rank = arguments.rank,
            .peer = (arguments.rank + arguments.ranks - 1) % arguments.ranks,
            .channel = context.block,
            .wanted = step,
            .seen = mine.load(std::memory_order_relaxed)});
    }
    progress();
    if (arguments.rank != 0) next.store(step, std::memory_order_release);
    schedulePoint();
  }
}

class HostScheduleTest : public testing::Test {
 protected:
  static constexpr int kRanks = 8;
  static constexpr int kBlocks = 2;

  explicit HostScheduleTest(int64_t seed = -1) : runtime(hostSettings("fibers", seed)) {
    for (int rank = 0; rank < kRanks; rank++) {
      streams.push_back(runtime.createStream(rank));
      memory.push_back(runtime.allocate(rank, kBlocks * 8));
    }
  }

  uint64_t* counters(int rank) {
    return static_cast<uint64_t*>(memory[static_cast<size_t>(rank % kRanks)]->address());
  }
  void enqueueRing(uint64_t steps, int leaveOut = -1) {
    for (int rank = 0; rank < kRanks; rank++) {
      std::fill_n(counters(rank), kBlocks, 0);
    }
    for (int rank = 0; rank < kRanks; rank++) {
      if (rank == leaveOut) continue;
      launch(runtime, streams[static_cast<size_t>(rank)].get(), "ring", ring,
             RingArguments{counters(rank), counters(rank + 1), rank, kRanks, steps}, kBlocks);
    }
  }
  void synchronizeAll() {
    for (auto& stream : streams) runtime.synchronize(stream.get());
  }

  HostRuntime runtime;
  std::vector<std::shared_ptr<void>> streams;
  std::vector<std::shared_ptr<DeviceMemory>> memory;
};

class SeededScheduleTest : public HostScheduleTest {
 protected:
  SeededScheduleTest() : HostScheduleTest(1) {}

  uint64_t hashOf(int64_t seed) {
    runtime.setScheduleSeed(seed);
    enqueueRing(20);
    synchronizeAll();
    return runtime.scheduleHash();
  }
};

TEST_F(SeededScheduleTest, ASeedReplays) {
  constexpr int64_t kHashedSeeds = sanitizer::kThread ? 10 : 50;
  std::set<uint64_t> hashes;
  for (int64_t seed = 0; seed < kHashedSeeds; seed++) {
    uint64_t first = hashOf(seed);
    EXPECT_EQ(first, hashOf(seed)) << "seed " << seed;
    hashes.insert(first);
  }
  EXPECT_EQ(hashes.size(), static_cast<size_t>(kHashedSeeds));
}

TEST_F(SeededScheduleTest, AThousandSeedsAreFast) {
  // ThreadSanitizer takes about a millisecond to make a fiber.
  constexpr int64_t kSeeds = sanitizer::kThread ? 50 : 1000;
  // Processor time: how busy the machine is says nothing about the schedule.
  const std::clock_t start = std::clock();
  for (int64_t seed = 0; seed < kSeeds; seed++) hashOf(seed);
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 30);
}

TEST_F(SeededScheduleTest, NothingRunsBeforeAThreadWaits) {
  enqueueRing(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(*counters(1), 0u);
  synchronizeAll();
  EXPECT_EQ(*counters(1), 1u);
}

TEST_F(SeededScheduleTest, QueryingMakesProgressAndReplays) {
  uint64_t hashes[2];
  int queries[2] = {};
  for (int run = 0; run < 2; run++) {
    runtime.setScheduleSeed(5);
    enqueueRing(200);
    for (auto& stream : streams) {
      do queries[run]++;
      while (!runtime.query(stream.get()));
    }
    synchronizeAll();
    hashes[run] = runtime.scheduleHash();
  }
  EXPECT_GT(queries[0], 8);
  EXPECT_EQ(queries[0], queries[1]);
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST_F(SeededScheduleTest, TheSeedCannotChangeWhileTasksLive) {
  enqueueRing(1);
  EXPECT_THROW(runtime.setScheduleSeed(2), Error);
  synchronizeAll();
  EXPECT_NO_THROW(runtime.setScheduleSeed(-1));
}

void expectDeadlockWithGraph(HostRuntime& runtime, Stream stream, const char* part) {
  try {
    runtime.synchronize(stream);
    FAIL() << "no deadlock was found";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internalError);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST_F(HostScheduleTest, ADeadlockIsFoundAtOnceAndNamesWhoWaitsForWhom) {
  runtime.setDeadlockIsError(true);
  for (int repeat = 0; repeat < 3; repeat++) {
    auto start = std::chrono::steady_clock::now();
    enqueueRing(10, /*leaveOut=*/3);
    expectDeadlockWithGraph(runtime, streams[4].get(),
                            "ring block 1 group 0 on device 4: rank 4 waits for rank 3 (token, "
                            "channel 1, wanted 1, seen 0)");
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    for (int rank = 0; rank < kRanks; rank++) {
      if (rank == 3 || rank == 4) continue;
      EXPECT_THROW(runtime.synchronize(streams[static_cast<size_t>(rank)].get()), Error);
    }
    EXPECT_NO_THROW(runtime.synchronize(streams[3].get()));
    // And everything works again.
    enqueueRing(10);
    EXPECT_NO_THROW(synchronizeAll());
  }
}

TEST_F(SeededScheduleTest, NoSeedFindsADeadlockWhereThereIsNone) {
  runtime.setDeadlockIsError(true);
  for (int64_t seed = 0; seed < (sanitizer::kThread ? 20 : 300); seed++) {
    EXPECT_NO_THROW(hashOf(seed)) << "seed " << seed;
  }
}

TEST_F(SeededScheduleTest, EverySeedFindsTheDeadlock) {
  runtime.setDeadlockIsError(true);
  for (int64_t seed = 0; seed < (sanitizer::kThread ? 10 : 100); seed++) {
    runtime.setScheduleSeed(seed);
    enqueueRing(3, /*leaveOut=*/0);
    EXPECT_THROW(runtime.synchronize(streams[1].get()), Error) << "seed " << seed;
    for (auto& stream : streams) {
      try {
        runtime.synchronize(stream.get());
      } catch (const Error&) {
      }
    }
  }
}

TEST_F(HostScheduleTest, WithoutTheSwitchAStuckProcessWaitsForItsHost) {
  enqueueRing(1, /*leaveOut=*/0);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(runtime.query(streams[1].get()));
  for (int block = 0; block < kBlocks; block++) {
    std::atomic_ref<uint64_t>(counters(1)[block]).store(1, std::memory_order_release);
  }
  synchronizeAll();
  EXPECT_EQ(*counters(0), 1u);
}

// A poll inside a handler: the exception in flight belongs to the fiber.
void pollInHandler(const void* raw, const HostGroupContext& context) {
  auto* seen = *static_cast<int* const*>(raw);
  try {
    throw context.block;
  } catch (int) {
    for (int i = 0; i < 5; i++) poll({.what = "handler"});
    try {
      throw;
    } catch (int value) {
      seen[context.block] = value;
    }
  }
  progress();
}

TEST_F(HostScheduleTest, ExceptionsBelongToTheirFiber) {
  int seen[16] = {};
  launch(runtime, streams[0].get(), "handler", pollInHandler, &seen[0], 16);
  runtime.synchronize(streams[0].get());
  for (int i = 0; i < 16; i++) EXPECT_EQ(seen[i], i);
}

TEST(ThreadScheduleTest, ADeadlockIsReportedAfterATime) {
  HostRuntime runtime(hostSettings("threads"));
  runtime.setDeadlockIsError(true);
  auto memory = runtime.allocate(0, 64);
  auto* counter = static_cast<uint64_t*>(memory->address());
  launch(runtime, nullptr, "ring", ring, RingArguments{counter, counter + 1, 1, 2, 1});
  expectDeadlockWithGraph(runtime, nullptr, "rank 1 waits for rank 0 (token");
}

// As on a machine that lets this thread wait for a core.
void raiseLate(const void* raw, const HostGroupContext&) {
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  std::atomic_ref<uint64_t>(**static_cast<uint64_t* const*>(raw)).store(1);
}

TEST(ThreadScheduleTest, ASlowTaskIsNoDeadlock) {
  HostRuntime runtime(hostSettings("threads"));
  runtime.setDeadlockIsError(true);
  auto memory = runtime.allocate(0, 64);
  auto* counter = static_cast<uint64_t*>(memory->address());
  auto stream = runtime.createStream(1);
  launch(runtime, stream.get(), "late", raiseLate, counter);
  launch(runtime, nullptr, "ring", ring, RingArguments{counter, counter + 1, 1, 2, 1});
  EXPECT_NO_THROW(runtime.synchronize(nullptr));
  runtime.synchronize(stream.get());
}

TEST(ThreadScheduleTest, HasNoSeed) {
  EXPECT_THROW(HostRuntime(hostSettings("threads", 3)), Error);
  HostRuntime runtime(hostSettings("threads"));
  EXPECT_THROW(runtime.setScheduleSeed(3), Error);
}

TEST(ThreadScheduleTest, UnknownExecutorsAreRefused) {
  EXPECT_THROW(HostRuntime(hostSettings("processes")), Error);
}

}  // namespace
}  // namespace unisono::runtime::host
