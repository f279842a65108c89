// SPDX-License-Identifier: Apache-2.0
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>

#include "testing.h"
#include "unisono/config.h"

// Wrong use: the right code, a text that says what to do, and a library that works afterwards.
namespace unisono::system_test {
namespace {

// That `result` is `code`, with a text that has `part` in it.
::testing::AssertionResult failedWith(ncclResult_t result, ncclResult_t code, const char* part) {
  const std::string text = ncclGetLastError(nullptr);
  if (result != code) {
    return ::testing::AssertionFailure() << "result " << result << " instead of " << code;
  }
  if (text.find(part) == std::string::npos) {
    return ::testing::AssertionFailure() << "\"" << text << "\" does not have \"" << part << "\"";
  }
  // "<what happened>. <what to do>"
  if (text.find(". ") == std::string::npos) {
    return ::testing::AssertionFailure() << "\"" << text << "\" has no remedy";
  }
  return ::testing::AssertionSuccess();
}
#define EXPECT_FAILED(call, code, part) EXPECT_TRUE(failedWith(call, code, part))

class Misuse : public ::testing::Test {
 protected:
  // Every rank still works.
  void TearDown() override {
    onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  }

  ncclResult_t allReduce(const void* in, void* out, size_t count = 16,
                         ncclDataType_t type = ncclInt, ncclRedOp_t op = ncclSum) {
    return ncclAllReduce(in, out, count, type, op, ranks.comm(0), ranks.stream(0));
  }

