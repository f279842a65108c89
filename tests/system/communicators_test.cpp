// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "support/no_new_threads.h"
#include "testing.h"

// The life of communicators.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

ncclConfig_t nonblocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

TEST(Communicators, InitAllNumbersRanksInTheOrderOfTheList) {
  const int devices[] = {5, 0, 3};
  ncclComm_t comms[3];
  ASSERT_OK(ncclCommInitAll(comms, 3, devices));
  for (int rank = 0; rank < 3; rank++) {
    int value = -1;
    EXPECT_OK(ncclCommUserRank(comms[rank], &value));
    EXPECT_EQ(value, rank);
    EXPECT_OK(ncclCommCuDevice(comms[rank], &value));
    EXPECT_EQ(value, devices[rank]);
    EXPECT_OK(ncclCommCount(comms[rank], &value));
    EXPECT_EQ(value, 3);
    ncclResult_t state = ncclInProgress;
    EXPECT_OK(ncclCommGetAsyncError(comms[rank], &state));
    EXPECT_EQ(state, ncclSuccess);
  }
  for (ncclComm_t comm : comms) EXPECT_OK(ncclCommDestroy(comm));
}

TEST(Communicators, ThreadsMeetByUniqueId) {
  const ncclUniqueId id = newId();
  onThreads(5, [&](int rank) { useOnce(Member(id, rank, 5).comm); });
}

TEST(Communicators, ScalableInitTakesSeveralIds) {
  for (const int count : {1, 3, 7}) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < count; i++) ids.push_back(newId());
    onThreads(7, [&](int rank) {
      ncclComm_t comm = nullptr;
      check(ncclCommInitRankScalable(&comm, 7, rank, count, ids.data(), nullptr));
      useOnce(comm);
      check(ncclCommDestroy(comm));
    });
  }
}

TEST(Communicators, CommIdAndIPv6) {
  {
    // Not one of the ports that the system chooses for others.
    const std::string port = std::to_string(20000 + ::getpid() % 10000);
    const Setting address("NCCL_COMM_ID", ("127.0.0.1:" + port).c_str());
    for (int round = 0; round < 3; round++) {
      onThreads(3, [&](int rank) { useOnce(Member(newId(), rank, 3).comm); });
    }
  }
  const Setting family("NCCL_SOCKET_FAMILY", "AF_INET6");
  const Setting interface("NCCL_SOCKET_IFNAME", "lo");
  const ncclUniqueId id = newId();
  onThreads(3, [&](int rank) { useOnce(Member(id, rank, 3).comm); });
}

// The structure of each version: its size with the padding at its end, and where its fields end.
TEST(Communicators, ConfigOfEveryOlderVersion) {
  const struct {
    unsigned version;
    size_t size, end;
  } versions[] = {{21403, 24, offsetof(ncclConfig_t, cgaClusterSize)},  // 4 bytes of padding
                  {21701, 40, offsetof(ncclConfig_t, splitShare)},
                  {21801, 48, offsetof(ncclConfig_t, trafficClass)},  // 4 bytes of padding
                  {22407, 48, offsetof(ncclConfig_t, trafficClass)},
                  {22602, 48, offsetof(ncclConfig_t, commName)},
                  {22706, 72, offsetof(ncclConfig_t, nChannelsPerNetPeer)},
                  {NCCL_VERSION_CODE, sizeof(ncclConfig_t), sizeof(ncclConfig_t)}};
  for (const auto& older : versions) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    // What follows the fields does not belong to the caller, padding included.
    std::memset(reinterpret_cast<char*>(&config) + older.end, 0x5a, sizeof(config) - older.end);
    config.size = older.size;
    config.version = older.version;
    ncclComm_t comm = nullptr;
    ASSERT_OK(unisonoHostSetDevice(0));
    ASSERT_OK(ncclCommInitRankConfig(&comm, 1, newId(), 0, &config)) << older.version;
    EXPECT_NO_THROW(useOnce(comm));
    EXPECT_OK(ncclCommDestroy(comm));
  }
}

// Padding of 2.14 that would be a bad value of cgaClusterSize.
TEST(Communicators, ConfigWithNegativePadding) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.size = 24;
  config.version = 21403;
  config.cgaClusterSize = -7;
  ncclComm_t comm = nullptr;
  ASSERT_OK(ncclCommInitRankConfig(&comm, 1, newId(), 0, &config));
  EXPECT_OK(ncclCommDestroy(comm));
}

