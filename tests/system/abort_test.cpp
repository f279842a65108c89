// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

// Work that no peer joins: abort, finalize and destroy. Runs on every backend.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kRanks = 2;
constexpr size_t kRingInts = scaled(64 << 20, 4 << 20) / sizeof(int);
constexpr size_t kOneShotInts = 1024 / sizeof(int);
constexpr auto kSoon = seconds(10);

// A call of a rank on its own buffer, and what of its peer would answer it.
struct StuckCall {
  const char* name;
  size_t count;
  std::function<ncclResult_t(void*, size_t, ncclComm_t, cudaStream_t)> call, answer;
};

ncclResult_t allReduce(void* buffer, size_t count, ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduce(buffer, buffer, count, ncclInt, ncclSum, comm, stream);
}
ncclResult_t sendToPeer(void* buffer, size_t count, ncclComm_t comm, cudaStream_t stream) {
  int rank = 0;
  check(ncclCommUserRank(comm, &rank));
  return ncclSend(buffer, count, ncclInt, 1 - rank, comm, stream);
}
ncclResult_t receiveFromPeer(void* buffer, size_t count, ncclComm_t comm, cudaStream_t stream) {
  int rank = 0;
  check(ncclCommUserRank(comm, &rank));
  return ncclRecv(buffer, count, ncclInt, 1 - rank, comm, stream);
}

const std::vector<StuckCall>& stuckCalls() {
  static const std::vector<StuckCall> calls = {
      {"Ring", kRingInts, allReduce, allReduce},
      {"OneShot", kOneShotInts, allReduce, allReduce},
      {"Send", kRingInts, sendToPeer, receiveFromPeer},
      {"Receive", kRingInts, receiveFromPeer, sendToPeer},
  };
  return calls;
}

// Aborts, and fails the test if that takes long; then `release` has to end it.
void abortSoon(
    ncclComm_t comm, const char* whose, const std::function<void()>& release = [] {}) {
  auto ending = std::async(std::launch::async, [comm] { return ncclCommAbort(comm); });
  if (ending.wait_for(kSoon) != std::future_status::ready) {
    ADD_FAILURE() << "ncclCommAbort of " << whose << " has not returned after 10 s";
    release();
  }
  EXPECT_EQ(ending.get(), ncclSuccess) << whose;
}

class Aborts : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank = 0; rank < kRanks; rank++) {
      buffers_.emplace_back(deviceOf(rank), kRingInts * sizeof(int));
    }
  }

  void* buffer(int rank) const { return buffers_[static_cast<size_t>(rank)].as(); }

  // Both ranks make the call, so that they are connected for it.
  void connect(const Ranks& ranks, const StuckCall& stuck) {
    onThreads(kRanks, [&](int rank) {
      check((rank == 0 ? stuck.call : stuck.answer)(buffer(rank), stuck.count, ranks.comm(rank),
                                                    ranks.stream(rank)));
      device::synchronize(ranks.stream(rank));
    });
  }

  // Only rank 0 makes it.
  void getStuck(const Ranks& ranks, const StuckCall& stuck) {
    device::use(deviceOf(0));
    check(stuck.call(buffer(0), stuck.count, ranks.comm(0), ranks.stream(0)));
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_FALSE(device::isIdle(ranks.stream(0))) << "it did not wait for its peer";
    ncclResult_t state = ncclInternalError;
    EXPECT_OK(ncclCommGetAsyncError(ranks.comm(0), &state));
    EXPECT_EQ(state, ncclSuccess);
  }

  void expectAborted(const Ranks& ranks) {
    for (int rank = 0; rank < kRanks; rank++) {
      ncclResult_t state = ncclSuccess;
      EXPECT_EQ(ncclCommGetAsyncError(ranks.comm(rank), &state), ncclInvalidArgument)
          << "the communicator is still there";
      const auto start = std::chrono::steady_clock::now();
      EXPECT_NO_THROW(device::synchronize(ranks.stream(rank)));
      EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon) << "rank " << rank << "'s stream";
    }
  }

  std::vector<DeviceBuffer> buffers_;
};

void useTwice(const Ranks& ranks) {
  onThreads(kRanks, [&](int rank) {
    useOnce(ranks.comm(rank), kOneShotInts);
    useOnce(ranks.comm(rank), kRingInts / 8);
  });
}

class AbortsOf : public Aborts, public ::testing::WithParamInterface<size_t> {
 protected:
  const StuckCall& stuck() const { return stuckCalls()[GetParam()]; }
};

