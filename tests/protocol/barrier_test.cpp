// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device/kernels.h"
#include "scenario.h"
#include "seeds.h"

// Ranks that store into each other's memory between barriers, as copy engines do.
namespace unisono::protocol {
namespace {

using runtime::HostGroupContext;
using runtime::host::Schedule;

constexpr int kMostRanks = 4;

// Each round a rank stores the round's number into a word in every rank's memory, after the others
// have read what the last round left there.
struct RankArguments {
  device::BarrierArguments barrier;
  std::array<uint64_t*, kMostRanks> words;  // of each rank, [storing rank]
  int rounds;
  uint64_t* wrong;
};

void runRank(const void* raw, const HostGroupContext& context) {
  if (context.role != 0) return;
  const auto& work = *static_cast<const RankArguments*>(raw);
  const auto me = static_cast<size_t>(work.barrier.rank);
  const auto ranks = static_cast<size_t>(work.barrier.ranks);
  const auto barrier = [&] { device::barrierKernel().hostFunction(&work.barrier, context); };
  for (int round = 1; round <= work.rounds; round++) {
    barrier();
    for (size_t rank = 0; rank < ranks; rank++) {
      runtime::host::noteWrite(work.words[rank] + me, sizeof(uint64_t));
      work.words[rank][me] = static_cast<uint64_t>(round);
    }
    barrier();
    for (size_t rank = 0; rank < ranks; rank++) {
      runtime::host::noteRead(work.words[me] + rank, sizeof(uint64_t));
      if (work.words[me][rank] != static_cast<uint64_t>(round)) ++*work.wrong;
    }
  }
}

class WindowBarrier : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!runsFibers()) GTEST_SKIP() << "threads have no seed";
    for (int rank = 0; rank < GetParam(); rank++) {
      streams_.push_back(testRuntime().createStream(rank));
      windows_.push_back(testRuntime().allocate(rank, device::kDirectHeaderBytes));
      words_.push_back(testRuntime().allocate(rank, kMostRanks * sizeof(uint64_t)));
    }
  }

  // Returns what was wrong.
  std::string run(const Schedule& schedule, int rounds, bool aborts = false) {
    std::array<uint64_t, kMostRanks> wrong{};
    uint32_t abortFlag = aborts ? 1 : 0;
    for (const auto& memory : windows_) std::memset(memory->address(), 0, memory->bytes());
    startSchedule(schedule);
    // After an abort the last rank does not come.
    for (int rank = 0; rank < GetParam() - (aborts ? 1 : 0); rank++) {
      RankArguments arguments{};
      arguments.barrier.memory.window = at<std::byte>(windows_, rank);
      arguments.barrier.abortFlag = &abortFlag;
      arguments.barrier.rank = rank;
      arguments.barrier.ranks = GetParam();
      for (int peer = 0; peer < GetParam() - 1; peer++) {
        arguments.barrier.memory.theirs[peer] =
            at<std::byte>(windows_, device::rankOfPeer(peer, rank));
      }
      for (int other = 0; other < GetParam(); other++) {
        arguments.words[static_cast<size_t>(other)] = at<uint64_t>(words_, other);
      }
      arguments.rounds = rounds;
      arguments.wrong = &wrong[static_cast<size_t>(rank)];
      static const runtime::Kernel kKernel{"rank", nullptr, runRank};
      runtime::LaunchShape shape;
      shape.argumentBytes = sizeof(arguments);
      testRuntime().launch(kKernel, shape, &arguments, streams_[static_cast<size_t>(rank)].get());
    }
    std::string text;
    for (const auto& stream : streams_) {
      try {
        testRuntime().synchronize(stream.get());
      } catch (const std::exception& error) {
        text += error.what();
      }
    }
    if (aborts) return text;
    for (const uint64_t words : wrong) text += words > 0 ? fmt::format(" {} words;", words) : "";
    return text;
  }

 private:
  template <typename T>
  static T* at(const std::vector<std::shared_ptr<runtime::DeviceMemory>>& memory, int rank) {
    return static_cast<T*>(memory[static_cast<size_t>(rank)]->address());
  }

  std::vector<std::shared_ptr<void>> streams_;
  std::vector<std::shared_ptr<runtime::DeviceMemory>> windows_, words_;
};

TEST_P(WindowBarrier, OrdersStoresInWeakMemory) {
  forEachSeed(200, "barrier", [&](uint64_t seed, Random&) {
    Schedule schedule{.seed = static_cast<int64_t>(seed), .memory = Schedule::Memory::weak};
    schedule.depth = seed % 3 == 0 ? 0 : static_cast<int>(1 + seed % 3);
    schedule.steps = 200;
    return run(schedule, 3);
  });
}

TEST_P(WindowBarrier, EndsAtAnAbort) {
  EXPECT_EQ(run({.seed = 1}, 1, true), "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, WindowBarrier, testing::Values(2, 3, kMostRanks));

}  // namespace
}  // namespace unisono::protocol