// As in NCCL: without a configuration a new communicator is as its parent, with one it is blocking
// unless that says otherwise. NCCL_COMM_BLOCKING wins over both.
TEST(Communicators, BlockingOfASplit) {
  ncclConfig_t parentConfig = nonblocking();
  ncclComm_t parent = nullptr;
  ncclCommInitRankConfig(&parent, 1, newId(), 0, &parentConfig);
  ASSERT_OK(waitWhileInProgress(parent));
  const auto split = [&](ncclConfig_t* config) {
    ncclComm_t child = nullptr;
    const ncclResult_t result = ncclCommSplit(parent, 0, 0, &child, config);
    EXPECT_OK(waitWhileInProgress(child));
    EXPECT_OK(ncclCommDestroy(child));
    return result;
  };
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(split(nullptr), ncclInProgress);
  EXPECT_EQ(split(&config), ncclSuccess);
  config.blocking = 0;
  EXPECT_EQ(split(&config), ncclInProgress);
  EXPECT_OK(ncclCommDestroy(parent));

  const Setting blocking("NCCL_COMM_BLOCKING", "1");
  ncclComm_t comm = nullptr;
  EXPECT_OK(ncclCommInitRankConfig(&comm, 1, newId(), 0, &parentConfig));
  EXPECT_OK(ncclCommDestroy(comm));
}

TEST(Communicators, SplitByColorAndKey) {
  const ncclUniqueId id = newId();
  constexpr int kRanks = 6;
  onThreads(kRanks, [&](int rank) {
    Member parent(id, rank, kRanks);
    // Rank 5 stays out; even and odd ranks part, the greatest first.
    const int color = rank == 5 ? NCCL_SPLIT_NOCOLOR : rank % 2;
    ncclComm_t child = parent.comm;
    check(ncclCommSplit(parent.comm, color, -rank, &child, nullptr));
    if (rank == 5) {
      if (child != nullptr) throw std::runtime_error("no color, but a communicator");
    } else {
      const int members = rank % 2 == 0 ? 3 : 2;
      const int expected = rank % 2 == 0 ? 2 - rank / 2 : 1 - rank / 2;
      int count = 0, number = -1;
      check(ncclCommCount(child, &count));
      check(ncclCommUserRank(child, &number));
      if (count != members || number != expected) {
        throw std::runtime_error("is " + std::to_string(number) + " of " + std::to_string(count));
      }
      useOnce(child);
    }
    useOnce(parent.comm);
    // The child outlives the parent.
    check(ncclCommDestroy(std::exchange(parent.comm, nullptr)));
    if (child != nullptr) {
      useOnce(child);
      check(ncclCommDestroy(child));
    }
  });
}

TEST(Communicators, SplitInAGroupOfOneThread) {
  const Ranks ranks(4);
  ncclComm_t children[4];
  ranks.inGroup([&](int rank) {
    check(ncclCommSplit(ranks.comm(rank), rank == 3 ? NCCL_SPLIT_NOCOLOR : 7, rank, &children[rank],
                        nullptr));
  });
  EXPECT_EQ(children[3], nullptr);
  for (int rank = 0; rank < 3; rank++) {
    int count = 0;
    EXPECT_OK(ncclCommCount(children[rank], &count));
    EXPECT_EQ(count, 3);
    EXPECT_OK(ncclCommDestroy(children[rank]));
  }
}

TEST(Communicators, SeveralSplitsOfOneParentInAGroup) {
  constexpr int kRanks = 4, kSplits = 5;
  const Ranks ranks(kRanks);
  ncclComm_t children[kSplits][kRanks];
  ranks.inGroup([&](int rank) {
    for (int split = 0; split < kSplits; split++) {
      // The first ranks to `split` part from the others, so that every split has other members.
      check(ncclCommSplit(ranks.comm(rank), rank < split ? 1 : 0, rank, &children[split][rank],
                          nullptr));
    }
  });
  for (int split = 0; split < kSplits; split++) {
    for (int rank = 0; rank < kRanks; rank++) {
      int count = 0;
      EXPECT_OK(ncclCommCount(children[split][rank], &count));
      EXPECT_EQ(count, rank < split ? split : kRanks - split) << "split " << split;
      EXPECT_OK(ncclCommDestroy(children[split][rank]));
    }
  }
}