  const Ranks ranks{2};
  DeviceBuffer mine{0, 4096}, others{1, 4096};
};

TEST_F(Misuse, Buffers) {
  int host[16] = {};
  EXPECT_FAILED(allReduce(nullptr, mine.as()), ncclInvalidArgument, "sendbuff is null");
  EXPECT_FAILED(allReduce(mine.as(), nullptr), ncclInvalidArgument, "recvbuff is null");
  EXPECT_FAILED(allReduce(host, mine.as()), ncclInvalidArgument,
                "not memory that the device can access");
  EXPECT_FAILED(allReduce(mine.as(), host), ncclInvalidArgument,
                "not memory that the device can access");
  EXPECT_FAILED(allReduce(mine.as() + 1, mine.as()), ncclInvalidArgument, "aligned");
  EXPECT_FAILED(allReduce(mine.as(), others.as()), ncclInvalidArgument, "on device 1");
  EXPECT_FAILED(allReduce(reinterpret_cast<void*>(uintptr_t{64}), mine.as()), ncclInvalidArgument,
                "not memory that the device can access");
  EXPECT_FAILED(ncclSend(nullptr, 1, ncclInt, 1, ranks.comm(0), ranks.stream(0)),
                ncclInvalidArgument, "sendbuff");
  EXPECT_FAILED(ncclRecv(host, 1, ncclInt, 1, ranks.comm(0), ranks.stream(0)), ncclInvalidArgument,
                "recvbuff");
}

TEST_F(Misuse, Numbers) {
  void* b = mine.as();
  ncclComm_t comm = ranks.comm(0);
  cudaStream_t stream = ranks.stream(0);
  for (int bad : {-1, 12, INT_MAX}) {
    EXPECT_FAILED(allReduce(b, b, 16, static_cast<ncclDataType_t>(bad)), ncclInvalidArgument,
                  "not a data type");
  }
  for (int bad : {-1, 5, 1000, static_cast<int>(ncclMaxRedOp)}) {
    EXPECT_FAILED(allReduce(b, b, 16, ncclInt, static_cast<ncclRedOp_t>(bad)), ncclInvalidArgument,
                  "operator");
  }
  for (int bad : {-1, 2, INT_MAX, INT_MIN}) {
    EXPECT_FAILED(ncclBroadcast(b, b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "root");
    EXPECT_FAILED(ncclBcast(b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "root");
    EXPECT_FAILED(ncclReduce(b, b, 4, ncclInt, ncclSum, bad, comm, stream), ncclInvalidArgument,
                  "root");
    EXPECT_FAILED(ncclGather(b, b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "root");
    EXPECT_FAILED(ncclScatter(b, b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "root");
    EXPECT_FAILED(ncclSend(b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "peer");
    EXPECT_FAILED(ncclRecv(b, 4, ncclInt, bad, comm, stream), ncclInvalidArgument, "peer");
  }
  for (size_t bad : {std::numeric_limits<size_t>::max(), static_cast<size_t>(-16)}) {
    EXPECT_FAILED(allReduce(b, b, bad), ncclInvalidArgument, "count");
    EXPECT_FAILED(ncclAllGather(b, b, bad, ncclInt8, comm, stream), ncclInvalidArgument, "count");
  }
}

TEST_F(Misuse, Handles) {
  void* b = mine.as();
  int value = 0;
  ncclResult_t state;
  char garbage[64] = {};
  DeviceStream stream(0);
  Ranks* gone = new Ranks(2);
  const ncclComm_t destroyed = gone->comm(0);
  delete gone;
  for (ncclComm_t bad : {static_cast<ncclComm_t>(nullptr), reinterpret_cast<ncclComm_t>(garbage),
                         reinterpret_cast<ncclComm_t>(uintptr_t{1}), destroyed}) {
    EXPECT_FAILED(ncclAllReduce(b, b, 4, ncclInt, ncclSum, bad, stream), ncclInvalidArgument,
                  "ommunicator");
    EXPECT_FAILED(ncclCommCount(bad, &value), ncclInvalidArgument, "ommunicator");
    EXPECT_FAILED(ncclCommCuDevice(bad, &value), ncclInvalidArgument, "ommunicator");
    EXPECT_FAILED(ncclCommUserRank(bad, &value), ncclInvalidArgument, "ommunicator");
    EXPECT_FAILED(ncclCommGetAsyncError(bad, &state), ncclInvalidArgument, "ommunicator");
    EXPECT_FAILED(ncclCommDeregister(bad, nullptr), ncclInvalidArgument, "ommunicator");
    ncclComm_t child = nullptr;
    EXPECT_FAILED(ncclCommSplit(bad, 0, 0, &child, nullptr), ncclInvalidArgument, "ommunicator");
    EXPECT_STRNE(ncclGetLastError(bad), "");
    if (bad != nullptr) {
      EXPECT_FAILED(ncclCommFinalize(bad), ncclInvalidArgument, "ommunicator");
      EXPECT_FAILED(ncclCommDestroy(bad), ncclInvalidArgument, "ommunicator");
      EXPECT_FAILED(ncclCommAbort(bad), ncclInvalidArgument, "ommunicator");
    }
  }
  EXPECT_OK(ncclCommFinalize(nullptr));
  EXPECT_OK(ncclCommDestroy(nullptr));
  EXPECT_OK(ncclCommAbort(nullptr));
  // A stream that is none.
  EXPECT_FAILED(ncclAllReduce(b, b, 4, ncclInt, ncclSum, ranks.comm(0),
                              reinterpret_cast<cudaStream_t>(garbage)),
                ncclInvalidArgument, "stream");
}

TEST_F(Misuse, NullResults) {
  EXPECT_FAILED(ncclGetVersion(nullptr), ncclInvalidArgument, "version is null");
  EXPECT_FAILED(ncclGetUniqueId(nullptr), ncclInvalidArgument, "uniqueId is null");
  EXPECT_FAILED(ncclCommCount(ranks.comm(0), nullptr), ncclInvalidArgument, "count is null");
  EXPECT_FAILED(ncclCommCuDevice(ranks.comm(0), nullptr), ncclInvalidArgument, "device is null");
  EXPECT_FAILED(ncclCommUserRank(ranks.comm(0), nullptr), ncclInvalidArgument, "rank is null");
  EXPECT_FAILED(ncclCommGetAsyncError(ranks.comm(0), nullptr), ncclInvalidArgument, "is null");
  EXPECT_FAILED(ncclCommSplit(ranks.comm(0), 0, 0, nullptr, nullptr), ncclInvalidArgument,
                "newcomm is null");
  EXPECT_FAILED(ncclCommInitAll(nullptr, 1, nullptr), ncclInvalidArgument, "comm is null");
  EXPECT_FAILED(ncclCommInitRank(nullptr, 1, newId(), 0), ncclInvalidArgument, "comm is null");
  EXPECT_FAILED(ncclMemAlloc(nullptr, 1), ncclInvalidArgument, "ptr is null");
  EXPECT_FAILED(ncclCommRegister(ranks.comm(0), mine.as(), 16, nullptr), ncclInvalidArgument,
                "handle is null");
  void* nothing = &nothing;
  EXPECT_OK(ncclMemAlloc(&nothing, 0));
  EXPECT_EQ(nothing, nullptr);
  EXPECT_FAILED(ncclMemFree(mine.as() + 8), ncclInvalidArgument, "ncclMemAlloc");
  EXPECT_STRNE(ncclGetErrorString(static_cast<ncclResult_t>(99)), "");
}

TEST_F(Misuse, Registrations) {
  void* handle = nullptr;
  ASSERT_OK(ncclCommRegister(ranks.comm(0), mine.as(), 16, &handle));
  EXPECT_FAILED(ncclCommDeregister(ranks.comm(1), handle), ncclInvalidUsage, "registration");
  EXPECT_OK(ncclCommDeregister(ranks.comm(0), handle));
  EXPECT_FAILED(ncclCommDeregister(ranks.comm(0), handle), ncclInvalidUsage, "registration");
  EXPECT_OK(ncclCommDeregister(ranks.comm(0), nullptr));
  EXPECT_OK(ncclCommWindowDeregister(ranks.comm(0), nullptr));
}

TEST_F(Misuse, Windows) {
  const ncclComm_t comm = ranks.comm(0);
  int host[16] = {};
  ncclWindow_t window = nullptr;
  const auto add = [&](void* buffer, size_t bytes, int flags) {
    return ncclCommWindowRegister(comm, buffer, bytes, &window, flags);
  };
  EXPECT_FAILED(ncclCommWindowRegister(comm, mine.as(), 16, nullptr, NCCL_WIN_DEFAULT),
                ncclInvalidArgument, "win is null");
  EXPECT_FAILED(ncclCommWindowRegister(nullptr, mine.as(), 16, &window, NCCL_WIN_DEFAULT),
                ncclInvalidArgument, "communicator is null");
  for (const int flags : {4, -1, 1 << 30}) {
    EXPECT_FAILED(add(mine.as(), 16, flags), ncclInvalidArgument, "winFlags");
  }
  EXPECT_FAILED(add(mine.as() + 16, 16, 0), ncclInvalidArgument, "multiple of 4096");
  EXPECT_FAILED(add(host, sizeof(host), 0), ncclInvalidArgument, "not memory that the device");
  // Nothing to register, and no other rank is waited for.
  EXPECT_OK(add(nullptr, 16, 0));
  EXPECT_OK(add(mine.as(), 0, 0));
  EXPECT_EQ(window, nullptr);

  // All ranks by one thread, in a group, as one window with NCCL's other flag and one without.
  ncclWindow_t windows[2] = {};
  for (const int flags : {NCCL_WIN_DEFAULT, NCCL_WIN_COLL_SYMMETRIC}) {
    ranks.inGroup([&](int rank) {
      auto* buffer = rank == 0 ? mine.as() : others.as();
      EXPECT_OK(ncclCommWindowRegister(ranks.comm(rank), buffer, 16, &windows[rank], flags));
    });
    EXPECT_NE(windows[0], nullptr);
    EXPECT_FAILED(ncclCommWindowDeregister(comm, windows[1]), ncclInvalidUsage, "not a window");
    EXPECT_FAILED(ncclCommDeregister(comm, windows[0]), ncclInvalidUsage, "not a registration");
    for (int rank = 0; rank < 2; rank++) {
      EXPECT_OK(ncclCommWindowDeregister(ranks.comm(rank), windows[rank]));
    }
    EXPECT_FAILED(ncclCommWindowDeregister(comm, windows[0]), ncclInvalidUsage, "not a window");
  }

  // With the calls of a group, but not with those that make communicators.
  ranks.inGroup([&](int rank) {
    int* buffer = (rank == 0 ? mine : others).as<int>();
    EXPECT_OK(ncclCommWindowRegister(ranks.comm(rank), buffer, 64, &windows[rank], 0));
    EXPECT_OK(
        ncclAllReduce(buffer, buffer, 16, ncclInt, ncclSum, ranks.comm(rank), ranks.stream(rank)));
  });
  ranks.synchronize();
  for (int rank = 0; rank < 2; rank++) {
    EXPECT_OK(ncclCommWindowDeregister(ranks.comm(rank), windows[rank]));
  }
  ncclComm_t split = nullptr;
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(add(mine.as(), 16, 0));
  EXPECT_OK(ncclCommSplit(comm, 0, 0, &split, nullptr));
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidUsage, "window");
}

// What NCCL's headers since 2.29 declare.
extern "C" {
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr);
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank,
                                     void** outPtr);
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void** outPtr);
}

TEST_F(Misuse, AddressesInWindows) {
  constexpr size_t kBytes = 64, kOffset = 48;
  ncclWindow_t windows[2] = {};
  ranks.inGroup([&](int rank) {
    auto* buffer = rank == 0 ? mine.as() : others.as();
    EXPECT_OK(ncclCommWindowRegister(ranks.comm(rank), buffer, kBytes, &windows[rank], 0));
  });
  for (const ncclWindow_t window : windows) {
    for (int rank = 0; rank < 2; rank++) {
      void* address = nullptr;
      EXPECT_OK(ncclGetPeerDevicePointer(window, kOffset, rank, &address));
      EXPECT_EQ(address, (rank == 0 ? mine : others).as() + kOffset);
      EXPECT_OK(ncclGetLsaDevicePointer(window, kOffset, rank, &address));
      EXPECT_EQ(address, (rank == 0 ? mine : others).as() + kOffset);
    }
    void* multicast = mine.as();
    EXPECT_OK(ncclGetLsaMultimemDevicePointer(window, kOffset, &multicast));
    EXPECT_EQ(multicast, nullptr) << "there are no such addresses";
  }

  void* untouched = mine.as();
  EXPECT_FAILED(ncclGetPeerDevicePointer(nullptr, 0, 0, &untouched), ncclInvalidArgument,
                "window is null");
  EXPECT_FAILED(ncclGetPeerDevicePointer(windows[0], 0, 0, nullptr), ncclInvalidArgument,
                "outPtr is null");
  for (const int wrong : {-1, 2}) {
    EXPECT_FAILED(ncclGetPeerDevicePointer(windows[0], 0, wrong, &untouched), ncclInvalidArgument,
                  "peer must be");
    EXPECT_FAILED(ncclGetLsaDevicePointer(windows[0], 0, wrong, &untouched), ncclInvalidArgument,
                  "lsaRank is");
  }
  for (const size_t wrong : {kBytes, SIZE_MAX}) {
    EXPECT_FAILED(ncclGetPeerDevicePointer(windows[0], wrong, 1, &untouched), ncclInvalidArgument,
                  "the window has 64 bytes");
    EXPECT_FAILED(ncclGetLsaDevicePointer(windows[0], wrong, 1, &untouched), ncclInvalidArgument,
                  "the window has 64 bytes");
    EXPECT_FAILED(ncclGetLsaMultimemDevicePointer(windows[0], wrong, &untouched),
                  ncclInvalidArgument, "the window has 64 bytes");
  }
  void* registration = nullptr;
  ASSERT_OK(ncclCommRegister(ranks.comm(0), mine.as(), 16, &registration));
  for (void* const wrong : {registration, static_cast<void*>(mine.as())}) {
    EXPECT_FAILED(ncclGetPeerDevicePointer(reinterpret_cast<ncclWindow_t>(wrong), 0, 0, &untouched),
                  ncclInvalidArgument, "not a window");
  }
  EXPECT_OK(ncclCommDeregister(ranks.comm(0), registration));
  for (int rank = 0; rank < 2; rank++) {
    EXPECT_OK(ncclCommWindowDeregister(ranks.comm(rank), windows[rank]));
    EXPECT_FAILED(ncclGetPeerDevicePointer(windows[rank], 0, 0, &untouched), ncclInvalidArgument,
                  "not a window");
  }
  EXPECT_EQ(untouched, mine.as());
}

struct Properties {
  size_t size;
  unsigned magic, version;
  int rank, ranks, device, driverDevice;
  bool hasDeviceApi, hasMulticast;
  int fields[4];
};
struct Team {
  int ranks, rank, stride;
};
extern "C" ncclResult_t ncclCommQueryProperties(ncclComm_t comm, Properties* props);
extern "C" {
Team ncclTeamWorld(ncclComm_t comm);
Team ncclTeamLsa(ncclComm_t comm);
Team ncclTeamRail(ncclComm_t comm);
int ncclTeamRankToWorld(ncclComm_t comm, Team team, int rank);
int ncclTeamRankToLsa(ncclComm_t comm, Team team, int rank);
}

TEST_F(Misuse, Properties) {
  Properties asked[2];
  // The size of 2.29.2, of 2.30, and one of a later version.
  for (const size_t size : {size_t{40}, size_t{56}, sizeof(asked)}) {
    std::memset(asked, 0x5a, sizeof(asked));
    asked[0].size = size;
    asked[0].magic = 0xcafebeef;
    asked[0].version = 23007;
    ASSERT_OK(ncclCommQueryProperties(ranks.comm(1), &asked[0]));
    EXPECT_EQ(asked[0].size, size);
    EXPECT_EQ(asked[0].version, 23007u);
    EXPECT_EQ(asked[0].rank, 1);
    EXPECT_EQ(asked[0].ranks, 2);
    EXPECT_EQ(asked[0].device, ranks.device(1));
    EXPECT_FALSE(asked[0].hasDeviceApi || asked[0].hasMulticast);
    if (size >= 56) {
      EXPECT_EQ(asked[0].fields[1], 1) << "teams that load and store";
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(asked);
    for (size_t i = 56; i < sizeof(asked); i++) EXPECT_EQ(bytes[i], i < size ? 0 : 0x5a) << i;
    for (size_t i = size; i < 56; i++) EXPECT_EQ(bytes[i], 0x5a) << i;
  }
  EXPECT_FAILED(ncclCommQueryProperties(ranks.comm(0), nullptr), ncclInvalidArgument, "null");
  asked[0].magic = 1;
  EXPECT_FAILED(ncclCommQueryProperties(ranks.comm(0), &asked[0]), ncclInvalidUsage, "initialized");
  const Team world = ncclTeamWorld(ranks.comm(1));
  EXPECT_EQ(world.ranks, 2);
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.stride, 1);
  EXPECT_EQ(ncclTeamRankToWorld(ranks.comm(1), world, 0), 0);
  EXPECT_EQ(ncclTeamRankToWorld(nullptr, world, 0), -1);
}

// The teams of NCCL's device API: the ranks of a node, and those in the same place on all nodes.
void expectTeams(const Ranks& ranks, int each) {
  for (int rank = 0; rank < ranks.size(); rank++) {
    const ncclComm_t comm = ranks.comm(rank);
    const Team world = ncclTeamWorld(comm), node = ncclTeamLsa(comm), rail = ncclTeamRail(comm);
    EXPECT_EQ(node.ranks, each);
    EXPECT_EQ(node.rank, rank % each);
    EXPECT_EQ(node.stride, 1);
    EXPECT_EQ(rail.ranks, ranks.size() / each);
    EXPECT_EQ(rail.rank, rank / each);
    EXPECT_EQ(rail.stride, each);
    for (int i = 0; i < each; i++) {
      EXPECT_EQ(ncclTeamRankToWorld(comm, node, i), rank / each * each + i);
      EXPECT_EQ(ncclTeamRankToLsa(comm, node, i), i);
      EXPECT_EQ(ncclTeamRankToLsa(comm, world, rank / each * each + i), i);
    }
    for (int i = 0; i < rail.ranks; i++) {
      EXPECT_EQ(ncclTeamRankToWorld(comm, rail, i), i * each + rank % each);
    }
  }
}

TEST_F(Misuse, Teams) {
  expectTeams(ranks, 2);
  expectTeams(Ranks(2, 3), 3);
  expectTeams(Ranks(3, 1), 1);
  // No rank stores into memory of another one.
  ::setenv("UNISONO_ZERO_COPY", "0", 1);
  expectTeams(Ranks(2, 2), 1);
  ::unsetenv("UNISONO_ZERO_COPY");
  for (const Team team : {ncclTeamLsa(nullptr), ncclTeamRail(nullptr)}) EXPECT_EQ(team.ranks, 0);
  EXPECT_EQ(ncclTeamRankToLsa(nullptr, Team{2, 0, 1}, 0), -1);
}

TEST_F(Misuse, Operators) {
  float factor = 2;
  void* b = mine.as();
  ncclRedOp_t op;
  EXPECT_FAILED(
      ncclRedOpCreatePreMulSum(nullptr, &factor, ncclFloat, ncclScalarHostImmediate, ranks.comm(0)),
      ncclInvalidArgument, "op is null");
  EXPECT_FAILED(
      ncclRedOpCreatePreMulSum(&op, nullptr, ncclFloat, ncclScalarHostImmediate, ranks.comm(0)),
      ncclInvalidArgument, "scalar is null");
  EXPECT_FAILED(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat, ncclScalarDevice, ranks.comm(0)),
                ncclInvalidArgument, "not memory that the device can access");
  EXPECT_FAILED(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat,
                                         static_cast<ncclScalarResidence_t>(7), ranks.comm(0)),
                ncclInvalidArgument, "residence");
  ASSERT_OK(
      ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat, ncclScalarHostImmediate, ranks.comm(0)));
  ncclRedOp_t theirs;
  ASSERT_OK(ncclRedOpCreatePreMulSum(&theirs, &factor, ncclFloat, ncclScalarHostImmediate,
                                     ranks.comm(1)));
  EXPECT_FAILED(allReduce(b, b, 4, ncclInt, op), ncclInvalidArgument, "data type");
  EXPECT_FAILED(allReduce(b, b, 4, ncclFloat, theirs), ncclInvalidArgument, "this communicator");
  EXPECT_FAILED(ncclRedOpDestroy(theirs, ranks.comm(0)), ncclInvalidArgument, "this communicator");
  EXPECT_FAILED(ncclRedOpDestroy(ncclSum, ranks.comm(0)), ncclInvalidArgument, "operator");
  EXPECT_OK(ncclRedOpDestroy(op, ranks.comm(0)));
  EXPECT_FAILED(allReduce(b, b, 4, ncclFloat, op), ncclInvalidArgument, "still exists");
  EXPECT_FAILED(ncclRedOpDestroy(op, ranks.comm(0)), ncclInvalidArgument, "operator");
}

