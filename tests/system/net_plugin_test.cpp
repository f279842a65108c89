// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "child_processes.h"
#include "network_testing.h"
#include "support/fake_net.h"

// Ranks on simulated nodes that a network plug-in joins: the fake one of fake_net.c, in a process
// of its own for each test, because what has failed once is not tried again.
namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;

void usePlugin(int version, const char* fault = "") {
  ::setenv("NCCL_NET_PLUGIN", testing::fakeNetPath(version).c_str(), 1);
  ::setenv("FAKE_NET", fault, 1);
  // ThreadSanitizer does not see the order that other algorithms make through the network.
  ::setenv("NCCL_ALGO", "ring", 1);
}

class NetPlugins : public ::testing::TestWithParam<int> {};

// Two communicators at once, of which one outlives the other.
TEST_P(NetPlugins, MoveTheDataOfEveryCall) {
  const int version = GetParam();
  inChild([version] {
    usePlugin(version);
    {
      const Ranks first(3, 1);  // nodes, ranks of each
      {
        const Ranks second(2, 2);
        everyCall(second, {4099});
        everyCall(first, {1});
      }
      everyCall(first, {60'001});
      EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetFlushes"), 0) << "no memory of a GPU";
    }
    EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetInits"), version >= 11 ? 7 : 1);
    EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetOpen"), 0)
        << "all that was opened is closed";
  });
}

INSTANTIATE_TEST_SUITE_P(Versions, NetPlugins, ::testing::Values(6, 8, 10, 11, 12));

// Plug-ins of cloud providers set what their network needs when they start.
TEST(NetPluginSettings, AreThoseOfTheFirstCommunicator) {
  inChild([] {
    usePlugin(9, "needs Simple");
    ::unsetenv("NCCL_PROTO");
    LaunchLog log;
    const Ranks ranks(2, 1);
    constexpr std::array kCalls{Call::allReduce};
    everyCall(ranks, kCalls, {100});
    std::string launches;
    for (const std::string& line : log.take()) launches += line + "\n";
    expectParts(launches, {"Simple"});
    EXPECT_EQ(launches.find("LL"), std::string::npos) << launches;
  });
}

// Slots in memory of the GPU, where data are only after a flush.
struct DirectCase {
  int version;
  const char* pointers;  // that the plug-in takes: 1 host, 2 GPU by address, 4 by DMA-BUF
  const char* fault;
  const char* level;  // NCCL_NET_GDR_LEVEL; the ports are on a CPU
  std::vector<std::pair<const char*, const char*>> variables;
  bool dmaBufs, addresses, flushes;  // what is seen
};
class DirectNetPlugins : public ::testing::TestWithParam<DirectCase> {};

TEST_P(DirectNetPlugins, MoveTheDataOfEveryCall) {
  inChild([] {
    const DirectCase& wanted = GetParam();
    usePlugin(wanted.version, wanted.fault);
    ::setenv("FAKE_NET_POINTERS", wanted.pointers, 1);
    ::setenv("FAKE_NET_LATE", "1", 1);
    ::setenv("NCCL_PROTO", "Simple", 1);  // slots of LL are in memory of the host
    ::setenv("NCCL_NET_GDR_LEVEL", wanted.level, 1);
    ::setenv("NCCL_NET_FORCE_FLUSH", wanted.version < 9 ? "1" : "0", 1);
    for (const auto& [name, value] : wanted.variables) ::setenv(name, value, 1);
    {
      const Ranks ranks(2, 2);
      everyCall(ranks, {1, 4099, 60'001});
    }
    const auto counter = [&](const char* name) {
      return testing::fakeNetCounter(wanted.version, name);
    };
    EXPECT_EQ(counter("fakeNetDmaBufs") > 0, wanted.dmaBufs);
    EXPECT_EQ(counter("fakeNetGpuRegions") > 0, wanted.addresses);
    EXPECT_EQ(counter("fakeNetFlushes") > 0, wanted.flushes);
    EXPECT_EQ(counter("fakeNetOpen"), 0) << "all that was opened is closed";
  });
}
INSTANTIATE_TEST_SUITE_P(
    All, DirectNetPlugins,
    ::testing::Values(
        DirectCase{6, "3", "", "SYS", {}, false, true, true},
        DirectCase{8, "7", "", "SYS", {}, true, false, true},
        DirectCase{11, "7", "", "SYS", {}, true, false, true},
        DirectCase{12, "5", "", "SYS", {}, true, false, true},
        DirectCase{11, "7", "", "SYS", {{"NCCL_PROTO", "LL128"}}, true, false, true},
        // Refusals.
        DirectCase{11, "7", "regMrDmaBuf fails", "SYS", {}, false, true, true},
        DirectCase{12, "7", "regMr of a GPU fails", "SYS", {}, false, false, false},
        DirectCase{
            12, "7", "regMr of a GPU fails", "SYS", {{"NCCL_PROTO", "LL128"}}, false, false, false},
        DirectCase{10, "5", "regMrDmaBuf fails", "SYS", {}, false, false, false},
        // Rules.
        DirectCase{11, "7", "", "PXB", {}, false, false, false},
        DirectCase{11, "7", "", "SYS", {{"NCCL_DMABUF_ENABLE", "0"}}, false, true, true},
        DirectCase{11, "5", "", "SYS", {{"NCCL_DMABUF_ENABLE", "0"}}, false, false, false},
        DirectCase{11, "7", "", "SYS", {{"NCCL_NET_GDR_READ", "0"}}, true, false, true}));

// Of a rank that has two others on its node, and three on another: lines where there is memory to
// share, FIFOs elsewhere.
TEST(NetMessages, InsideNodesGoOverLines) {
  inChild([] {
    usePlugin(11);
    ::unsetenv("NCCL_ALGO");
    LaunchLog log;
    const Ranks ranks(2, 3);
    constexpr std::array kMessages{Call::sendReceive, Call::allToAll, Call::gather, Call::scatter};
    const auto launchesOf = [&](size_t count) {
      log.take();
      everyCall(ranks, kMessages, {count});
      std::string launches;
      for (const std::string& line : log.take()) launches += line + "\n";
      return launches;
    };
    const std::string small = launchesOf(100), large = launchesOf(100'001);
    expectParts(small, {"calls with Direct LL", "messages through FIFOs"});
    expectParts(large, {"Direct LL and LL128", "rounds of messages through FIFOs"});
    EXPECT_EQ(small.find("LL128"), std::string::npos) << small;
  });
}

// What an all-to-all between 8 hosts takes of the memory of a GPU.
TEST(NetPluginMemory, OfMessagesIsSharedByConnections) {
  const auto measure = [](const char* shares) {
    const Pipe pipe;
    inChild([&] {
      usePlugin(11);
      ::setenv("FAKE_NET_POINTERS", "7", 1);
      ::setenv("NCCL_NET_GDR_LEVEL", "SYS", 1);
      ::setenv("NCCL_NET_SHARED_BUFFERS", shares, 1);
      const Ranks ranks(8, 2);
      const auto bytes = [&] {
        uint64_t value = 0;
        check(ncclCommMemStats(ranks.comm(0), ncclStatGpuMemTotal, &value));
        return value;
      };
      const uint64_t before = bytes();
      everyCall(ranks, std::array{Call::allToAll}, {60'001});
      pipe.write(bytes() - before);
    });
    return pipe.read<uint64_t>();
  };
  const uint64_t shared = measure("1"), separate = measure("0");
  std::printf("an all-to-all took %.1f MB, with NCCL_NET_SHARED_BUFFERS=0 %.1f MB\n",
              static_cast<double>(shared) / 1e6, static_cast<double>(separate) / 1e6);
  // Of 14 others, in both directions.
  constexpr uint64_t kSlots = 8, kSlotBytes = 32 << 10;
  EXPECT_GE(separate, 2 * 14 * kSlots * kSlotBytes);
  EXPECT_LE(shared, separate - 14 * kSlots * kSlotBytes);
}

// Runs `body` in two processes, each a node of one rank, once both have joined. `fault` is what the
// plug-in of rank 1 does wrong.
void onTwoNodes(const char* fault, const std::function<void(int rank, ncclComm_t comm)>& body) {
  const Pipe pipe;
  const Meeting joined;
  const std::vector<int> results = runChildren(2, [&](int rank) {
    usePlugin(11, rank == 1 ? fault : "");
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    const ncclComm_t comm = joinTwo(pipe, rank);
    joined.wait(rank);
    body(rank, comm);
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

// As with some older plug-ins. A connection of a rank that has left has not failed.
TEST(NetPluginsWithoutSizes, MoveDataAndEnd) {
  onTwoNodes("no sizes", [](int rank, ncclComm_t comm) {
    useOnce(comm, 100'000);
    if (rank == 0) {
      std::this_thread::sleep_for(1500ms);
      ncclResult_t state = ncclSuccess;
      check(ncclCommGetAsyncError(comm, &state));
      EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(comm);
    }
    check(ncclCommDestroy(comm));
  });
}

// Nanoseconds of CPU time of the threads that move data in this process.
int64_t proxyTime() {
  int64_t total = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    int64_t ran = 0;
    std::ifstream(task.path() / "schedstat") >> ran;
    if (name == "unisono-proxy") total += ran;
  }
  return total;
}

TEST(NetProxies, SleepWhileNothingRuns) {
  const Meeting used;
  onTwoNodes("", [&](int rank, ncclComm_t comm) {
    useOnce(comm, 100'000);
    used.wait(rank);
    EXPECT_GT(proxyTime(), 0) << "data were moved by it";
    // It naps for half a millisecond at most before it sleeps without a limit; at most until the
    // alarm of the process.
    for (int64_t before = -1, now = proxyTime(); now != before; now = proxyTime()) {
      before = now;
      std::this_thread::sleep_for(500ms);
    }
    useOnce(comm, 100'000);
    check(ncclCommDestroy(comm));
  });
}

class NetPluginFaults : public ::testing::TestWithParam<const char*> {};

// While calls run: both ranks learn which device, which peer and what the plug-in has returned.
TEST_P(NetPluginFaults, OfMessagesAreNamed) {
  ::setenv("FAKE_NET_SENDS", "20", 1);
  onTwoNodes(GetParam(), [](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    static_cast<void>(call.enqueue());
    expectParts(call.awaitError(), {"through device fake", "of Fake11 (v11)",
                                    "returned 2 (ncclSystemError)", "rank 1", "peer 0"});
    call.abort();
  });
}
INSTANTIATE_TEST_SUITE_P(Messages, NetPluginFaults,
                         ::testing::Values("send fails", "test fails", "receive fails"));

TEST(DirectNetPluginFaults, SayHowDataPass) {
  ::setenv("FAKE_NET_SENDS", "20", 1);
  ::setenv("FAKE_NET_POINTERS", "7", 1);
  ::setenv("NCCL_NET_GDR_LEVEL", "SYS", 1);
  onTwoNodes("send fails", [](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    static_cast<void>(call.enqueue());
    expectParts(call.awaitError(), {"of Fake11 (v11), GPUDirect by DMA-BUF", "rank 1", "peer 0"});
    call.abort();
  });
  ::unsetenv("FAKE_NET_POINTERS");
  ::unsetenv("NCCL_NET_GDR_LEVEL");
}

class NetPluginSetups : public ::testing::TestWithParam<const char*> {};

TEST_P(NetPluginSetups, ThatFailAreNamed) {
  const std::string fault = GetParam();
  onTwoNodes(GetParam(), [&](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    const ncclResult_t result = call.enqueue();
    if (rank == 1) {
      EXPECT_EQ(result, ncclSystemError);
      expectParts(ncclGetLastError(call.comm),
                  {fault.substr(0, fault.find(' ')), "Fake11 (v11)", "2 (ncclSystemError)"});
    } else {
      // Its own connection may fail before it hears of the other rank's.
      const std::string error = call.awaitError();
      expectParts(error, {"Fake11 (v11)", "2 (ncclSystemError)"});
      const bool isReport = error.find("Rank 1 reports") != std::string::npos;
      EXPECT_TRUE(isReport || error.find("[rank 0, peer 1]") != std::string::npos) << error;
    }
    call.abort();
  });
}
INSTANTIATE_TEST_SUITE_P(Setups, NetPluginSetups,
                         ::testing::Values("listen fails", "connect fails", "accept fails",
                                           "regMr fails"));

// Messages that never complete, and a connection that is never made.
TEST(NetPluginsThatHang, AreEndedByAnAbort) {
  const Meeting enqueued;
  onTwoNodes("hangs", [&](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    check(call.enqueue());
    enqueued.wait(rank);
    std::this_thread::sleep_for(20ms);
    call.abort();
  });
  onTwoNodes("never connects", [](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    std::thread caller([&] { EXPECT_NE(call.enqueue(), ncclSuccess); });
    std::this_thread::sleep_for(20ms);
    call.abort();
    caller.join();
  });
}

// While the proxy is in a call of the plug-in that does not return, against the interface: nothing
// that an abort does waits for the proxy.
TEST(NetPluginsThatBlock, DoNotHoldUpAnAbort) {
  const Meeting held;
  onTwoNodes("hangs", [&](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    check(call.enqueue());
    testing::holdFakeNet(11, rank == 1);  // whose plug-in hangs
    while (rank == 1 && testing::fakeNetCounter(11, "fakeNetHeld") == 0) {
      std::this_thread::sleep_for(1ms);
    }
    held.wait(rank);
    call.abort();
    EXPECT_EQ(testing::fakeNetCounter(11, "fakeNetHeld"), rank) << "it has not returned";
    testing::holdFakeNet(11, false);
  });
}

using PointersAndCount = std::tuple<const char*, size_t>;
class NetPluginsInReports : public ::testing::TestWithParam<PointersAndCount> {};

TEST_P(NetPluginsInReports, AreSaidToHang) {
  const std::string file = ::testing::TempDir() + "unisono_net_hang_" + std::to_string(::getpid());
  ::setenv("NCCL_DEBUG_FILE", file.c_str(), 1);
  ::setenv("UNISONO_HANG_SECONDS", kSanitized ? "6" : "2", 1);
  ::setenv("FAKE_NET_POINTERS", std::get<const char*>(GetParam()), 1);
  ::setenv("NCCL_NET_GDR_LEVEL", "SYS", 1);
  onTwoNodes("hangs", [&](int rank, ncclComm_t comm) {
    const EndlessCall call(comm, rank);
    check(call.enqueue(std::get<size_t>(GetParam())));
    const auto hasReport = [&] {
      std::ostringstream log;
      log << std::ifstream(file).rdbuf();
      return log.str().find("waiting for the network: ") != std::string::npos &&
             log.str().find("bytes from rank 1 to rank 0") != std::string::npos &&
             log.str().find("do not leave through Fake11 (v11)") != std::string::npos;
    };
    while (!hasReport()) std::this_thread::sleep_for(10ms);  // at most until the alarm
    call.abort();
  });
  ::unlink(file.c_str());
  ::unsetenv("NCCL_DEBUG_FILE");
  for (const char* name : {"UNISONO_HANG_SECONDS", "FAKE_NET_POINTERS", "NCCL_NET_GDR_LEVEL"}) {
    ::unsetenv(name);
  }
}
// Through memory of the host and of the GPU, and over LL.
INSTANTIATE_TEST_SUITE_P(All, NetPluginsInReports,
                         ::testing::Combine(::testing::Values("1", "7"),
                                            ::testing::Values(size_t{1} << 18, size_t{3})));

TEST(NetPluginsThatDiffer, AreRefusedByInit) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(2, [&](int rank) {
    usePlugin(rank == 0 ? 10 : 12);
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, 2, sharedId(pipe, rank, 2), rank), ncclInvalidUsage);
    expectParts(ncclGetLastError(nullptr), {"Ranks 0 and 1", "Fake10 (v10)", "Fake12 (v12)"});
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

TEST(NetPluginNames, AreChosenByNameOrRefused) {
  inChild([] {
    usePlugin(8);
    ::setenv("NCCL_NET_PLUGIN", (testing::fakeNetPath(8) + "," + testing::fakeNetPath(12)).c_str(),
             1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.netName = "Fake12";
    config.trafficClass = 9;
    ncclComm_t comm = nullptr;
    check(ncclCommInitRankConfig(&comm, 1, newId(), 0, &config));
    EXPECT_EQ(testing::fakeNetCounter(12, "fakeNetTrafficClass"), 9);
    // A child has the network of its parent.
    ncclComm_t child = nullptr;
    ncclConfig_t other = NCCL_CONFIG_INITIALIZER;
    check(ncclCommSplit(comm, 0, 0, &child, &other));
    EXPECT_EQ(testing::fakeNetCounter(12, "fakeNetInits"), 2);
    EXPECT_EQ(testing::fakeNetCounter(12, "fakeNetTrafficClass"), 9);
    check(ncclCommDestroy(child));
    check(ncclCommDestroy(comm));
    EXPECT_EQ(testing::fakeNetCounter(8, "fakeNetInits"), 0);
    ::setenv("NCCL_NET", "Fabric7", 1);  // wins over the configuration
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, newId(), 0, &config), ncclInvalidUsage);
    expectParts(ncclGetLastError(nullptr), {"\"Fabric7\"", "Fake8, Fake12"});
  });
}

}  // namespace
}  // namespace unisono::system_test