TEST(Communicators, NonblockingInitAndSplit) {
  const ncclUniqueId id = newId();
  constexpr int kRanks = 3;
  // One thread for all ranks: no call may wait for another rank.
  ncclComm_t comms[kRanks], children[kRanks];
  ncclConfig_t config = nonblocking();
  for (int rank = 0; rank < kRanks; rank++) {
    ASSERT_OK(unisonoHostSetDevice(rank));
    EXPECT_EQ(ncclCommInitRankConfig(&comms[rank], kRanks, id, rank, &config), ncclInProgress);
    ASSERT_NE(comms[rank], nullptr);
  }
  for (ncclComm_t comm : comms) ASSERT_EQ(waitWhileInProgress(comm), ncclSuccess);
  for (int rank = 0; rank < kRanks; rank++) {
    EXPECT_EQ(ncclCommSplit(comms[rank], rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, rank, &children[rank],
                            nullptr),
              ncclInProgress);
  }
  EXPECT_EQ(children[0], nullptr);
  for (int rank = 1; rank < kRanks; rank++) {
    ASSERT_EQ(waitWhileInProgress(children[rank]), ncclSuccess);
  }
  onThreads(kRanks, [&](int rank) {
    useOnce(comms[rank]);
    if (rank > 0) useOnce(children[rank]);
  });
  for (int rank = 1; rank < kRanks; rank++) EXPECT_OK(ncclCommDestroy(children[rank]));
  for (ncclComm_t comm : comms) EXPECT_OK(ncclCommDestroy(comm));
}

TEST(Communicators, DestroyOfANonblockingOneEndsItsWork) {
  const ncclUniqueId id = newId();
  constexpr int kRanks = 2;
  constexpr size_t kCount = 500'000;
  onThreads(kRanks, [&](int rank) {
    ncclConfig_t config = nonblocking();
    ncclComm_t comm = nullptr;
    ncclCommInitRankConfig(&comm, kRanks, id, rank, &config);
    if (waitWhileInProgress(comm) != ncclSuccess) throw std::runtime_error("was not made");
    DeviceBuffer buffer(rank, kCount * sizeof(int));
    DeviceStream stream(rank);
    for (size_t i = 0; i < kCount; i++) buffer.as<int>()[i] = 1;
    checkFinished(comm,
                  ncclAllReduce(buffer.as(), buffer.as(), kCount, ncclInt, ncclSum, comm, stream));
    check(ncclCommDestroy(comm));
    stream.synchronize();
    const int* sums = buffer.as<int>();
    if (std::count(sums, sums + kCount, kRanks) != static_cast<ptrdiff_t>(kCount)) {
      throw std::runtime_error("the sum is not complete");
    }
  });
}

TEST(Communicators, NonblockingIsBusyUntilThePeerComes) {
  ncclConfig_t config = nonblocking();
  ncclComm_t comm = nullptr;
  ASSERT_OK(unisonoHostSetDevice(0));
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, newId(), 0, &config), ncclInProgress);
  int count = 0;
  EXPECT_EQ(ncclCommCount(comm, &count), ncclInvalidArgument);
  ncclResult_t state = ncclSuccess;
  EXPECT_OK(ncclCommGetAsyncError(comm, &state));
  EXPECT_EQ(state, ncclInProgress);
  const auto start = steady_clock::now();
  EXPECT_OK(ncclCommAbort(comm));
  EXPECT_LT(steady_clock::now() - start, seconds(10));
}

// The topology file of rank 2 is none. The others fail with that cause.
TEST(Communicators, CauseOfAFailedInitReachesEveryRank) {
  constexpr int kRanks = 4;
  constexpr const char* kNoTopology = "/proc/version";
  const ncclUniqueId id = newId();
  ncclConfig_t config = nonblocking();
  ncclComm_t comms[kRanks] = {};
  for (int rank = 0; rank < kRanks; rank++) {
    const Setting file("NCCL_TOPO_FILE", rank == 2 ? kNoTopology : "");
    ASSERT_OK(unisonoHostSetDevice(rank));
    EXPECT_EQ(ncclCommInitRankConfig(&comms[rank], kRanks, id, rank, &config), ncclInProgress);
  }
  for (ncclComm_t comm : comms) {
    const ncclResult_t state = waitWhileInProgress(comm);
    EXPECT_NE(state, ncclSuccess);
    EXPECT_NE(state, ncclInProgress);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find(kNoTopology), std::string::npos)
        << ncclGetLastError(comm);
    EXPECT_OK(ncclCommDestroy(comm));
  }
}

// Two nonblocking ranks on devices 0 and 1, driven by one thread: no call may wait for the other
// rank.
class Nonblocking : public ::testing::Test {
 protected:
  void SetUp() override {
    const ncclUniqueId id = newId();
    ncclConfig_t config = nonblocking();
    for (int rank = 0; rank < 2; rank++) {
      ASSERT_OK(unisonoHostSetDevice(rank));
      ASSERT_EQ(ncclCommInitRankConfig(&comms_[rank], 2, id, rank, &config), ncclInProgress);
    }
    for (ncclComm_t comm : comms_) ASSERT_EQ(waitWhileInProgress(comm), ncclSuccess);
  }
  void TearDown() override {
    for (int rank = 0; rank < 2; rank++) destroy(rank);
  }