TEST_F(Misuse, Groups) {
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidUsage, "ncclGroupStart");
  // One call fails: the others of the group are not made.
  DeviceBuffer sum(0, 64);
  *sum.as<int>() = 1;
  ASSERT_OK(ncclGroupStart());
  EXPECT_OK(ncclAllReduce(sum.as(), sum.as(), 1, ncclInt, ncclSum, ranks.comm(0), ranks.stream(0)));
  EXPECT_FAILED(ncclBcast(nullptr, 1, ncclInt, 0, ranks.comm(1), ranks.stream(1)),
                ncclInvalidArgument, "buff is null");
  EXPECT_OK(
      ncclAllReduce(others.as(), others.as(), 1, ncclInt, ncclSum, ranks.comm(1), ranks.stream(1)));
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidArgument, "buff is null");
  ranks.synchronize();
  EXPECT_EQ(*sum.as<int>(), 1);
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidUsage, "ncclGroupStart");
  // In a nested one too, and a communicator of the group is not made.
  ncclComm_t comm = ranks.comm(0);
  ASSERT_OK(ncclGroupStart());
  ASSERT_OK(ncclGroupStart());
  EXPECT_OK(ncclCommInitRank(&comm, 1, newId(), 0));
  EXPECT_FAILED(ncclSend(mine.as(), 1, ncclInt, 9, ranks.comm(0), ranks.stream(0)),
                ncclInvalidArgument, "peer");
  EXPECT_OK(ncclGroupEnd());
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidArgument, "peer");
  EXPECT_EQ(comm, nullptr);
}

