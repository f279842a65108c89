// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "runtime_host_testing.h"

namespace unisono::runtime::host {
namespace {

// Both executors must behave the same.
class HostStreamTest : public testing::TestWithParam<const char*> {
 protected:
  HostRuntime runtime{hostSettings(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Executors, HostStreamTest, testing::Values("fibers", "threads"),
                         [](const auto& test) { return std::string(test.param); });

struct AppendArguments {
  int* next;
  int* log;
  int value;
};
void append(const void* raw, const HostGroupContext&) {
  const auto& arguments = *static_cast<const AppendArguments*>(raw);
  for (int i = 0; i < 3; i++) poll({.what = "delay"});
  progress();
  arguments.log[(*arguments.next)++] = arguments.value;
}

TEST_P(HostStreamTest, RunsWorkInOrder) {
  auto stream = runtime.createStream(0);
  int next = 0;
  int log[100] = {};
  for (int i = 0; i < 100; i++) {
    launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, i});
  }
  runtime.synchronize(stream.get());
  ASSERT_EQ(next, 100);
  for (int i = 0; i < 100; i++) EXPECT_EQ(log[i], i);
}

TEST_P(HostStreamTest, GraphsRunWhatWasCapturedAsOftenAsTheyAreLaunched) {
  auto stream = runtime.createStream(0), other = runtime.createStream(1);
  auto memory = runtime.allocate(0, 64);
  auto event = runtime.createEvent(0);
  std::vector<std::byte> back(64);
  int next = 0;
  int log[8] = {};
  runtime.beginCapture(stream.get());
  EXPECT_EQ(runtime.captureState(stream.get()), CaptureState::active);
  EXPECT_THROW(runtime.beginCapture(stream.get()), Error);
  EXPECT_THROW(runtime.synchronize(stream.get()), Error);
  EXPECT_THROW(runtime.query(stream.get()), Error);
  EXPECT_THROW(event->record(stream.get()), Error);
  for (int i = 0; i < 2; i++) {
    event->makeGraphWait(stream.get());
    launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, i});
    runtime.fillAsync(memory->address(), std::byte{7}, memory->bytes(), stream.get());
    runtime.copyAsync(back.data(), memory->address(), back.size(), stream.get());
    event->recordInGraph(stream.get());
  }
  const auto graph = runtime.endCapture(stream.get());
  EXPECT_THROW(runtime.endCapture(stream.get()), Error);
  EXPECT_EQ(runtime.captureState(stream.get()), CaptureState::none);
  runtime.synchronize(stream.get());
  EXPECT_EQ(next, 0) << "capturing runs nothing";
  EXPECT_TRUE(event->isReached());

  // The event keeps what different streams run in order.
  runtime.launchGraph(*graph, stream.get());
  runtime.launchGraph(*graph, other.get());
  event->makeWait(stream.get());
  launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, 9});
  runtime.synchronize(stream.get());
  runtime.synchronize(other.get());
  EXPECT_EQ(std::vector<int>(log, log + next), (std::vector<int>{0, 1, 0, 1, 9}));
  EXPECT_TRUE(event->isReached());
  for (std::byte value : back) ASSERT_EQ(value, std::byte{7});
}

TEST_P(HostStreamTest, CopiesAndFillsKeepOrderWithLaunches) {
  auto memory = runtime.allocate(0, 1 << 16);
  std::vector<std::byte> back(1 << 16);
  runtime.fillAsync(memory->address(), std::byte{7}, memory->bytes(), nullptr);
  runtime.copyAsync(back.data(), memory->address(), back.size(), nullptr);
  runtime.fillAsync(memory->address(), std::byte{9}, memory->bytes(), nullptr);
  runtime.synchronize(nullptr);
  for (std::byte value : back) ASSERT_EQ(value, std::byte{7});
  EXPECT_EQ(*static_cast<std::byte*>(memory->address()), std::byte{9});
}

struct FlagArguments {
  uint32_t* mine;
  uint32_t* theirs;
};
// Tells the peer and waits for it: ends only if both run at the same time.
void meet(const void* raw, const HostGroupContext&) {
  const auto& arguments = *static_cast<const FlagArguments*>(raw);
  std::atomic_ref<uint32_t>(*arguments.theirs).store(1, std::memory_order_release);
  while (std::atomic_ref<uint32_t>(*arguments.mine).load(std::memory_order_acquire) == 0) {
    poll({.what = "flag"});
  }
  progress();
}