  void destroy(int rank) {
    if (comms_[rank] != nullptr) {
      EXPECT_OK(ncclCommDestroy(std::exchange(comms_[rank], nullptr)));
    }
  }
  ncclResult_t sum(int rank, size_t count) {
    int* data = buffers_[rank].as<int>();
    std::fill_n(data, count, rank + 1);
    return ncclAllReduce(data, data, count, ncclInt, ncclSum, comms_[rank], streams_[rank]);
  }
  void expectSums(size_t count) {
    for (int rank = 0; rank < 2; rank++) {
      streams_[rank].synchronize();
      const int* data = buffers_[rank].as<int>();
      EXPECT_EQ(std::count(data, data + count, 3), static_cast<ptrdiff_t>(count)) << rank;
    }
  }
  // Both ranks make the call, so that they are connected for it.
  void connect(size_t count) {
    for (int rank = 0; rank < 2; rank++) EXPECT_EQ(sum(rank, count), ncclInProgress);
    for (ncclComm_t comm : comms_) ASSERT_EQ(waitWhileInProgress(comm), ncclSuccess);
    expectSums(count);
  }
  ncclResult_t state(int rank) {
    ncclResult_t result = ncclInternalError;
    EXPECT_OK(ncclCommGetAsyncError(comms_[rank], &result));
    return result;
  }

  static constexpr size_t kLarge = 200'000;  // not for one-shot
  ncclComm_t comms_[2] = {};
  DeviceBuffer buffers_[2] = {{0, kLarge * sizeof(int)}, {1, kLarge * sizeof(int)}};
  DeviceStream streams_[2] = {DeviceStream(0), DeviceStream(1)};
};

TEST_F(Nonblocking, FirstCallDoesNotWaitForThePeer) {
  for (const size_t count : {size_t{100}, kLarge}) {
    EXPECT_EQ(sum(0, count), ncclInProgress);
    EXPECT_EQ(state(0), ncclInProgress);
    // Until it is done, nothing else can be called.
    EXPECT_EQ(sum(0, count), ncclInvalidArgument);
    int ranks = 0;
    EXPECT_EQ(ncclCommCount(comms_[0], &ranks), ncclInvalidArgument);
    EXPECT_EQ(ncclCommFinalize(comms_[0]), ncclInvalidArgument);
    EXPECT_EQ(state(0), ncclInProgress);
    EXPECT_EQ(sum(1, count), ncclInProgress);
    for (ncclComm_t comm : comms_) ASSERT_EQ(waitWhileInProgress(comm), ncclSuccess);
    expectSums(count);
    // Connected ranks launch at once.
    for (int rank = 0; rank < 2; rank++) EXPECT_OK(sum(rank, count));
    expectSums(count);
  }
}

TEST_F(Nonblocking, GroupsOfSeveralCommunicatorsDoNotWait) {
  ncclComm_t first[2] = {comms_[0], comms_[1]};
  Nonblocking::SetUp();  // comms_ is another communicator now
  DeviceBuffer others[2] = {{0, sizeof(int)}, {1, sizeof(int)}};
  for (int rank = 0; rank < 2; rank++) {
    *others[rank].as<int>() = 10 * (rank + 1);
    ASSERT_OK(ncclGroupStart());
    EXPECT_OK(sum(rank, 100));
    EXPECT_OK(ncclAllReduce(others[rank].as(), others[rank].as(), 1, ncclInt, ncclSum, first[rank],
                            streams_[rank]));
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  }
  for (ncclComm_t comm : {first[0], first[1], comms_[0], comms_[1]}) {
    EXPECT_EQ(waitWhileInProgress(comm), ncclSuccess);
  }
  expectSums(100);
  for (const DeviceBuffer& buffer : others) EXPECT_EQ(*buffer.as<int>(), 30);
  for (ncclComm_t comm : first) EXPECT_OK(ncclCommDestroy(comm));
}

TEST_F(Nonblocking, GroupsDoNotMixWithBlockingOnes) {
  const Member blocking(newId(), 0, 1);
  ASSERT_OK(ncclGroupStart());
  EXPECT_OK(sum(0, 100));
  EXPECT_OK(ncclAllReduce(buffers_[1].as(), buffers_[1].as(), 1, ncclInt, ncclSum, blocking.comm,
                          streams_[1]));
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
  connect(100);
}