TEST_F(Misuse, SendToOneself) {
  void* b = mine.as();
  EXPECT_FAILED(ncclSend(b, 4, ncclInt, 0, ranks.comm(0), ranks.stream(0)), ncclInvalidUsage,
                "1 send(s) from this rank to itself but 0 receive(s)");
  EXPECT_FAILED(ncclRecv(b, 4, ncclInt, 0, ranks.comm(0), ranks.stream(0)), ncclInvalidUsage,
                "0 send(s) from this rank to itself but 1 receive(s)");
  ASSERT_OK(ncclGroupStart());
  EXPECT_OK(ncclSend(b, 4, ncclInt, 0, ranks.comm(0), ranks.stream(0)));
  EXPECT_OK(ncclRecv(mine.as() + 64, 5, ncclInt, 0, ranks.comm(0), ranks.stream(0)));
  EXPECT_FAILED(ncclGroupEnd(), ncclInvalidUsage, "sends 16 bytes to itself but receives 20");
}

TEST_F(Misuse, AfterFinalize) {
  ncclComm_t comm = nullptr;
  ASSERT_OK(unisonoHostSetDevice(0));
  ASSERT_OK(ncclCommInitAll(&comm, 1, nullptr));
  ASSERT_OK(ncclCommFinalize(comm));
  EXPECT_FAILED(ncclCommFinalize(comm), ncclInvalidArgument, "finalized");
  EXPECT_FAILED(ncclAllReduce(mine.as(), mine.as(), 1, ncclInt, ncclSum, comm, ranks.stream(0)),
                ncclInvalidUsage, "finalized");
  EXPECT_OK(ncclCommDestroy(comm));
}

