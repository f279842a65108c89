// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "network_testing.h"
#include "support/fake_verbs.h"

// Ranks on simulated nodes that InfiniBand or RoCE joins: adapters of net/fake_verbs.cpp, in
// processes of their own for each test, as the adapters read the environment once.
namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;

using Variables = std::vector<std::pair<const char*, const char*>>;

void useVerbs(const Variables& variables = {}) {
  testing::loadFakeVerbs();
  ::setenv("NCCL_NET", "IB", 1);
  for (const auto& [name, value] : variables) ::setenv(name, value, 1);
}

// Until all that was made in the adapter is destroyed, at most until the alarm of the process: an
// abort on a busy machine leaves the rest to another thread.
void awaitDestruction() {
  while (testing::fakeVerbsCounter("fakeVerbsOpen") != 0) std::this_thread::sleep_for(1ms);
}

// Runs `body` in processes that are a node each, once all have joined. `special` are the variables
// of the last one.
void onNodes(int nodes, const Variables& variables, const Variables& special,
             const std::function<void(int rank, ncclComm_t comm)>& body) {
  const Pipe pipe;
  const Gathering joined(nodes);
  const std::vector<int> results = runChildren(nodes, [&](int rank) {
    useVerbs(variables);
    if (rank == nodes - 1) useVerbs(special);
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, nodes, sharedId(pipe, rank, nodes), rank));
    joined.wait(rank);
    body(rank, comm);
  });
  EXPECT_EQ(results, std::vector<int>(static_cast<size_t>(nodes), 0));
}