TEST_F(Nonblocking, AbortEndsACallInProgress) {
  EXPECT_EQ(sum(0, 100), ncclInProgress);
  EXPECT_OK(ncclCommAbort(std::exchange(comms_[0], nullptr)));
  streams_[0].synchronize();
}

TEST_F(Nonblocking, DestroyGivesUpACallInProgress) {
  connect(100);
  EXPECT_EQ(sum(0, kLarge), ncclInProgress);
  destroy(0);
  streams_[0].synchronize();
  // The peer hears of it, in a call or without one.
  ncclResult_t state = ncclSuccess;
  while (state == ncclSuccess) {
    ASSERT_OK(ncclCommGetAsyncError(comms_[1], &state));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(state, ncclRemoteError);
  EXPECT_EQ(sum(1, kLarge), ncclRemoteError);
}

// It ends the calls of all communicators of the group.
TEST_F(Nonblocking, AbortEndsTheGroup) {
  ncclComm_t other[2] = {comms_[0], comms_[1]};
  Nonblocking::SetUp();
  ASSERT_OK(ncclGroupStart());
  EXPECT_OK(sum(0, 100));
  int* data = buffers_[0].as<int>() + 100;
  EXPECT_OK(ncclAllReduce(data, data, 1, ncclInt, ncclSum, other[0], streams_[0]));
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  EXPECT_OK(ncclCommAbort(std::exchange(comms_[0], nullptr)));
  EXPECT_EQ(waitWhileInProgress(other[0]), ncclInvalidUsage);
  for (ncclComm_t comm : other) EXPECT_OK(ncclCommDestroy(comm));
}

TEST_F(Nonblocking, FinalizeDoesNotWaitForThePeer) {
  connect(kLarge);
  EXPECT_OK(sum(0, kLarge));
  EXPECT_EQ(ncclCommFinalize(comms_[0]), ncclInProgress);
  EXPECT_EQ(state(0), ncclInProgress);
  EXPECT_EQ(ncclCommFinalize(comms_[0]), ncclInvalidArgument);
  EXPECT_OK(sum(1, kLarge));
  EXPECT_EQ(waitWhileInProgress(comms_[0]), ncclSuccess);
  expectSums(kLarge);
  EXPECT_EQ(sum(0, kLarge), ncclInvalidUsage);
  EXPECT_EQ(ncclCommFinalize(comms_[0]), ncclInvalidArgument);
}

TEST_F(Nonblocking, DestroyWaitsForAFinalizeInProgress) {
  connect(kLarge);
  EXPECT_OK(sum(0, kLarge));
  EXPECT_EQ(ncclCommFinalize(comms_[0]), ncclInProgress);
  EXPECT_OK(sum(1, kLarge));
  destroy(0);
  const int* data = buffers_[0].as<int>();
  EXPECT_EQ(std::count(data, data + kLarge, 3), static_cast<ptrdiff_t>(kLarge));
}

TEST(Communicators, NonblockingInitWithoutAThreadFails) {
  const ncclUniqueId id = newId();
  ncclConfig_t config = nonblocking();
  ncclComm_t comm = nullptr;
  {
    test::NoNewThreads refused;
    ncclCommInitRankConfig(&comm, 2, id, 0, &config);
  }
  ASSERT_NE(comm, nullptr);
  EXPECT_EQ(waitWhileInProgress(comm), ncclSystemError);
  EXPECT_OK(ncclCommAbort(comm));
}

// Otherwise the ranks whose threads have started wait for those whose threads have not.
TEST(Communicators, GroupWithoutThreadsFailsAsAWhole) {
  useOnce(Member(newId(), 0, 1).comm);  // starts the threads of the process
  const ncclUniqueId id = newId();
  ncclComm_t comms[3] = {};
  ASSERT_OK(ncclGroupStart());
  for (int rank = 0; rank < 3; rank++) {
    device::use(deviceOf(rank));
    ASSERT_OK(ncclCommInitRank(&comms[rank], 3, id, rank));
  }
  test::NoNewThreads refused;
  EXPECT_EQ(ncclGroupEnd(), ncclSystemError);
  for (ncclComm_t comm : comms) EXPECT_EQ(comm, nullptr);
}

TEST(Communicators, FinalizeAndDestroyInAnyOrder) {
  for (int round = 0; round < 3; round++) {
    const Ranks spare(2);
    ncclComm_t comms[4];
    ASSERT_OK(ncclCommInitAll(comms, 4, nullptr));
    onThreads(4, [&](int rank) { useOnce(comms[rank]); });
    for (int i = 0; i < 4; i++) {
      const int rank = (i * 3 + round) % 4;
      if (round != 1) {
        EXPECT_OK(ncclCommFinalize(comms[rank]));
      }
      EXPECT_OK(ncclCommDestroy(comms[rank]));
    }
    onThreads(2, [&](int rank) { useOnce(spare.comm(rank)); });
  }
}

// A rank may be done with everything before its peers have even mapped its memory.
TEST(Communicators, DestroyRightAfterTheFirstCall) {
  for (int round = 0; round < scaled(60, 15); round++) {
    const ncclUniqueId id = newId();
    constexpr int kRanks = 3;
    onThreads(kRanks, [&](int rank) {
      Member member(id, rank, kRanks);
      DeviceBuffer buffer(rank, 64);
      DeviceStream stream(rank);
      if (round % 2 == 0) {
        check(ncclBcast(buffer.as(), 4, ncclInt, 0, member.comm, stream));
      } else if (rank == 0) {
        check(ncclSend(buffer.as(), 4, ncclInt, 1, member.comm, stream));
      } else if (rank == 1) {
        check(ncclGroupStart());
        ncclRecv(buffer.as(), 4, ncclInt, 2, member.comm, stream);
        ncclRecv(buffer.as<char>() + 16, 4, ncclInt, 0, member.comm, stream);
        check(ncclGroupEnd());
      } else {
        std::this_thread::sleep_for(milliseconds(2));
        check(ncclSend(buffer.as(), 4, ncclInt, 1, member.comm, stream));
      }
      stream.synchronize();
    });
    if (HasFailure()) return;
  }
}

TEST(Communicators, DestroyDoesNotWaitForOthersOfTheDevice) {
  ncclComm_t stuck[2], idle[2];
  ASSERT_OK(ncclCommInitAll(stuck, 2, nullptr));
  ASSERT_OK(ncclCommInitAll(idle, 2, nullptr));
  onThreads(2, [&](int rank) { useOnce(stuck[rank], 400'000); });
  onThreads(2, [&](int rank) { useOnce(idle[rank]); });
  DeviceBuffer buffers[2] = {{0, 1 << 22}, {1, 1 << 22}};
  DeviceStream streams[2] = {DeviceStream(0), DeviceStream(1)};
  auto sum = [&](int rank) {
    void* buffer = buffers[rank].as();
    ASSERT_OK(ncclAllReduce(buffer, buffer, 1 << 20, ncclInt, ncclSum, stuck[rank], streams[rank]));
  };
  sum(0);
  for (ncclComm_t comm : idle) EXPECT_OK(ncclCommDestroy(comm));
  EXPECT_EQ(unisonoHostStreamQuery(streams[0]), ncclInProgress);
  sum(1);
  for (const DeviceStream& stream : streams) stream.synchronize();
  for (ncclComm_t comm : stuck) EXPECT_OK(ncclCommDestroy(comm));
}

TEST(Communicators, StreamsMayBeDestroyedBetweenCalls) {
  const Ranks ranks(2);
  for (int round = 0; round < 5; round++) {
    onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });  // on a stream of its own
  }
}

TEST(Communicators, ManyLeaveNothingBehind) {
  auto once = [] {
    const ncclUniqueId id = newId();
    onThreads(3, [&](int rank) {
      Member member(id, rank, 3);
      useOnce(member.comm);
      useOnce(member.comm, 200'000);
      ncclComm_t child = nullptr;
      check(ncclCommSplit(member.comm, 0, rank, &child, nullptr));
      check(ncclCommDestroy(child));
    });
  };
  for (int i = 0; i < 3; i++) once();
  const int descriptors = openDescriptors(), threads = runningThreads();
  for (int i = 0; i < scaled(40, 8); i++) once();
  // The roots of the last unique ids may still be on their way out.
  const auto deadline = steady_clock::now() + seconds(5);
  while ((openDescriptors() > descriptors || runningThreads() > threads) &&
         steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_LE(openDescriptors(), descriptors);
  EXPECT_LE(runningThreads(), threads);
}

TEST(Memory, AllocatedRegisteredAndFreed) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) {
    void* memory = nullptr;
    void* handle = nullptr;
    check(ncclMemAlloc(&memory, 1 << 16));
    check(ncclCommRegister(ranks.comm(rank), memory, 1 << 16, &handle));
    check(ncclAllReduce(memory, memory, 1 << 14, ncclFloat, ncclSum, ranks.comm(rank),
                        ranks.stream(rank)));
    check(unisonoHostStreamSynchronize(ranks.stream(rank)));
    check(ncclCommDeregister(ranks.comm(rank), handle));
    if (ncclCommDeregister(ranks.comm(rank), handle) == ncclSuccess) {
      throw std::runtime_error("deregistered twice");
    }
    check(ncclMemFree(memory));
    if (ncclMemFree(memory) != ncclInvalidArgument) throw std::runtime_error("freed twice");
  });
  EXPECT_OK(ncclMemFree(nullptr));
}

uint64_t memory(ncclComm_t comm, ncclCommMemStat_t stat) {
  uint64_t value = ~uint64_t{0};
  check(ncclCommMemStats(comm, stat, &value));
  return value;
}

// Connections and the copy of the input of an all-to-all in place take memory.
TEST(MemoryStatistics, FollowWhatIsAllocated) {
  constexpr size_t kMiB = 1 << 20, kSmall = 4 * kMiB, kLarge = 16 * kMiB;
  const Ranks ranks(2);
  const auto total = [&](int rank) { return memory(ranks.comm(rank), ncclStatGpuMemTotal); };
  const uint64_t made = total(0);
  EXPECT_GT(made, 0u);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank), 300'000); });
  const uint64_t connected = total(0);
  EXPECT_GE(connected, made);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank), 300'000); });
  EXPECT_EQ(total(0), connected);

  const auto exchange = [&](size_t bytes) {
    onThreads(2, [&](int rank) {
      DeviceBuffer buffer(ranks.device(rank), bytes);
      check(ncclAlltoAll(buffer.as(), buffer.as(), bytes / 2, ncclChar, ranks.comm(rank),
                         ranks.stream(rank)));
      device::synchronize(ranks.stream(rank));
    });
  };
  exchange(kSmall);
  const uint64_t small = total(0);
  EXPECT_GE(small, connected + kSmall);
  exchange(kLarge);
  EXPECT_EQ(total(0), small + kLarge - kSmall);
  for (int rank = 0; rank < 2; rank++) {
    EXPECT_EQ(memory(ranks.comm(rank), ncclStatGpuMemPersist) +
                  memory(ranks.comm(rank), ncclStatGpuMemSuspend),
              total(rank));
    EXPECT_GE(memory(ranks.comm(rank), ncclStatGpuMemSuspend), kLarge);
    EXPECT_EQ(memory(ranks.comm(rank), ncclStatGpuMemSuspended), 0u);
  }
}