TEST(MisusedInit, RanksAndConfigs) {
  ncclComm_t comm = nullptr;
  ASSERT_OK(unisonoHostSetDevice(0));
  EXPECT_FAILED(ncclCommInitRank(&comm, 2, newId(), 2), ncclInvalidArgument, "rank");
  EXPECT_FAILED(ncclCommInitRank(&comm, 2, newId(), -1), ncclInvalidArgument, "rank");
  EXPECT_FAILED(ncclCommInitRank(&comm, 0, newId(), 0), ncclInvalidArgument, "rank");
  EXPECT_FAILED(ncclCommInitRank(&comm, -5, newId(), 0), ncclInvalidArgument, "rank");
  EXPECT_FAILED(ncclCommInitAll(&comm, 0, nullptr), ncclInvalidArgument, "device");
  EXPECT_FAILED(ncclCommInitAll(&comm, 1000, nullptr), ncclInvalidArgument, "device");
  const int device = 99;
  EXPECT_FAILED(ncclCommInitAll(&comm, 1, &device), ncclInvalidArgument, "99");
  ncclUniqueId id = {};
  EXPECT_NE(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
  std::memset(id.internal, 0xff, sizeof(id.internal));
  EXPECT_NE(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
  EXPECT_EQ(comm, nullptr);
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 1, 0, 0, &id, nullptr), ncclInvalidArgument, "id");
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 1, 0, 1, nullptr, nullptr), ncclInvalidArgument,
                "commIds is null");
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 1, 0, 2, &id, nullptr), ncclInvalidArgument, "nId");
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 1, 0, -1, &id, nullptr), ncclInvalidArgument,
                "nId");
  ncclUniqueId ids[2] = {newId(), id};
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 2, 2, 2, ids, nullptr), ncclInvalidArgument,
                "rank");
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 2, 0, 2, ids, nullptr), ncclInvalidArgument,
                "commIds[1]");
  ids[1] = ids[0];
  EXPECT_FAILED(ncclCommInitRankScalable(&comm, 2, 0, 2, ids, nullptr), ncclInvalidArgument,
                "ids 0 and 1 are the same");
  EXPECT_EQ(comm, nullptr);

  ncclConfig_t config;
  std::memset(&config, 0, sizeof(config));
  EXPECT_FAILED(ncclCommInitRankConfig(&comm, 1, newId(), 0, &config), ncclInvalidArgument,
                "NCCL_CONFIG_INITIALIZER");
  auto refused = [&](int ncclConfig_t::*field, int value, const char* name) {
    ncclConfig_t bad = NCCL_CONFIG_INITIALIZER;
    bad.*field = value;
    EXPECT_FAILED(ncclCommInitRankConfig(&comm, 1, newId(), 0, &bad), ncclInvalidArgument, name);
  };
  refused(&ncclConfig_t::blocking, 2, "blocking");
  refused(&ncclConfig_t::minCTAs, 0, "minCTAs");
  refused(&ncclConfig_t::maxCTAs, -3, "maxCTAs");
  refused(&ncclConfig_t::cgaClusterSize, -1, "cgaClusterSize");
  refused(&ncclConfig_t::splitShare, 7, "splitShare");
  refused(&ncclConfig_t::collnetEnable, 5, "collnetEnable");
  refused(&ncclConfig_t::CTAPolicy, 99, "CTAPolicy");
  refused(&ncclConfig_t::CTAPolicy, -1, "CTAPolicy");
  refused(&ncclConfig_t::CTAPolicy, UNISONO_CTA_POLICY_DETERMINISTIC | 4, "CTAPolicy");
  refused(&ncclConfig_t::CTAPolicy, UNISONO_CTA_POLICY_DETERMINISTIC << 1,
          "UNISONO_CTA_POLICY_DETERMINISTIC");
  refused(&ncclConfig_t::shrinkShare, -1, "shrinkShare");
  refused(&ncclConfig_t::nvlsCTAs, -3, "nvlsCTAs");
  refused(&ncclConfig_t::nChannelsPerNetPeer, 65, "nChannelsPerNetPeer");
  refused(&ncclConfig_t::nvlinkCentricSched, 2, "nvlinkCentricSched");
  ncclConfig_t network = NCCL_CONFIG_INITIALIZER;
  network.netName = "NoSuchNet";
  EXPECT_FAILED(ncclCommInitRankConfig(&comm, 1, newId(), 0, &network), ncclInvalidUsage,
                "NoSuchNet");
  EXPECT_EQ(comm, nullptr);
  network.netName = "socket";
  ASSERT_OK(ncclCommInitRankConfig(&comm, 1, newId(), 0, &network));
  EXPECT_OK(ncclCommDestroy(comm));
}

