// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/make.h"
#include "runtime/host/host_runtime.h"
#include "runtime/host/multicast.h"

// Communicators that use NVLS: what they compute, and that their multicast addresses end with them.
namespace unisono::comm {
namespace {

using runtime::host::multicastRanges;

constexpr int kRanks = 4;
constexpr size_t kCount = 30'001;  // several times around the slots

Settings settingsOf(int64_t nvls) {
  Settings settings;
  settings.backend = "host";
  settings.hostDevices = kRanks;
  settings.socketInterface = "lo";
  settings.algorithm = "NVLS";
  settings.nvls = nvls;
  return settings;
}

runtime::Runtime& hostRuntime() {
  static runtime::host::HostRuntime runtime(settingsOf(2));
  return runtime;
}

void onEveryRank(const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; rank++) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Aborted communicators end in the background.
bool endsWithin(std::chrono::seconds limit, const std::function<bool()>& isReached) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!isReached()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

class Multicast : public testing::Test {
 protected:
  struct Rank {
    std::shared_ptr<Health> health;
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<void> stream;
    std::shared_ptr<runtime::DeviceMemory> input, output;
  };

  // Rank `reluctant`, if any, forbids NVLS. `ranksPerNode` consecutive ranks are on a node.
  void makeRanks(int reluctant = -1, int ranksPerNode = kRanks) {
    runtime::Runtime& runtime = hostRuntime();
    const bootstrap::UniqueId id = bootstrap::createUniqueId(settingsOf(2));
    onEveryRank([&](int rank) {
      Rank& mine = ranks_[static_cast<size_t>(rank)];
      mine.health = std::make_shared<Health>(runtime, rank);
      Settings settings = settingsOf(rank == reluctant ? 0 : 2);
      settings.hostId = "node " + std::to_string(rank / ranksPerNode);
      if (ranksPerNode < kRanks) settings.algorithm = "NVLSTree";
      mine.communicator = makeFromIds(runtime, {id}, rank, kRanks, rank, settings, {})(mine.health);
      mine.stream = runtime.createStream(rank);
      mine.input = runtime.allocate(rank, kCount * kRanks * sizeof(int32_t));
      mine.output = runtime.allocate(rank, kCount * kRanks * sizeof(int32_t));
      auto* input = static_cast<int32_t*>(mine.input->address());
      for (size_t i = 0; i < kCount * kRanks; i++) input[i] = valueOf(rank, i);
      std::memset(mine.output->address(), 0xee, mine.output->bytes());
    });
  }

  static int32_t valueOf(int rank, size_t index) {
    return static_cast<int32_t>(index % 1000) * (rank + 1) - rank;
  }
  static int32_t sumAt(size_t index) {
    int32_t sum = 0;
    for (int rank = 0; rank < kRanks; rank++) sum += valueOf(rank, index);
    return sum;
  }

  Communicator::Prepared prepare(int rank, plan::Call call) {
    Rank& mine = ranks_[static_cast<size_t>(rank)];
    plan::Task task{};
    task.call = call;
    task.input = mine.input->address();
    task.output = mine.output->address();
    task.count = kCount;
    task.reduction = {device::DataType::int32, device::Reduction::sum, false, 0};
    Communicator::Prepared prepared;
    prepared.add(task, mine.stream.get());
    mine.communicator->prepare(prepared);
    return prepared;
  }
  void run(int rank, plan::Call call) {
    Communicator& communicator = *ranks_[static_cast<size_t>(rank)].communicator;
    Communicator::Prepared prepared = prepare(rank, call);
    EXPECT_TRUE(prepared.plan.needs.multicast);
    communicator.connect(prepared);
    communicator.launch(prepared);
    communicator.finish();
  }
  const int32_t* output(int rank) const {
    return static_cast<const int32_t*>(ranks_[static_cast<size_t>(rank)].output->address());
  }