// What this process has mapped of simulated device memory.
uint64_t mappedDeviceMemory() {
  std::ifstream maps("/proc/self/maps");
  uint64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:unisono-device") == std::string::npos) continue;
    char* end = nullptr;
    const uint64_t begin = std::strtoull(line.c_str(), &end, 16);
    bytes += std::strtoull(end + 1, nullptr, 16) - begin;
  }
  return bytes;
}

void suspendAll(const Ranks& ranks) {
  ranks.inGroup([&](int rank) { check(ncclCommSuspend(ranks.comm(rank), NCCL_SUSPEND_MEM)); });
}
void resumeAll(const Ranks& ranks) {
  ranks.inGroup([&](int rank) { check(ncclCommResume(ranks.comm(rank))); });
}

TEST(Suspends, FreeMemoryUntilTheyAreResumed) {
  const Ranks ranks(3);
  const auto use = [&] {
    onThreads(3, [&](int rank) {
      useOnce(ranks.comm(rank));
      useOnce(ranks.comm(rank), 300'000);
      const DeviceBuffer buffer(ranks.device(rank), 6 << 20);
      check(ncclAlltoAll(buffer.as(), buffer.as(), 2 << 20, ncclChar, ranks.comm(rank),
                         ranks.stream(rank)));
      device::synchronize(ranks.stream(rank));
    });
  };
  for (int round = 0; round < 3; round++) {
    use();
    uint64_t freed = 0;
    for (int rank = 0; rank < 3; rank++) {
      freed += memory(ranks.comm(rank), ncclStatGpuMemSuspend);
    }
    EXPECT_GT(freed, 0u);
    const uint64_t before = mappedDeviceMemory();
    suspendAll(ranks);
    EXPECT_LE(mappedDeviceMemory() + freed, before);
    for (int rank = 0; rank < 3; rank++) {
      EXPECT_EQ(memory(ranks.comm(rank), ncclStatGpuMemSuspended), 1u);
      EXPECT_EQ(memory(ranks.comm(rank), ncclStatGpuMemSuspend), 0u);
      EXPECT_EQ(memory(ranks.comm(rank), ncclStatGpuMemTotal),
                memory(ranks.comm(rank), ncclStatGpuMemPersist));
    }
    resumeAll(ranks);
    EXPECT_EQ(memory(ranks.comm(0), ncclStatGpuMemSuspended), 0u);
  }
  use();
}

TEST(Suspends, RefuseCallsAndWrongOrder) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  EXPECT_EQ(ncclCommResume(ranks.comm(0)), ncclInvalidUsage);
  EXPECT_EQ(ncclCommSuspend(ranks.comm(0), 2), ncclInvalidArgument);
  EXPECT_EQ(ncclCommSuspend(nullptr, NCCL_SUSPEND_MEM), ncclInvalidArgument);
  EXPECT_OK(ncclCommSuspend(ranks.comm(0), 0));
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  suspendAll(ranks);
  EXPECT_EQ(ncclCommSuspend(ranks.comm(0), NCCL_SUSPEND_MEM), ncclInvalidUsage);
  const DeviceBuffer buffer(0, 4);
  EXPECT_EQ(
      ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, ranks.comm(0), ranks.stream(0)),
      ncclInvalidUsage);
  ncclComm_t child = nullptr;
  EXPECT_EQ(ncclCommSplit(ranks.comm(0), 0, 0, &child, nullptr), ncclInvalidUsage);
  int count = 0;
  EXPECT_OK(ncclCommCount(ranks.comm(0), &count));
  EXPECT_EQ(count, 2);
  resumeAll(ranks);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
}