// What each rank of `ranks` threads gets when it calls `init`, which may fail.
std::vector<std::string> initOnThreads(int ranks, ncclResult_t code,
                                       const std::function<ncclResult_t(ncclComm_t*, int)>& init) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  onThreads(ranks, [&](int rank) {
    ncclComm_t comm = nullptr;
    const ncclResult_t result = init(&comm, rank);
    texts[static_cast<size_t>(rank)] = ncclGetLastError(nullptr);
    if (result == ncclSuccess) ncclCommDestroy(comm);
    if (result != code) {
      throw std::runtime_error("result " + std::to_string(result) + ": " +
                               texts[static_cast<size_t>(rank)]);
    }
    if (result != ncclSuccess && comm != nullptr) throw std::runtime_error("a handle is left");
  });
  return texts;
}

TEST(MisusedInit, TwoRanksOnOneDevice) {
  ncclUniqueId id = newId();
  auto init = [&](ncclComm_t* comm, int rank) {
    check(unisonoHostSetDevice(rank == 0 ? 3 : 5));
    return ncclCommInitRank(comm, 3, id, rank);
  };
  for (const std::string& text : initOnThreads(3, ncclInvalidUsage, init)) {
    EXPECT_NE(text.find("Ranks 1 and 2"), std::string::npos) << text;
    EXPECT_NE(text.find("NCCL_MULTI_RANK_GPU_ENABLE"), std::string::npos) << text;
  }
  const int devices[] = {1, 1};
  ncclComm_t comms[2];
  EXPECT_FAILED(ncclCommInitAll(comms, 2, devices), ncclInvalidUsage, "Ranks 0 and 1");

  const Setting allowed("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  id = newId();
  onThreads(3, [&](int rank) {
    check(unisonoHostSetDevice(rank == 0 ? 3 : 5));
    Member member(id, rank, 3);
    useOnce(member.comm, 300'000);
  });
}

TEST(MisusedInit, RanksThatContradictEachOther) {
  ncclUniqueId id = newId();
  for (const std::string& text : initOnThreads(2, ncclInvalidUsage, [&](ncclComm_t*comm, int rank) {
         return ncclCommInitRank(comm, 2 + rank, id, rank);
       })) {
    EXPECT_NE(text, "");
  }
  id = newId();
  initOnThreads(2, ncclInvalidUsage,
                [&](ncclComm_t* comm, int) { return ncclCommInitRank(comm, 2, id, 1); });
}

TEST(MisusedInit, RanksOfWhichSomeAreDeterministic) {
  const ncclUniqueId id = newId();
  const auto init = [&](ncclComm_t* comm, int rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (rank == 2) config.CTAPolicy = UNISONO_CTA_POLICY_DETERMINISTIC | NCCL_CTA_POLICY_ZERO;
    return ncclCommInitRankConfig(comm, 3, id, rank, &config);
  };
  for (const std::string& text : initOnThreads(3, ncclInvalidUsage, init)) {
    EXPECT_NE(text.find("Ranks 0 and 2"), std::string::npos) << text;
    EXPECT_NE(text.find("UNISONO_CTA_POLICY_DETERMINISTIC"), std::string::npos) << text;
  }
}

TEST(MisusedInit, Settings) {
  auto init = [](ncclComm_t* comm) {
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    return result == ncclSuccess ? ncclCommInitRank(comm, 1, id, 0) : result;
  };
  auto refused = [&](const char* name, const char* value, ncclResult_t code) {
    const Setting setting(name, value);
    ncclComm_t comm = nullptr;
    EXPECT_FAILED(init(&comm), code, name) << value;
    EXPECT_EQ(comm, nullptr);
  };
  refused("NCCL_ALGO", "quick", ncclInvalidUsage);
  refused("NCCL_ALGO", "alltoall:ring", ncclInvalidUsage);
  refused("NCCL_PROTO", "LL,quick", ncclInvalidUsage);
  refused("UNISONO_BOOTSTRAP_TIMEOUT", "1e3", ncclInvalidArgument);
  refused("NCCL_COMM_ID", "nowhere", ncclInvalidArgument);
  // What NCCL ignores.
  auto accepted = [&](const char* name, const char* value) {
    const Setting setting(name, value);
    ncclComm_t comm = nullptr;
    EXPECT_OK(init(&comm)) << name << "=" << value;
    EXPECT_OK(ncclCommDestroy(comm));
  };
  accepted("NCCL_BUFFSIZE", "4M!");
  accepted("NCCL_MIN_NCHANNELS", "two");
  accepted("NCCL_MULTI_RANK_GPU_ENABLE", "maybe");
  accepted("NCCL_SOCKET_FAMILY", "AF_UNIX");
  accepted("NCCL_BUFFSIZE", "0x400000");
  for (const char* name : {"NCCL_BUFFSIZE", "NCCL_P2P_DISABLE", "NCCL_CROSS_NIC", "NCCL_COMM_ID",
                           "NCCL_CUMEM_ENABLE", "NCCL_ALGO", "NCCL_TOPO_FILE"}) {
    accepted(name, "");
  }
  // Odd, but with a meaning.
  for (const char* value : {"1", "-4", "99999999999"}) {
    for (const char* name : {"NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS"}) {
      if (std::string(name) == "NCCL_BUFFSIZE" && std::string(value).size() > 3) continue;
      const Setting setting(name, value);
      const ncclUniqueId id = newId();
      onThreads(3, [&](int rank) {
        Member member(id, rank, 3);
        useOnce(member.comm, 100'000);
      });
    }
  }
}

TEST(MisusedInit, ARankThatDoesNotCome) {
  const Setting timeout("UNISONO_BOOTSTRAP_TIMEOUT", "1");
  ncclComm_t comm = nullptr;
  ASSERT_OK(unisonoHostSetDevice(0));
  EXPECT_FAILED(ncclCommInitRank(&comm, 2, newId(), 0), ncclRemoteError, "1");
  EXPECT_EQ(comm, nullptr);
}

}  // namespace
}  // namespace unisono::system_test