TEST_P(HostStreamTest, StreamsOfDifferentDevicesRunTogether) {
  auto memory = runtime.allocate(0, 64);
  auto* flags = static_cast<uint32_t*>(memory->address());
  auto first = runtime.createStream(0);
  auto second = runtime.createStream(1);
  launch(runtime, first.get(), "meet", meet, FlagArguments{flags, flags + 1});
  launch(runtime, second.get(), "meet", meet, FlagArguments{flags + 1, flags});
  runtime.synchronize(first.get());
  runtime.synchronize(second.get());
  EXPECT_EQ(flags[0], 1u);
  EXPECT_EQ(flags[1], 1u);
}

TEST_P(HostStreamTest, ManyStreams) {
  constexpr int kStreams = 64;
  auto memory = runtime.allocate(0, (kStreams + 1) * sizeof(uint32_t));
  auto* flags = static_cast<uint32_t*>(memory->address());
  std::vector<std::shared_ptr<void>> streams;
  // A ring: each waits for the one before, and the first was told last.
  for (int i = 0; i < kStreams; i++) {
    streams.push_back(runtime.createStream(i % 8));
    launch(runtime, streams.back().get(), "meet", meet,
           FlagArguments{flags + i, flags + (i + 1) % kStreams});
  }
  for (auto& stream : streams) runtime.synchronize(stream.get());
  for (int i = 0; i < kStreams; i++) EXPECT_EQ(flags[i], 1u);
}

void waitForFlag(const void* raw, const HostGroupContext&) {
  const auto& arguments = *static_cast<const FlagArguments*>(raw);
  while (std::atomic_ref<uint32_t>(*arguments.mine).load(std::memory_order_acquire) == 0) {
    poll({.what = "flag"});
  }
  progress();
}

TEST_P(HostStreamTest, EventsOrderStreams) {
  auto memory = runtime.allocate(0, 64);
  auto* flag = static_cast<uint32_t*>(memory->address());
  auto first = runtime.createStream(0);
  auto second = runtime.createStream(1);
  auto event = runtime.createEvent(0);
  event->makeWait(second.get());  // never recorded: nothing to wait for
  std::vector<uint32_t> source{5}, seen{0};
  launch(runtime, first.get(), "wait", waitForFlag, FlagArguments{flag, nullptr});
  runtime.copyAsync(flag + 1, source.data(), sizeof(uint32_t), first.get());
  event->record(first.get());
  event->makeWait(second.get());
  runtime.copyAsync(seen.data(), flag + 1, sizeof(uint32_t), second.get());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE(runtime.query(second.get()));
  std::atomic_ref<uint32_t>(*flag).store(1, std::memory_order_release);
  runtime.synchronize(second.get());
  EXPECT_EQ(seen[0], 5u);
  EXPECT_TRUE(runtime.query(second.get()));
  runtime.synchronize(first.get());
  EXPECT_TRUE(runtime.query(first.get()));
}

struct GroupArguments {
  int* seen;  // [block][group]
};
// The groups of a block add up in shared storage; each waits until all have.
void shareBlock(const void* raw, const HostGroupContext& context) {
  const auto& arguments = *static_cast<const GroupArguments*>(raw);
  std::atomic_ref<uint32_t> sum(*static_cast<uint32_t*>(context.blockShared));
  sum.fetch_add(1, std::memory_order_acq_rel);
  while (sum.load(std::memory_order_acquire) < static_cast<uint32_t>(context.groups)) {
    poll({.what = "block"});
  }
  progress();
  arguments.seen[context.block * context.groups + context.group] = static_cast<int>(sum.load());
}

TEST_P(HostStreamTest, GroupsOfABlockShareZeroedStorage) {
  int seen[4 * 3] = {};
  for (int repeat = 0; repeat < 3; repeat++) {
    launch(runtime, nullptr, "share", shareBlock, GroupArguments{seen}, 4, 3, 100);
    runtime.synchronize(nullptr);
    for (int value : seen) EXPECT_EQ(value, 3);
    std::memset(seen, 0, sizeof(seen));
  }
}

void failing(const void*, const HostGroupContext& context) {
  if (context.group == 1) throw invalidUsage("group {} has had enough", context.group);
}
void failingStrangely(const void*, const HostGroupContext&) {
  throw 42;
}

