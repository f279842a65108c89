// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <future>
#include <latch>
#include <thread>

#include "testing.h"

// What goes on after a failure: shrink, revoke, splits that fail. Deaths are in processes_test.cpp.
namespace unisono::system_test {
namespace {

ncclResult_t stateOf(ncclComm_t comm) {
  ncclResult_t state = ncclInternalError;
  check(ncclCommGetAsyncError(comm, &state));
  return state;
}

// The others keep their order, and the parent can still be used.
TEST(Shrinks, OfAHealthyCommunicator) {
  const Ranks ranks(4);
  onThreads(4, [&](int rank) {
    if (rank == 1) return;
    int excluded[] = {1};
    ncclComm_t child = nullptr;
    check(ncclCommShrink(ranks.comm(rank), excluded, 1, &child, nullptr, NCCL_SHRINK_DEFAULT));
    int count = 0, number = -1;
    check(ncclCommCount(child, &count));
    check(ncclCommUserRank(child, &number));
    EXPECT_EQ(count, 3);
    EXPECT_EQ(number, rank == 0 ? 0 : rank - 1);
    useOnce(child);
    useOnce(child, 300'000);
    check(ncclCommDestroy(child));
  });
  onThreads(4, [&](int rank) { useOnce(ranks.comm(rank)); });
}

TEST(Shrinks, RefuseWrongArguments) {
  const Ranks ranks(2);
  ncclComm_t child = nullptr;
  int other[] = {1}, itself[] = {0}, unknown[] = {2};
  const auto shrink = [&](int* excluded, int count, int flags) {
    return ncclCommShrink(ranks.comm(0), excluded, count, &child, nullptr, flags);
  };
  EXPECT_EQ(shrink(nullptr, 1, NCCL_SHRINK_ABORT), ncclInvalidArgument);
  EXPECT_EQ(shrink(other, 0, NCCL_SHRINK_ABORT), ncclInvalidArgument);
  EXPECT_EQ(shrink(itself, 1, NCCL_SHRINK_ABORT), ncclInvalidArgument);
  EXPECT_EQ(shrink(unknown, 1, NCCL_SHRINK_ABORT), ncclInvalidArgument);
  EXPECT_EQ(shrink(other, 1, 2), ncclInvalidArgument);
  EXPECT_EQ(ncclCommShrink(ranks.comm(0), other, 1, nullptr, nullptr, 0), ncclInvalidArgument);
  EXPECT_EQ(child, nullptr);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
}

// Its call waits for a rank that does not make it.
TEST(Shrinks, AbortWhatIsRunning) {
  const Ranks ranks(3);
  onThreads(3, [&](int rank) { useOnce(ranks.comm(rank)); });
  onThreads(3, [&](int rank) {
    if (rank == 2) return;
    DeviceBuffer buffer(deviceOf(rank), 4000);
    check(ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclInt, ncclSum, ranks.comm(rank),
                        ranks.stream(rank)));
    int excluded[] = {2};
    ncclComm_t child = nullptr;
    check(ncclCommShrink(ranks.comm(rank), excluded, 1, &child, nullptr, NCCL_SHRINK_ABORT));
    device::synchronize(ranks.stream(rank));
    useOnce(child);
    check(ncclCommDestroy(child));
    EXPECT_EQ(ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, ranks.comm(rank),
                            ranks.stream(rank)),
              ncclInvalidUsage);
  });
}

TEST(Revokes, EndACallAndLeaveWhatCanBeSplit) {
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  device::use(deviceOf(0));
  DeviceBuffer buffer(deviceOf(0), 4000);
  const auto sum = [&] {
    return ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclInt, ncclSum, ranks.comm(0),
                         ranks.stream(0));
  };
  ASSERT_OK(sum());
  EXPECT_EQ(ncclCommRevoke(ranks.comm(0), 1), ncclInvalidArgument);
  for (int rank = 0; rank < 2; rank++) {
    EXPECT_OK(ncclCommRevoke(ranks.comm(rank), NCCL_REVOKE_DEFAULT));
    EXPECT_EQ(stateOf(ranks.comm(rank)), ncclSuccess);
    EXPECT_EQ(ncclCommRevoke(ranks.comm(rank), NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
  }
  device::synchronize(ranks.stream(0));
  EXPECT_EQ(sum(), ncclInvalidUsage);
  EXPECT_OK(ncclCommRevoke(nullptr, NCCL_REVOKE_DEFAULT));
  onThreads(2, [&](int rank) {
    ncclComm_t child = nullptr;
    check(ncclCommSplit(ranks.comm(rank), 0, rank, &child, nullptr));
    useOnce(child);
    check(ncclCommDestroy(child));
  });
}

// The other rank makes no call, so that this one finds nobody to connect to.
TEST(Revokes, EndACallThatIsConnecting) {
  const Ranks ranks(2);
  const DeviceBuffer buffer(deviceOf(0), 4000);
  auto call = std::async(std::launch::async, [&] {
    device::use(deviceOf(0));
    return ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclInt, ncclSum, ranks.comm(0),
                         ranks.stream(0));
  });
  ASSERT_EQ(call.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  EXPECT_OK(ncclCommRevoke(ranks.comm(0), NCCL_REVOKE_DEFAULT));
  ASSERT_EQ(call.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_NE(call.get(), ncclSuccess);
  EXPECT_EQ(stateOf(ranks.comm(0)), ncclSuccess);
  EXPECT_OK(ncclCommRevoke(ranks.comm(1), NCCL_REVOKE_DEFAULT));
  onThreads(2, [&](int rank) {
    ncclComm_t child = nullptr;
    check(ncclCommSplit(ranks.comm(rank), 0, rank, &child, nullptr));
    useOnce(child);
    check(ncclCommDestroy(child));
  });
}

// One rank gives up before the other one comes, which then fails with the cause of the first.
TEST(Splits, ThatFailLeaveTheParent) {
  const Setting limit("UNISONO_BOOTSTRAP_TIMEOUT", "2");
  const Ranks ranks(3);
  for (int round = 0; round < 2; round++) {
    std::latch gaveUp(1);
    onThreads(3, [&](int rank) {
      ncclComm_t child = nullptr;
      if (rank == 1) gaveUp.wait();
      EXPECT_NE(ncclCommSplit(ranks.comm(rank), 0, 0, &child, nullptr), ncclSuccess);
      EXPECT_EQ(child, nullptr);
      if (rank == 0) gaveUp.count_down();
      EXPECT_EQ(stateOf(ranks.comm(rank)), ncclSuccess);
    });
    onThreads(3, [&](int rank) {
      useOnce(ranks.comm(rank));
      ncclComm_t child = nullptr;
      check(ncclCommSplit(ranks.comm(rank), 0, 0, &child, nullptr));
      useOnce(child);
      check(ncclCommDestroy(child));
    });
  }
}

// It gives the split up, which the others hear of when they come.
TEST(Splits, ThatOneRankGivesUpByDestroyingTheChild) {
  const Ranks ranks(3);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  device::use(deviceOf(1));
  ncclComm_t child = nullptr;
  ASSERT_EQ(ncclCommSplit(ranks.comm(1), 0, 0, &child, &config), ncclInProgress);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_OK(ncclCommDestroy(child));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  onThreads(3, [&](int rank) {
    ncclComm_t late = nullptr;
    // The parts of all others are there when rank 0 comes.
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    if (rank != 1) {
      EXPECT_EQ(ncclCommSplit(ranks.comm(rank), 0, 0, &late, nullptr), ncclRemoteError);
      EXPECT_NE(std::strstr(ncclGetLastError(nullptr), "Rank 1 reports"), nullptr)
          << ncclGetLastError(nullptr);
    }
    EXPECT_EQ(stateOf(ranks.comm(rank)), ncclSuccess);
  });
  onThreads(3, [&](int rank) {
    ncclComm_t again = nullptr;
    useOnce(ranks.comm(rank));
    check(ncclCommSplit(ranks.comm(rank), 0, 0, &again, nullptr));
    useOnce(again);
    check(ncclCommDestroy(again));
  });
}

// Of a communicator and one that was split from it, which share connections, one is aborted in a
// call that one rank does not make. The other one goes on, and may be split once more.
TEST(Splits, AreNotAbortedWithTheirParentNorItWithThem) {
  for (const bool abortsParent : {false, true}) {
    const ncclUniqueId id = newId();
    onThreads(3, [&](int rank) {
      Member parent(id, rank, 3);
      ncclComm_t child = nullptr, other = nullptr;
      check(ncclCommSplit(parent.comm, 0, -rank, &child, nullptr));
      useOnce(child);
      useOnce(parent.comm);
      ncclComm_t kept = parent.comm, aborted = child;
      if (abortsParent) std::swap(kept, aborted);
      DeviceBuffer buffer(deviceOf(rank), 4000);
      const DeviceStream stream(deviceOf(rank));
      if (rank != 1) {
        // An error where another rank has aborted already.
        static_cast<void>(
            ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclInt, ncclSum, aborted, stream));
      }
      if (rank == 2) check(ncclCommRevoke(aborted, NCCL_REVOKE_DEFAULT));
      check(ncclCommAbort(aborted));
      device::synchronize(stream);
      useOnce(kept);
      useOnce(kept, 300'000);
      EXPECT_EQ(stateOf(kept), ncclSuccess);
      check(ncclCommSplit(kept, 0, rank, &other, nullptr));
      useOnce(other);
      check(ncclCommDestroy(kept));
      useOnce(other);
      check(ncclCommDestroy(other));
      parent.comm = nullptr;
    });
  }
}

ncclUniqueId growId(ncclComm_t comm) {
  ncclUniqueId id;
  check(ncclCommGetUniqueId(comm, &id));
  return id;
}

void expectRank(ncclComm_t comm, int rank, int ranks) {
  int count = 0, number = -1;
  check(ncclCommCount(comm, &count));
  check(ncclCommUserRank(comm, &number));
  EXPECT_EQ(count, ranks);
  EXPECT_EQ(number, rank);
}

// Existing ranks keep their numbers and their communicator. The rank that has made the id passes it
// or nothing, as NCCL's header and its guide have it.
TEST(Grows, ByNewRanks) {
  const Ranks ranks(2);
  for (const bool passesId : {true, false}) {
    const ncclUniqueId id = growId(ranks.comm(1));
    onThreads(5, [&](int rank) {
      ncclComm_t grown = nullptr;
      if (rank < 2) {
        check(ncclCommGrow(ranks.comm(rank), 5, rank == 1 && passesId ? &id : nullptr, -1, &grown,
                           nullptr));
      } else {
        check(ncclCommGrow(nullptr, 5, &id, rank, &grown, nullptr));
      }
      expectRank(grown, rank, 5);
      useOnce(grown);
      useOnce(grown, 300'000);
      check(ncclCommDestroy(grown));
    });
    onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  }
}

// One rank becomes two, then three: each time the last communicator grows.
TEST(Grows, AgainAndAgain) {
  const Ranks one(1);
  std::vector<ncclComm_t> comms{one.comm(0)};
  for (int total = 2; total <= 4; total++) {
    const ncclUniqueId id = growId(comms.front());
    std::vector<ncclComm_t> grown(static_cast<size_t>(total));
    onThreads(total, [&](int rank) {
      const bool isNew = rank == total - 1;
      ncclComm_t& to = grown[static_cast<size_t>(rank)];
      check(ncclCommGrow(isNew ? nullptr : comms[static_cast<size_t>(rank)], total,
                         isNew ? &id : nullptr, isNew ? rank : -1, &to, nullptr));
      if (!isNew && total > 2) check(ncclCommDestroy(comms[static_cast<size_t>(rank)]));
      useOnce(to);
    });
    comms = grown;
  }
  for (const ncclComm_t comm : comms) EXPECT_OK(ncclCommDestroy(comm));
}

TEST(Grows, NonblockingAndInAGroup) {
  const Ranks ranks(1);
  const ncclUniqueId id = growId(ranks.comm(0));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t grown[2] = {};
  ASSERT_OK(ncclGroupStart());
  device::use(deviceOf(0));
  EXPECT_OK(ncclCommGrow(ranks.comm(0), 2, nullptr, -1, &grown[0], &config));
  device::use(deviceOf(1));
  EXPECT_OK(ncclCommGrow(nullptr, 2, &id, 1, &grown[1], &config));
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  for (const ncclComm_t comm : grown) {
    while (stateOf(comm) == ncclInProgress) std::this_thread::yield();
    EXPECT_EQ(stateOf(comm), ncclSuccess);
  }
  for (int rank = 0; rank < 2; rank++) {
    expectRank(grown[rank], rank, 2);
    EXPECT_OK(ncclCommDestroy(grown[rank]));
  }
}

// What is wrong on all ranks is found on all, and the communicator can still be used and grown.
TEST(Grows, RefuseWrongArguments) {
  const Ranks ranks(2);
  ncclComm_t grown = nullptr;
  ncclUniqueId id{};
  EXPECT_EQ(ncclCommGetUniqueId(ranks.comm(0), nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclCommGetUniqueId(nullptr, &id), ncclInvalidArgument);
  const auto grow = [&](int total, const ncclUniqueId* with, int rank) {
    return ncclCommGrow(ranks.comm(0), total, with, rank, &grown, nullptr);
  };
  EXPECT_EQ(grow(2, nullptr, -1), ncclInvalidArgument);
  EXPECT_EQ(grow(3, nullptr, 0), ncclInvalidArgument);
  EXPECT_EQ(ncclCommGrow(ranks.comm(0), 3, nullptr, -1, nullptr, nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclCommGrow(nullptr, 3, nullptr, 2, &grown, nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclCommGrow(nullptr, 3, &id, 2, &grown, nullptr), ncclInvalidArgument);  // no id
  const auto expectOnBoth = [&](ncclResult_t result, int totalOfRank1) {
    onThreads(2, [&](int rank) {
      ncclComm_t none = nullptr;
      EXPECT_EQ(
          ncclCommGrow(ranks.comm(rank), rank == 0 ? 3 : totalOfRank1, nullptr, -1, &none, nullptr),
          result);
      EXPECT_EQ(none, nullptr);
      EXPECT_EQ(stateOf(ranks.comm(rank)), ncclSuccess);
    });
  };
  expectOnBoth(ncclInvalidUsage, 3);  // nobody has made an id

  id = growId(ranks.comm(0));
  ncclUniqueId second;
  EXPECT_EQ(ncclCommGetUniqueId(ranks.comm(0), &second), ncclInvalidUsage);
  const ncclUniqueId other = newId();
  EXPECT_EQ(grow(3, &other, -1), ncclInvalidArgument);
  expectOnBoth(ncclInvalidArgument, 4);  // another number of ranks
  EXPECT_EQ(grown, nullptr);

  onThreads(3, [&](int rank) {
    ncclComm_t made = nullptr;
    check(rank < 2 ? ncclCommGrow(ranks.comm(rank), 3, nullptr, -1, &made, nullptr)
                   : ncclCommGrow(nullptr, 3, &id, rank, &made, nullptr));
    useOnce(made);
    check(ncclCommDestroy(made));
  });
}

// A new rank never comes. The communicator stays, and can grow with another id.
TEST(Grows, ThatFailLeaveTheCommunicator) {
  const Setting limit("UNISONO_BOOTSTRAP_TIMEOUT", "4");
  const Ranks ranks(2);
  growId(ranks.comm(0));
  onThreads(2, [&](int rank) {
    ncclComm_t grown = nullptr;
    EXPECT_NE(ncclCommGrow(ranks.comm(rank), 3, nullptr, -1, &grown, nullptr), ncclSuccess);
    EXPECT_EQ(grown, nullptr);
    EXPECT_EQ(stateOf(ranks.comm(rank)), ncclSuccess);
    useOnce(ranks.comm(rank));
  });
  growId(ranks.comm(0));  // the first one is used up
}

}  // namespace
}  // namespace unisono::system_test
