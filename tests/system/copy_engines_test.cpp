// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "child_processes.h"
#include "support/seed.h"

// All-gathers and all-to-alls of NCCL_CTA_POLICY_ZERO into symmetric windows.
namespace unisono::system_test {
namespace {

// Made before the library is used.
LaunchLog launchLog;

// Shares of less bytes use kernels.
constexpr size_t kLeastBytes = 256 << 10;
constexpr size_t kWindowBytes = kSanitized ? 2 << 20 : 3 << 20;

unsigned randomSeed() {
  return static_cast<unsigned>(test::seed());
}

struct Call {
  bool exchanges;  // an all-to-all, otherwise an all-gather
  size_t count;    // bytes of a share
  size_t offset;   // of the output in its window
  bool inPlace;
};

// One rank with a window in the middle of its memory, which is symmetric unless `flags` say so.
class WindowOwner {
 public:
  WindowOwner(const ncclUniqueId& id, int rank, int ranks, int policy = NCCL_CTA_POLICY_ZERO,
              int flags = NCCL_WIN_COLL_SYMMETRIC)
      : rank_(rank), ranks_(ranks), stream_(deviceOf(rank)) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = policy;
    check(ncclCommInitRankConfig(&comm_, ranks, id, rank, &config));
    // The place in the allocation differs by rank.
    start_ = static_cast<size_t>(rank + 1) * 4096;
    check(ncclMemAlloc(&memory_, start_ + kWindowBytes));
    window_ = static_cast<std::byte*>(memory_) + start_;
    check(ncclCommWindowRegister(comm_, window_, kWindowBytes, &handle_, flags));
    if (rank == 0) launchLog.take();
  }
  ~WindowOwner() {
    deregister();
    ncclCommDestroy(comm_);
    ncclMemFree(memory_);
  }
  void deregister() {
    if (handle_ != nullptr) check(ncclCommWindowDeregister(comm_, std::exchange(handle_, nullptr)));
  }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  void synchronize() const { stream_.synchronize(); }
  std::byte* window() const { return window_; }

  // What rank `from` sends to rank `to`, and to all of them in an all-gather.
  static std::vector<std::byte> share(const Call& call, unsigned seed, int from, int to) {
    std::mt19937 random(seed * 1000 + static_cast<unsigned>(100 * from) +
                        static_cast<unsigned>(call.exchanges ? to : 0));
    std::vector<uint32_t> words(call.count / sizeof(uint32_t) + 1);
    std::ranges::generate(words, std::ref(random));
    std::vector<std::byte> bytes(call.count);
    std::memcpy(bytes.data(), words.data(), call.count);
    return bytes;
  }

  // Fills the buffers; `run` may follow, any number of times.
  void prepare(const Call& call, unsigned seed) {
    const auto count = static_cast<ptrdiff_t>(call.count);
    std::vector<std::byte> input;
    for (int to = 0; to < (call.exchanges ? ranks_ : 1); to++) {
      const std::vector<std::byte> one = share(call, seed, rank_, to);
      input.insert(input.end(), one.begin(), one.end());
    }
    poison();
    output_ = window_ + call.offset;
    if (call.inPlace) {
      input_ = output_ + (call.exchanges ? 0 : rank_ * count);
    } else {
      if (buffer_.bytes() < input.size()) buffer_ = DeviceBuffer(deviceOf(rank_), input.size());
      input_ = buffer_.as();
    }
    device::copy(input_, input.data(), input.size());
  }
  void run(const Call& call) const {
    check(call.exchanges ? ncclAlltoAll(input_, output_, call.count, ncclUint8, comm_, stream_)
                         : ncclAllGather(input_, output_, call.count, ncclUint8, comm_, stream_));
  }
  void expect(const Call& call, unsigned seed) const {
    std::vector<std::byte> all(kWindowBytes);
    device::copy(all.data(), window_, kWindowBytes);
    const size_t end = call.offset + call.count * static_cast<size_t>(ranks_);
    const auto isPoison = [](std::byte byte) { return byte == kPoison; };
    ASSERT_TRUE(std::all_of(all.data(), all.data() + call.offset, isPoison)) << "before the output";
    ASSERT_TRUE(std::all_of(all.data() + end, all.data() + kWindowBytes, isPoison)) << "after it";
    for (int from = 0; from < ranks_; from++) {
      const std::vector<std::byte> expected = share(call, seed, from, rank_);
      const std::byte* got = all.data() + call.offset + static_cast<size_t>(from) * call.count;
      ASSERT_EQ(std::memcmp(got, expected.data(), call.count), 0) << "share of rank " << from;
    }
  }