TEST_P(AbortsOf, EndACallWhosePeerIsMissing) {
  const Ranks others(kRanks);
  {
    const Ranks ranks(kRanks);
    connect(ranks, stuck());
    getStuck(ranks, stuck());
    abortSoon(ranks.comm(0), "the rank that waits");
    abortSoon(ranks.comm(1), "the rank that made no call");
    expectAborted(ranks);
  }
  buffers_.clear();
  useTwice(others);
  useTwice(Ranks(kRanks));  // on the same devices
}

TEST_P(AbortsOf, EndAFinalizeThatWaitsForThePeer) {
  const Ranks ranks(kRanks);
  connect(ranks, stuck());
  getStuck(ranks, stuck());
  auto finalizing = std::async(std::launch::async, [&] { return ncclCommFinalize(ranks.comm(0)); });
  EXPECT_EQ(finalizing.wait_for(milliseconds(200)), std::future_status::timeout)
      << "ncclCommFinalize did not wait for the call";
  abortSoon(ranks.comm(0), "the rank that finalizes");
  ASSERT_EQ(finalizing.wait_for(kSoon), std::future_status::ready);
  EXPECT_OK(ncclCommAbort(ranks.comm(1)));
  expectAborted(ranks);
}

INSTANTIATE_TEST_SUITE_P(Calls, AbortsOf, ::testing::Range<size_t>(0, stuckCalls().size()),
                         [](const auto& test) { return stuckCalls()[test.param].name; });

// Slots wait on both sides of the memory that copy engines fill.
TEST_F(Aborts, EndCallsThroughCopyEngines) {
  const Setting hostMemory("NCCL_P2P_DISABLE", "1"), copies("NCCL_SHM_USE_CUDA_MEMCPY", "1"),
      both("NCCL_SHM_MEMCPY_MODE", "3"), protocol("NCCL_PROTO", "Simple");
  for (const StuckCall& stuck : stuckCalls()) {
    const Ranks ranks(kRanks);
    connect(ranks, stuck);
    getStuck(ranks, stuck);
    for (int rank = 0; rank < kRanks; rank++) {
      const auto start = std::chrono::steady_clock::now();
      abortSoon(ranks.comm(rank), stuck.name);
      EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(scaled(100, 1000)))
          << stuck.name;
    }
    expectAborted(ranks);
  }
}

// One thread gives up two communicators of one device, one after the other.
TEST_F(Aborts, DoNotWaitForOthersOfTheDevice) {
  const StuckCall& stuck = stuckCalls().front();
  const Ranks first(kRanks), second(kRanks);
  for (const Ranks* ranks : {&first, &second}) connect(*ranks, stuck);
  for (const Ranks* ranks : {&first, &second}) getStuck(*ranks, stuck);
  abortSoon(first.comm(0), "a communicator, next to a kernel of another one",
            [&] { ncclCommAbort(second.comm(0)); });
  for (const Ranks* ranks : {&first, &second}) {
    for (int rank = 0; rank < kRanks; rank++) ncclCommAbort(ranks->comm(rank));
    expectAborted(*ranks);
  }
}

TEST_F(Aborts, EndTheConnecting) {
  const Ranks ranks(kRanks);
  std::thread aborting([&] {
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_OK(ncclCommAbort(ranks.comm(0)));
  });
  device::use(deviceOf(0));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(sendToPeer(buffer(0), 4, ranks.comm(0), ranks.stream(0)), ncclSuccess);
  EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
  aborting.join();
}

// How a communicator is ended right after a call that its peer makes late.
class LateCalls : public Aborts, public ::testing::WithParamInterface<bool> {};

TEST_P(LateCalls, AreWaitedFor) {
  const bool finalize = GetParam();
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream stream(deviceOf(rank));
    std::vector<int> values(kRingInts, rank + 1);
    device::copy(buffer(rank), values.data(), kRingInts * sizeof(int));
    if (rank == 1) std::this_thread::sleep_for(milliseconds(300));
    check(allReduce(buffer(rank), kRingInts, member.comm, stream));
    if (finalize) {
      check(ncclCommFinalize(member.comm));
      ncclResult_t state = ncclInProgress;
      check(ncclCommGetAsyncError(member.comm, &state));
      check(state);
    }
    check(ncclCommDestroy(std::exchange(member.comm, nullptr)));
    device::copy(values.data(), buffer(rank), kRingInts * sizeof(int));
    for (size_t i = 0; i < values.size(); i++) {
      if (values[i] != 3) {
        throw std::runtime_error("element " + std::to_string(i) + " is " +
                                 std::to_string(values[i]) + ": the call was not complete");
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(By, LateCalls, ::testing::Bool(), [](const auto& test) {
  return test.param ? "FinalizeAndDestroy" : "Destroy";
});

}  // namespace
}  // namespace unisono::system_test