TEST(Verbs, JoinTwoProcesses) {
  onNodes(2, {}, {}, [](int, ncclComm_t comm) {
    for (const size_t count : {1, 1000, 300'000}) useOnce(comm, count);
    EXPECT_GT(testing::fakeVerbsCounter("fakeVerbsRequests"), 0);
    check(ncclCommDestroy(comm));
    awaitDestruction();
  });
}

// Two communicators at once, of which one outlives the other.
void everyCallOnNodes(const Variables& variables) {
  inChild([&] {
    useVerbs(variables);
    {
      const Ranks first(3, 1);  // nodes, ranks of each
      {
        const Ranks second(2, 2);
        everyCall(second, {4099});
        everyCall(first, {1});
      }
      everyCall(first, {60'001});
    }
    awaitDestruction();
  });
}

TEST(Verbs, MoveTheDataOfEveryCall) {
  everyCallOnNodes({{"NCCL_ALGO", "ring"}});
  everyCallOnNodes({{"NCCL_ALGO", "tree"}});
}

// Queue pairs run ahead of each other, and channels use two ports.
TEST(Verbs, MoveDataOverSeveralQueuePairs) {
  const Variables delayed = {{"FAKE_VERBS", "fake0 ib ib"},
                             {"FAKE_VERBS_DELAY", "100"},
                             {"NCCL_IB_QPS_PER_CONNECTION", "3"}};
  everyCallOnNodes(delayed);
  Variables split = delayed;
  split.emplace_back("NCCL_IB_SPLIT_DATA_ON_QPS", "1");
  everyCallOnNodes(split);
}

// Slots in memory of the GPU, where data are only after a read by the adapter.
struct DirectCase {
  Variables variables;
  bool dmaBufs, reads;  // what is seen
};
class DirectVerbs : public ::testing::TestWithParam<DirectCase> {};

TEST_P(DirectVerbs, MoveTheDataOfEveryCall) {
  inChild([] {
    useVerbs({{"FAKE_VERBS_LATE", "1"},
              {"FAKE_VERBS_DELAY", "100"},
              {"NCCL_PROTO", "Simple"},  // slots of LL are in memory of the host
              {"NCCL_NET_GDR_LEVEL", "SYS"},
              {"NCCL_NET_FORCE_FLUSH", "1"}});
    useVerbs(GetParam().variables);
    {
      const Ranks ranks(2, 2);
      everyCall(ranks, {1, 4099, 60'001});
    }
    awaitDestruction();
    EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsDmaBufs") > 0, GetParam().dmaBufs);
    EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsReads") > 0, GetParam().reads);
  });
}
INSTANTIATE_TEST_SUITE_P(
    All, DirectVerbs,
    ::testing::Values(
        DirectCase{{}, true, true}, DirectCase{{{"NCCL_PROTO", "LL128"}}, true, true},
        DirectCase{
            {{"NCCL_IB_QPS_PER_CONNECTION", "3"}, {"NCCL_IB_SPLIT_DATA_ON_QPS", "1"}}, true, true},
        DirectCase{{{"FAKE_VERBS", "b0 eth"}}, true, true},
        DirectCase{{{"FAKE_VERBS_DMABUF", "0"}}, false, true},
        DirectCase{{{"NCCL_DMABUF_ENABLE", "0"}}, false, true},
        DirectCase{{{"FAKE_VERBS_FAULT", "reg_dmabuf_mr 0"}}, false, true},
        DirectCase{{{"NCCL_NET_GDR_LEVEL", "PXB"}}, false, false}));

constexpr const char* kRoce =
    "b0 eth=fe800000000000000000000000000001,00000000000000000000ffffc0000201,"
    "00000000000000000000ffffc0000203";

// Hosts whose adapters have other GIDs, and whose settings of connections differ.
TEST(Verbs, JoinHostsByRoce) {
  const Variables special = {{"NCCL_IB_SPLIT_DATA_ON_QPS", "1"},
                             {"NCCL_IB_QPS_PER_CONNECTION", "2"},
                             {"NCCL_IB_AR_THRESHOLD", "100"},
                             {"NCCL_IB_ADAPTIVE_ROUTING", "1"},
                             {"FAKE_VERBS", "b1 eth=00000000000000000000ffffc0000202"}};
  onNodes(3, {{"NCCL_ALGO", "tree"}, {"FAKE_VERBS", kRoce}}, special, [](int, ncclComm_t comm) {
    for (const size_t count : {1, 1000, 100'000}) useOnce(comm, count);
    check(ncclCommDestroy(comm));
  });
}

struct PairSettings {
  Variables variables;
  int trafficClass;  // of ncclConfig_t
  int relaxed, expectedClass, serviceLevel, gidIndex, timeout, retries;
};

TEST(VerbsSettings, ReachTheQueuePairs) {
  const PairSettings cases[] = {
      {{}, NCCL_CONFIG_UNDEF_INT, 1, 0, 0, 1, 20, 7},
      {{}, 105, 1, 105, 9, 1, 20, 7},
      {{{"NCCL_IB_TC", "106"},
        {"NCCL_IB_SL", "3"},
        {"NCCL_IB_ADDR_RANGE", "192.0.2.2/31"},
        {"NCCL_IB_TIMEOUT", "18"},
        {"NCCL_IB_RETRY_CNT", "5"},
        {"NCCL_IB_PCI_RELAXED_ORDERING", "0"}},
       9,
       0,
       106,
       3,
       2,
       18,
       5},
      {{{"NCCL_IB_GID_INDEX", "0"}}, NCCL_CONFIG_UNDEF_INT, 1, 0, 0, 0, 20, 7},
  };
  for (const PairSettings& wanted : cases) {
    const Pipe pipe;
    const std::vector<int> results = runChildren(2, [&](int rank) {
      useVerbs({{"FAKE_VERBS", kRoce}});
      useVerbs(wanted.variables);
      ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
      check(unisonoHostSetDevice(rank));
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.trafficClass = wanted.trafficClass;
      ncclComm_t comm = nullptr;
      check(ncclCommInitRankConfig(&comm, 2, sharedId(pipe, rank, 2), rank, &config));
      useOnce(comm);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsRelaxed") > 0, wanted.relaxed != 0);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsTrafficClass"), wanted.expectedClass);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsServiceLevel"), wanted.serviceLevel);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsGidIndex"), wanted.gidIndex);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsTimeout"), wanted.timeout);
      EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsRetries"), wanted.retries);
      check(ncclCommDestroy(comm));
    });
    EXPECT_EQ(results, std::vector<int>({0, 0}));
  }
}

TEST(VerbsThatDiffer, AreRefused) {
  onNodes(2, {}, {{"FAKE_VERBS", "b1 eth=00000000000000000000ffffc0000202"}},
          [](int rank, ncclComm_t comm) {
            const EndlessCall call(comm, rank);
            static_cast<void>(call.enqueue());
            expectParts(call.awaitError(), {"Port ", "fake0:1 ", "b1:1 ", "RoCE", "NCCL_IB_HCA"});
            call.abort();
          });
  const Pipe pipe;
  const std::vector<int> results = runChildren(2, [&](int rank) {
    useVerbs();
    if (rank == 1) ::setenv("NCCL_NET", "Socket", 1);
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, 2, sharedId(pipe, rank, 2), rank), ncclInvalidUsage);
    expectParts(ncclGetLastError(nullptr), {"Ranks 0 and 1", "Socket", "IB"});
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

TEST(VerbsThatAreMissing, AreNamed) {
  inChild([] {
    useVerbs({{"FAKE_VERBS", "fake0 ib-down"}});
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, 1, newId(), 0), ncclInvalidUsage);
    expectParts(ncclGetLastError(nullptr), {"NCCL_NET", "no port of 1 adapter(s) is active"});
  });
}

// What breaks in the adapter of rank 1, and what both ranks are told of it.
struct Breakage {
  const char* fault;
  std::vector<std::string> parts;
};
class VerbsFaults : public ::testing::TestWithParam<Breakage> {};

TEST_P(VerbsFaults, OfCallsAreNamed) {
  // Rank 0 waits for 30 s for what rank 1 does not answer.
  onNodes(2, {}, {{"FAKE_VERBS_FAULT", GetParam().fault}}, [](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    static_cast<void>(call.enqueue());
    const std::string error = call.awaitError();
    expectParts(error, {"port fake0:1", "rank 1", "peer 0"});
    expectParts(error, GetParam().parts);
    call.abort();
    awaitDestruction();
  });
}
INSTANTIATE_TEST_SUITE_P(
    All, VerbsFaults,
    ::testing::Values(
        Breakage{"pair 20", {"local work queue catastrophic error", "through port fake0:1"}},
        Breakage{"device 20", {"local catastrophic error"}},
        Breakage{"status 20",
                 {"remote operation error (status 11, vendor error 0x5a) on queue pair"}},
        Breakage{"port 20",
                 {"transport retry counter exceeded (status 12, vendor error 0x81)",
                  "fake0:1, which is down"}}));

class VerbsLosses : public ::testing::TestWithParam<const char*> {};

// Lost messages, and a link that comes back, cost time.
TEST_P(VerbsLosses, AreSentAgain) {
  const Variables special = {{"FAKE_VERBS_FAULT", GetParam()}};
  onNodes(2, {{"NCCL_IB_TIMEOUT", "17"}}, special, [](int rank, ncclComm_t comm) {  // 0.54 s
    for (int i = 0; i < 5; i++) useOnce(comm, 100'000);
    EXPECT_TRUE(rank == 0 || testing::fakeVerbsCounter("fakeVerbsRequests") > 60);
    check(ncclCommDestroy(comm));
    awaitDestruction();
  });
}
INSTANTIATE_TEST_SUITE_P(All, VerbsLosses, ::testing::Values("drop 20", "flap 20"));

class VerbsSetups : public ::testing::TestWithParam<const char*> {};

TEST_P(VerbsSetups, ThatFailAreNamed) {
  onNodes(2, {}, {{"FAKE_VERBS_FAULT", GetParam()}}, [](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    const ncclResult_t result = call.enqueue();
    const std::string error = rank == 1 ? ncclGetLastError(comm) : call.awaitError();
    EXPECT_TRUE(rank == 0 || result == ncclSystemError) << result;
    expectParts(error, {std::string("ibv_") + GetParam(), "port fake0:1", "rank 1"});
    call.abort();
    awaitDestruction();
  });
}
INSTANTIATE_TEST_SUITE_P(All, VerbsSetups,
                         ::testing::Values("reg_mr", "create_cq", "create_qp", "modify_qp"));

// Completions that never come.
TEST(VerbsThatHang, AreEndedByAnAbort) {
  const Meeting enqueued;
  onNodes(2, {}, {{"FAKE_VERBS_FAULT", "lose 20"}}, [&](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    check(call.enqueue());
    enqueued.wait(rank);
    std::this_thread::sleep_for(20ms);
    call.abort();
    awaitDestruction();
  });
}

TEST(VerbsWithADeadPeer, NameIt) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(2, [&](int rank) {
    useVerbs({{"FAKE_VERBS_FAULT", rank == 1 ? "lose 20" : ""}});
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    const EndlessCall call(joinTwo(pipe, rank), rank);
    static_cast<void>(call.enqueue());
    if (rank == 1) {
      std::this_thread::sleep_for(20ms);
      ::raise(SIGKILL);
    }
    expectParts(call.awaitError(), {"Rank 1 ", "has died"});
    call.abort();
    awaitDestruction();
  });
  EXPECT_EQ(results, std::vector<int>({0, 100 + SIGKILL}));
}

}  // namespace
}  // namespace unisono::system_test