// In one group with a call, a second suspension or a split, whatever the order.
TEST(Suspends, AreRefusedWithOtherCallsInTheGroup) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  onThreads(2, [&](int rank) {
    const ncclComm_t comm = ranks.comm(rank);
    const DeviceBuffer buffer(ranks.device(rank), 4);
    ncclComm_t child = nullptr;
    const std::function<ncclResult_t()> others[] = {
        [&] {
          return ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, comm,
                               ranks.stream(rank));
        },
        [&] { return ncclCommSuspend(comm, NCCL_SUSPEND_MEM); },
        [&] { return ncclCommSplit(comm, 0, rank, &child, nullptr); }};
    for (const auto& other : others) {
      check(ncclGroupStart());
      check(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
      check(other());
      EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
      EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("suspends"), std::string::npos);
      EXPECT_EQ(child, nullptr);
      useOnce(comm);
    }
  });
}

TEST(Suspends, WaitForWorkAndMayEndInDestruction) {
  const Ranks ranks(2);
  const DeviceBuffer buffers[] = {{0, 400'000}, {1, 400'000}};
  ranks.inGroup([&](int rank) {
    check(ncclAllReduce(buffers[rank].as(), buffers[rank].as(), 100'000, ncclInt, ncclSum,
                        ranks.comm(rank), ranks.stream(rank)));
  });
  suspendAll(ranks);
  for (int rank = 0; rank < 2; rank++) EXPECT_TRUE(device::isIdle(ranks.stream(rank)));
}