 private:
  static constexpr std::byte kPoison{0xee};
  void poison() const {
    const std::vector<std::byte> poison(kWindowBytes, kPoison);
    device::copy(window_, poison.data(), kWindowBytes);
  }

  int rank_, ranks_;
  DeviceStream stream_;
  ncclComm_t comm_ = nullptr;
  void* memory_ = nullptr;
  size_t start_ = 0;
  std::byte *window_ = nullptr, *input_ = nullptr, *output_ = nullptr;
  ncclWindow_t handle_ = nullptr;
  DeviceBuffer buffer_;
};

// How many launches of copy engines the log has since the last call.
int copyLaunches() {
  const std::vector<std::string> lines = launchLog.take();
  return static_cast<int>(std::ranges::count_if(lines, [](const std::string& line) {
    return line.find("by copy engines") != std::string::npos;
  }));
}

std::vector<Call> callsOf(int ranks, unsigned seed) {
  std::mt19937 random(seed);
  const size_t most = kWindowBytes / static_cast<size_t>(ranks);
  std::vector<Call> calls;
  for (const bool exchanges : {false, true}) {
    for (const bool inPlace : {false, true}) {
      for (const size_t count :
           {kLeastBytes - 1, kLeastBytes, kLeastBytes + 1 + random() % 100'000, most - 16}) {
        const size_t room = kWindowBytes - count * static_cast<size_t>(ranks);
        calls.push_back({exchanges, count, random() % (room + 1), inPlace});
      }
    }
  }
  std::ranges::shuffle(calls, random);
  return calls;
}

void runAll(WindowOwner& owner, int rank, int ranks, unsigned seed) {
  for (const Call& call : callsOf(ranks, seed)) {
    SCOPED_TRACE((call.exchanges ? "all-to-all of " : "all-gather of ") +
                 std::to_string(call.count) + " bytes at " + std::to_string(call.offset) +
                 (call.inPlace ? ", in place" : ""));
    owner.prepare(call, seed);
    // Before the buffers of all are filled, others must not store into them.
    useOnce(owner.comm());
    if (rank == 0) copyLaunches();
    for (int i = 0; i < (call.inPlace && call.exchanges ? 1 : 3); i++) owner.run(call);
    owner.synchronize();
    if (rank == 0) {
      EXPECT_EQ(copyLaunches() > 0, call.count >= kLeastBytes);
    }
    owner.expect(call, seed);
    useOnce(owner.comm());  // the next call poisons
  }
}

class CopyEngines : public ::testing::TestWithParam<int> {};

TEST_P(CopyEngines, CarryLargeCallsInOneProcess) {
  const unsigned seed = randomSeed();
  const int ranks = GetParam();
  expectAllPass(runChildren(1, [&](int) {
    const ncclUniqueId id = newId();
    onThreads(ranks, [&](int rank) {
      WindowOwner owner(id, rank, ranks);
      runAll(owner, rank, ranks, seed);
    });
  }));
}

TEST_P(CopyEngines, CarryLargeCallsOfSeveralProcesses) {
  const unsigned seed = randomSeed();
  const int ranks = GetParam();
  const Pipe pipe;
  expectAllPass(runChildren(ranks, [&](int rank) {
    device::use(deviceOf(rank));
    WindowOwner owner(sharedId(pipe, rank, ranks), rank, ranks);
    runAll(owner, rank, ranks, seed);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CopyEngines, ::testing::Values(2, scaled(5, 3)));

// Other work of the group, and of the stream, before and after.
TEST(CopyEnginesInGroups, KeepTheOrderOfTheStream) {
  const unsigned seed = randomSeed();
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int rank) {
    device::use(deviceOf(rank));
    WindowOwner owner(sharedId(pipe, rank, 3), rank, 3);
    const Call gather{false, 270'001, 77, false};
    const DeviceBuffer sum(deviceOf(rank), 400'000 * sizeof(int)), small(deviceOf(rank), 64);
    std::vector<int> values(400'000, rank + 1);
    device::copy(sum.as(), values.data(), sum.bytes());
    owner.prepare(gather, seed);
    useOnce(owner.comm());
    check(ncclGroupStart());
    check(ncclAllReduce(sum.as(), sum.as(), values.size(), ncclInt, ncclSum, owner.comm(),
                        owner.stream()));
    owner.run(gather);
    check(ncclSend(small.as(), 64, ncclUint8, (rank + 1) % 3, owner.comm(), owner.stream()));
    check(ncclRecv(small.as(), 64, ncclUint8, (rank + 2) % 3, owner.comm(), owner.stream()));
    check(ncclGroupEnd());
    // Every rank gathers what the first all-gather gave it, into another place.
    check(ncclAllGather(owner.window() + gather.offset + static_cast<size_t>(rank) * gather.count,
                        owner.window() + (1 << 20), gather.count, ncclUint8, owner.comm(),
                        owner.stream()));
    owner.synchronize();
    std::vector<std::byte> first(3 * gather.count), second(3 * gather.count);
    device::copy(first.data(), owner.window() + gather.offset, first.size());
    device::copy(second.data(), owner.window() + (1 << 20), second.size());
    EXPECT_EQ(first, second);
    for (int from = 0; from < 3; from++) {
      const auto expected = WindowOwner::share(gather, seed, from, rank);
      EXPECT_EQ(std::memcmp(first.data() + static_cast<size_t>(from) * gather.count,
                            expected.data(), gather.count),
                0);
    }
    device::copy(values.data(), sum.as(), sum.bytes());
    EXPECT_EQ(values, std::vector<int>(values.size(), 6));
    if (rank == 0) {
      EXPECT_EQ(copyLaunches(), 2);
    }
    useOnce(owner.comm());
  }));
}

TEST(CopyEnginesInGraphs, AreReplayed) {
  const unsigned seed = randomSeed();
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int rank) {
    device::use(deviceOf(rank));
    WindowOwner owner(sharedId(pipe, rank, 2), rank, 2);
    const Call call{true, 500'000, 16, false};
    owner.prepare(call, seed);
    useOnce(owner.comm());
    unisonoHostGraph_t graph = nullptr;
    check(unisonoHostStreamBeginCapture(owner.stream()));
    for (int i = 0; i < 3; i++) owner.run(call);
    check(unisonoHostStreamEndCapture(owner.stream(), &graph));
    if (rank == 0) {
      EXPECT_EQ(copyLaunches(), 3);
    }
    for (int i = 0; i < 4; i++) {
      // The buffers have other data in every replay, and both ranks have written theirs.
      owner.prepare(call, seed + static_cast<unsigned>(i));
      useOnce(owner.comm());
      check(unisonoHostGraphLaunch(graph, owner.stream()));
      owner.synchronize();
      owner.expect(call, seed + static_cast<unsigned>(i));
      useOnce(owner.comm());
    }
    check(unisonoHostGraphDestroy(graph));
  }));
}

// A rank that is ahead must not overwrite an output before earlier work of its owner's stream has
// used it.
TEST(CopyEnginesInStreams, WaitForWhatUsesTheOutput) {
  constexpr int kRounds = 20;
  const unsigned seed = randomSeed();
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int rank) {
    device::use(deviceOf(rank));
    WindowOwner owner(sharedId(pipe, rank, 2), rank, 2);
    const Call call{false, kLeastBytes, 0, false};
    const size_t bytes = 2 * call.count;
    std::vector<DeviceBuffer> inputs, results;
    for (int round = 0; round < kRounds; round++) {
      const auto input = WindowOwner::share(call, seed + static_cast<unsigned>(round), rank, 0);
      inputs.emplace_back(deviceOf(rank), call.count);
      device::copy(inputs.back().as(), input.data(), call.count);
      results.emplace_back(deviceOf(rank), bytes);
    }
    useOnce(owner.comm());
    for (int round = 0; round < kRounds; round++) {
      const auto i = static_cast<size_t>(round);
      check(ncclAllGather(inputs[i].as(), owner.window(), call.count, ncclUint8, owner.comm(),
                          owner.stream()));
      // One rank is late with its copy of the output.
      if (round % 2 == rank) {
        for (int slow = 0; slow < 3; slow++) {
          check(ncclGroupStart());
          check(
              ncclSend(inputs[i].as(), call.count, ncclUint8, rank, owner.comm(), owner.stream()));
          check(
              ncclRecv(results[i].as(), call.count, ncclUint8, rank, owner.comm(), owner.stream()));
          check(ncclGroupEnd());
        }
      }
      check(ncclGroupStart());
      check(ncclSend(owner.window(), bytes, ncclUint8, rank, owner.comm(), owner.stream()));
      check(ncclRecv(results[i].as(), bytes, ncclUint8, rank, owner.comm(), owner.stream()));
      check(ncclGroupEnd());
    }
    owner.synchronize();
    for (int round = 0; round < kRounds; round++) {
      std::vector<std::byte> got(bytes), expected;
      device::copy(got.data(), results[static_cast<size_t>(round)].as(), bytes);
      for (int from = 0; from < 2; from++) {
        const auto one = WindowOwner::share(call, seed + static_cast<unsigned>(round), from, 0);
        expected.insert(expected.end(), one.begin(), one.end());
      }
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), bytes), 0) << "round " << round;
    }
    useOnce(owner.comm());
  }));
}