  std::vector<Rank> ranks_{kRanks};
};

TEST_F(Multicast, CarriesCallsAndEndsWithItsCommunicators) {
  makeRanks();
  EXPECT_EQ(multicastRanges(), 0u);
  onEveryRank([&](int rank) { run(rank, plan::Call::allReduce); });
  EXPECT_EQ(multicastRanges(), static_cast<size_t>(kRanks));
  for (int rank = 0; rank < kRanks; rank++) {
    for (size_t i = 0; i < kCount; i++) ASSERT_EQ(output(rank)[i], sumAt(i)) << rank << " " << i;
  }
  onEveryRank([&](int rank) { run(rank, plan::Call::reduceScatter); });
  for (int rank = 0; rank < kRanks; rank++) {
    for (size_t i = 0; i < kCount; i++) {
      ASSERT_EQ(output(rank)[i], sumAt(static_cast<size_t>(rank) * kCount + i)) << rank << " " << i;
    }
  }
  onEveryRank([&](int rank) { run(rank, plan::Call::allGather); });
  for (int rank = 0; rank < kRanks; rank++) {
    for (size_t i = 0; i < kCount * kRanks; i++) {
      ASSERT_EQ(output(rank)[i], valueOf(static_cast<int>(i / kCount), i % kCount)) << rank;
    }
  }
  EXPECT_EQ(multicastRanges(), static_cast<size_t>(kRanks));
  onEveryRank([&](int rank) { ranks_[static_cast<size_t>(rank)].communicator.reset(); });
  EXPECT_EQ(multicastRanges(), 0u);
}

// Each node has a multicast address of its own; heads exchange the rest.
TEST_F(Multicast, CarriesAllReduceBetweenNodes) {
  makeRanks(-1, 2);
  onEveryRank([&](int rank) { run(rank, plan::Call::allReduce); });
  EXPECT_EQ(multicastRanges(), static_cast<size_t>(kRanks));
  for (int rank = 0; rank < kRanks; rank++) {
    for (size_t i = 0; i < kCount; i++) ASSERT_EQ(output(rank)[i], sumAt(i)) << rank << " " << i;
    EXPECT_FALSE(prepare(rank, plan::Call::allGather).plan.needs.multicast);
  }
  onEveryRank([&](int rank) { ranks_[static_cast<size_t>(rank)].communicator.reset(); });
  EXPECT_EQ(multicastRanges(), 0u);
}

TEST_F(Multicast, EndsAfterAnAbort) {
  makeRanks();
  onEveryRank([&](int rank) { run(rank, plan::Call::allReduce); });
  // Rank 0 waits for contributions that never come.
  Communicator::Prepared prepared = prepare(0, plan::Call::allReduce);
  ranks_[0].communicator->launch(prepared);
  for (Rank& rank : ranks_) {
    rank.health->abort();
    rank.communicator.reset();
  }
  EXPECT_TRUE(endsWithin(std::chrono::seconds(60), [] { return multicastRanges() == 0; }));
}

TEST_F(Multicast, EndsWhereARankLeavesBeforeItIsConnected) {
  makeRanks();
  ranks_[kRanks - 1].health->abort();
  ranks_[kRanks - 1].communicator.reset();
  onEveryRank([&](int rank) {
    Rank& mine = ranks_[static_cast<size_t>(rank)];
    if (mine.communicator == nullptr) return;
    EXPECT_THROW(
        {
          Communicator::Prepared prepared = prepare(rank, plan::Call::allReduce);
          mine.communicator->connect(prepared);
        },
        Error);
  });
  EXPECT_EQ(multicastRanges(), 0u);
  for (Rank& rank : ranks_) {
    rank.health->abort();
    rank.communicator.reset();
  }
  EXPECT_TRUE(endsWithin(std::chrono::seconds(60), [] { return multicastRanges() == 0; }));
}

TEST_F(Multicast, IsNotUsedWhereARankForbidsIt) {
  makeRanks(2);
  for (int rank = 0; rank < kRanks; rank++) {
    const plan::Needs needs = prepare(rank, plan::Call::allReduce).plan.needs;
    EXPECT_FALSE(needs.multicast);
    EXPECT_TRUE(needs.rings || needs.trees || needs.direct != 0);
  }
  onEveryRank([&](int rank) { ranks_[static_cast<size_t>(rank)].communicator.reset(); });
}

}  // namespace
}  // namespace unisono::comm