// A group that fails before it suspends anything leaves the communicators as they were.
TEST(Suspends, ThatAreDroppedHoldUpNothing) {
  const Ranks ranks(2);
  check(ncclGroupStart());
  EXPECT_OK(ncclCommSuspend(ranks.comm(0), NCCL_SUSPEND_MEM));
  EXPECT_EQ(ncclCommResume(nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
  suspendAll(ranks);
  resumeAll(ranks);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
}

TEST(Suspends, OfNonblockingCommunicators) {
  const ncclUniqueId id = newId();
  onThreads(2, [&](int rank) {
    ncclConfig_t config = nonblocking();
    ncclComm_t comm = nullptr;
    const ncclResult_t made = ncclCommInitRankConfig(&comm, 2, id, rank, &config);
    checkFinished(comm, made);
    for (int round = 0; round < 2; round++) {
      DeviceStream stream(rank);
      const DeviceBuffer buffer(rank, 4);
      checkFinished(comm,
                    ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, comm, stream));
      checkFinished(comm, ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
      checkFinished(comm, ncclCommResume(comm));
    }
    check(ncclCommDestroy(comm));
  });
}

TEST(MemoryStatistics, RefuseWrongArguments) {
  const Ranks ranks(1);
  uint64_t value = 7;
  EXPECT_EQ(ncclCommMemStats(ranks.comm(0), ncclStatGpuMemTotal, nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclCommMemStats(nullptr, ncclStatGpuMemTotal, &value), ncclInvalidArgument);
  EXPECT_EQ(ncclCommMemStats(ranks.comm(0), static_cast<ncclCommMemStat_t>(4), &value),
            ncclInvalidArgument);
  EXPECT_EQ(value, 7u);
}

}  // namespace
}  // namespace unisono::system_test