// The policy of rank 1, and the flag of its window.
struct Refusal {
  const char* name;
  int policy, flags;
};
class CopyEnginesRefused : public ::testing::TestWithParam<Refusal> {};

// Then all ranks use kernels, also the one that may not.
TEST_P(CopyEnginesRefused, WhereOneRankCannotUseThem) {
  const unsigned seed = randomSeed();
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int rank) {
    device::use(deviceOf(rank));
    const ncclUniqueId id = sharedId(pipe, rank, 2);
    WindowOwner owner = rank == 0 ? WindowOwner(id, rank, 2)
                                  : WindowOwner(id, rank, 2, GetParam().policy, GetParam().flags);
    const Call call{false, 400'000, 0, false};
    owner.prepare(call, seed);
    useOnce(owner.comm());
    owner.run(call);
    owner.synchronize();
    owner.expect(call, seed);
    if (rank == 0) {
      EXPECT_EQ(copyLaunches(), 0);
    }
    useOnce(owner.comm());
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Of, CopyEnginesRefused,
    ::testing::Values(Refusal{"Policy", NCCL_CTA_POLICY_EFFICIENCY, NCCL_WIN_COLL_SYMMETRIC},
                      Refusal{"Window", NCCL_CTA_POLICY_ZERO, NCCL_WIN_DEFAULT}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(CopyEnginesEnd, WithTheWindow) {
  const unsigned seed = randomSeed();
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int rank) {
    device::use(deviceOf(rank));
    WindowOwner owner(sharedId(pipe, rank, 2), rank, 2);
    const Call call{true, 400'000, 64, false};
    for (const bool isRegistered : {true, false}) {
      owner.prepare(call, seed);
      useOnce(owner.comm());
      owner.run(call);
      if (isRegistered) owner.deregister();  // while copies may be queued
      owner.synchronize();
      owner.expect(call, seed);
      if (rank == 0) {
        EXPECT_EQ(copyLaunches(), isRegistered ? 1 : 0);
      }
      useOnce(owner.comm());
    }
  }));
}

}  // namespace
}  // namespace unisono::system_test