TEST_P(HostStreamTest, AnExceptionIsReportedOnceAndTheStreamGoesOn) {
  auto stream = runtime.createStream(2);
  launch(runtime, stream.get(), "failing", failing, 0, 1, 2);
  int next = 0;
  int log[2] = {};
  launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, 3});
  try {
    runtime.synchronize(stream.get());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    EXPECT_STREQ(error.what(), "group 1 has had enough");
  }
  EXPECT_EQ(next, 1);
  EXPECT_NO_THROW(runtime.synchronize(stream.get()));
  launch(runtime, stream.get(), "failing", failingStrangely, 0);
  EXPECT_THROW(runtime.synchronize(stream.get()), Error);
  launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, 4});
  EXPECT_NO_THROW(runtime.synchronize(stream.get()));
  EXPECT_EQ(log[1], 4);
}

void synchronizing(const void* raw, const HostGroupContext&) {
  (*static_cast<HostRuntime* const*>(raw))->synchronize(nullptr);
}

TEST_P(HostStreamTest, DeviceCodeCannotSynchronize) {
  launch(runtime, nullptr, "synchronizing", synchronizing, &runtime);
  EXPECT_THROW(runtime.synchronize(nullptr), Error);
}

TEST_P(HostStreamTest, WrongStreamsAndShapesAreRefused) {
  int notAStream = 0;
  EXPECT_THROW(runtime.synchronize(&notAStream), Error);
  EXPECT_THROW(runtime.makeCurrent(8), Error);
  EXPECT_THROW(runtime.createStream(-1), Error);
  EXPECT_THROW(runtime.launch({"none", nullptr, nullptr}, {}, nullptr, nullptr), Error);
  EXPECT_THROW(launch(runtime, nullptr, "failing", failing, 0, 0, 1), Error);
  EXPECT_THROW(runtime.copyAsync(nullptr, &notAStream, 4, nullptr), Error);
}

TEST_P(HostStreamTest, ADroppedStreamFinishesItsWork) {
  int next = 0;
  int log[8] = {};
  auto stream = runtime.createStream(3);
  for (int i = 0; i < 8; i++) {
    launch(runtime, stream.get(), "append", append, AppendArguments{&next, log, i});
  }
  auto event = runtime.createEvent(3);
  event->record(stream.get());
  stream.reset();
  event->makeWait(nullptr);
  runtime.synchronize(nullptr);
  EXPECT_EQ(next, 8);
}

TEST_P(HostStreamTest, ThreadsEnqueueAtTheSameTime) {
  constexpr int kThreads = 4;
  constexpr int kLaunches = 50;
  std::atomic<int> runs{0};
  auto count = [](const void* raw, const HostGroupContext&) {
    (*static_cast<std::atomic<int>* const*>(raw))->fetch_add(1);
  };
  auto shared = runtime.createStream(0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&, t] {
      runtime.makeCurrent(t);
      auto own = runtime.createStream(t);
      for (int i = 0; i < kLaunches; i++) {
        launch(runtime, shared.get(), "count", +count, &runs);
        launch(runtime, own.get(), "count", +count, &runs);
        if (i % 10 == 0) runtime.synchronize(own.get());
      }
      runtime.synchronizeDevice(t);
      runtime.synchronize(shared.get());
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(runs.load(), 2 * kThreads * kLaunches);
}

void tick(const void* raw, const HostGroupContext& context) {
  advanceVirtualClock(*static_cast<const uint64_t*>(raw) *
                      static_cast<uint64_t>(context.block + 1));
}

TEST_P(HostStreamTest, VirtualClockFollowsTheLongestGroupAndEvents) {
  auto first = runtime.createStream(0);
  auto second = runtime.createStream(1);
  auto event = runtime.createEvent(0);
  launch(runtime, first.get(), "tick", tick, uint64_t{100}, 3);
  launch(runtime, first.get(), "tick", tick, uint64_t{50}, 2);
  event->record(first.get());
  event->makeWait(second.get());
  launch(runtime, second.get(), "tick", tick, uint64_t{7}, 1);
  runtime.synchronize(first.get());
  runtime.synchronize(second.get());
  EXPECT_EQ(runtime.virtualNanoseconds(0), 400u);
  EXPECT_EQ(runtime.virtualNanoseconds(1), 407u);
}

TEST(HostScheduleTest, WorksInAThreadThatIsNoTask) {
  uint64_t start = virtualClock();
  poll({.what = "nothing"});
  progress();
  schedulePoint();
  advanceVirtualClock(5);
  raiseVirtualClock(start + 3);
  EXPECT_EQ(virtualClock(), start + 5);
}

}  // namespace
}  // namespace unisono::runtime::host
