// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "child_processes.h"
#include "hang_testing.h"
#include "network_testing.h"
#include "support/fake_net.h"

// Nodes between which the network reduces: the CollNet part of the fake network plug-in
// (fake_collnet.c), in processes of its own for each test, because what has failed once is not
// tried again.
namespace unisono::system_test {
namespace {

using bench::ElementType;

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitized = true;
#else
constexpr bool kThreadSanitized = false;
#endif

// The plug-in supports all types but those of 8 bits.
constexpr ElementType kTypes[] = {ElementType::int8,    ElementType::uint8,   ElementType::int32,
                                  ElementType::uint32,  ElementType::int64,   ElementType::uint64,
                                  ElementType::float16, ElementType::float32, ElementType::float64,
                                  ElementType::bfloat16};

void usePlugin(int version, const std::string& algorithm, const std::string& fault = "") {
  ::setenv("NCCL_NET_PLUGIN", testing::fakeNetPath(version).c_str(), 1);
  ::setenv("FAKE_NET", fault.c_str(), 1);
  // Each GPU has an adapter of its own, and so is a head.
  ::setenv("UNISONO_HOST_TOPOLOGY", UNISONO_TOPOLOGY, 1);
  ::setenv("FAKE_NET_PORTS", testing::kFakeNetPorts, 1);
  ::setenv("NCCL_COLLNET_ENABLE", "1", 1);
  ::setenv("NCCL_ALGO", algorithm.c_str(), 1);
}

int operations(int version) {
  return testing::fakeNetCounter(version, "fakeCollNetOperations");
}

// Returns the first launch of `call`.
std::string launchOf(LaunchLog& log, const Ranks& ranks, const Case& call) {
  log.take();
  runCase(ranks, call);
  const std::vector<std::string> lines = log.take();
  return lines.empty() ? "" : lines.front();
}

struct Carrier {
  const char* algorithm;
  int version;
  int nodes, ranksPerNode;
};
std::string nameOf(const ::testing::TestParamInfo<Carrier>& info) {
  const Carrier& carrier = info.param;
  return std::string(carrier.algorithm) + "V" + std::to_string(carrier.version) + "On" +
         std::to_string(carrier.nodes) + "Of" + std::to_string(carrier.ranksPerNode);
}

class CollNet : public ::testing::TestWithParam<Carrier> {};

// All types and operators that the plug-in supports, and sizes from one element to more than all
// slots.
TEST_P(CollNet, ReducesInTheNetwork) {
  inChild([] {
    const auto [algorithm, version, nodes, ranksPerNode] = GetParam();
    usePlugin(version, algorithm);
    LaunchLog log;
    {
      const Ranks ranks(nodes, ranksPerNode);
      Case call;
      int number = 0;
      for (const ElementType type : kTypes) {
        for (const Operator op : kOperators) {
          call.type = type;
          call.op = op;
          // ThreadSanitizer does not see the order that the network makes between the groups of a
          // block, which use the same buffer then.
          call.inPlace = number % 2 == 1 && !kThreadSanitized;
          call.count = number % 3 == 0 ? 1 : number % 3 == 1 ? 1003 : 40'000;
          number++;
          const int before = operations(version);
          const std::string launch = launchOf(log, ranks, call);
          EXPECT_NE(launch.find(algorithm), std::string::npos) << call.text() << ": " << launch;
          EXPECT_GT(operations(version), before) << call.text();
        }
      }
      call = {};
      call.count = 500'000;
      launchOf(log, ranks, call);
      // Without the help of the network.
      call.type = ElementType::float8e4m3;
      const int before = operations(version);
      const std::string launch = launchOf(log, ranks, call);
      EXPECT_EQ(launch.find("CollNet"), std::string::npos) << launch;
      EXPECT_EQ(operations(version), before);
    }
    EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetOpen"), 0)
        << "all that was opened is closed";
  });
}

// The other operations, where every rank is a head and the plug-in has them: from version 8 on.
TEST_P(CollNet, GathersAndScattersInTheNetwork) {
  inChild([] {
    const auto [algorithm, version, nodes, ranksPerNode] = GetParam();
    usePlugin(version, algorithm);
    LaunchLog log;
    const Ranks ranks(nodes, ranksPerNode);
    for (const Call call : {Call::allGather, Call::reduceScatter}) {
      for (const size_t count : {size_t{1}, size_t{333}, size_t{30'001}}) {
        for (const bool inPlace : {false, true}) {
          if (inPlace && kThreadSanitized) continue;
          Case made;
          made.call = call;
          made.count = count;
          made.inPlace = inPlace;
          made.type = count % 2 == 1 ? ElementType::float16 : ElementType::int64;
          const int before = operations(version);
          const std::string launch = launchOf(log, ranks, made);
          const bool carries = std::string(algorithm) == "CollNetDirect" && version >= 8;
          EXPECT_EQ(launch.find("CollNetDirect") != std::string::npos, carries) << launch;
          EXPECT_EQ(operations(version) > before, carries) << made.text();
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(
    Carriers, CollNet,
    ::testing::Values(Carrier{"CollNetChain", 6, 2, 1}, Carrier{"CollNetChain", 8, 3, 2},
                      Carrier{"CollNetChain", 12, 2, 2}, Carrier{"CollNetDirect", 6, 2, 2},
                      Carrier{"CollNetDirect", 8, 2, 2}, Carrier{"CollNetDirect", 9, 3, 2},
                      Carrier{"CollNetDirect", 11, 2, 4}, Carrier{"CollNetDirect", 12, 4, 2}),
    nameOf);

// NVLS between nodes, and the trees of its heads.
TEST(CollNetOfMulticast, CarriesNvlsBetweenNodes) {
  for (const char* algorithm : {"NVLS", "NVLSTree"}) {
    inChild([algorithm] {
      usePlugin(11, algorithm);
      LaunchLog log;
      const Ranks ranks(3, 2);
      for (const size_t count : {size_t{1}, size_t{70'001}}) {
        Case call;
        call.count = count;
        const std::string launch = launchOf(log, ranks, call);
        EXPECT_NE(launch.find(std::string(algorithm) + " "), std::string::npos) << launch;
      }
      EXPECT_EQ(operations(11) > 0, std::string(algorithm) == "NVLS");
    });
  }
}

// Slots in memory of the GPU, where results are only after a flush.
struct DirectCase {
  const char* algorithm;
  int version;
  const char* pointers;  // that the plug-in takes: 1 host, 2 GPU by address, 4 by DMA-BUF
  const char* fault;
  std::vector<std::pair<const char*, const char*>> variables;
  bool dmaBufs, addresses, flushes;  // what is seen
};
class DirectCollNet : public ::testing::TestWithParam<DirectCase> {};

TEST_P(DirectCollNet, ReducesInMemoryOfTheGpu) {
  inChild([] {
    const DirectCase& wanted = GetParam();
    usePlugin(wanted.version, wanted.algorithm, wanted.fault);
    ::setenv("FAKE_NET_POINTERS", wanted.pointers, 1);
    ::setenv("FAKE_NET_LATE", "1", 1);
    for (const auto& [name, value] : wanted.variables) ::setenv(name, value, 1);
    {
      const Ranks ranks(2, 2);
      everyCall(ranks, std::array{Call::allReduce, Call::allGather, Call::reduceScatter},
                {1, 1003, 100'001});
    }
    const auto counter = [&](const char* name) {
      return testing::fakeNetCounter(wanted.version, name);
    };
    EXPECT_GT(operations(wanted.version), 0);
    EXPECT_EQ(counter("fakeCollNetDmaBufs") > 0, wanted.dmaBufs);
    EXPECT_EQ(counter("fakeCollNetGpuRegions") > 0, wanted.addresses);
    EXPECT_EQ(counter("fakeCollNetFlushes") > 0, wanted.flushes);
    // All that was opened is closed, at most until the alarm of the process: what a rank has
    // forwarded of other calls (PXN) may outlive its communicator.
    while (counter("fakeNetOpen") != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}
INSTANTIATE_TEST_SUITE_P(
    All, DirectCollNet,
    ::testing::Values(
        DirectCase{"CollNetChain", 12, "3", "", {}, false, true, true},
        DirectCase{"CollNetDirect", 11, "7", "", {}, true, false, true},
        DirectCase{"NVLS", 11, "7", "", {}, true, false, true},
        DirectCase{"CollNetDirect", 6, "3", "", {{"NCCL_NET_FORCE_FLUSH", "1"}}, false, true, true},
        DirectCase{"CollNetChain", 11, "7", "collnet regMrDmaBuf fails", {}, false, true, true},
        DirectCase{"CollNetChain", 11, "7", "", {{"NCCL_DMABUF_ENABLE", "0"}}, false, true, true},
        // Memory of the host in its place.
        DirectCase{
            "CollNetDirect", 11, "7", "collnet regMr of a GPU fails", {}, false, false, false},
        DirectCase{
            "CollNetChain", 11, "7", "", {{"NCCL_NET_GDR_LEVEL", "LOC"}}, false, false, false},
        DirectCase{"CollNetChain", 11, "1", "", {}, false, false, false}));

// Two communicators at once, split from one, one of which outlives the other; and the choice by the
// configuration, which the variable overrules.
TEST(CollNetCommunicators, AreIndependentAndConfigured) {
  inChild([] {
    usePlugin(11, "CollNetChain");
    {
      const Ranks first(2, 1);
      {
        const Ranks second(3, 1);
        everyCall(second, {4099});
        everyCall(first, {1});
      }
      everyCall(first, {60'001});
      EXPECT_GT(operations(11), 0);
    }
    EXPECT_EQ(testing::fakeNetCounter(11, "fakeNetOpen"), 0) << "all that was opened is closed";
  });
}

// Runs `body` in processes that imitate nodes of `ranksPerNode` ranks. `fault` is what the plug-in
// of rank `faulty` does wrong.
struct Job {
  int nodes = 2, ranksPerNode = 1;
  const char* algorithm = "CollNetChain";
  const char* fault = "";
  int faulty = 1;  // -1: all
};
void onNodes(const Job& job, const std::function<void(int rank, ncclUniqueId id)>& body) {
  const Pipe pipe;
  const int ranks = job.nodes * job.ranksPerNode;
  const std::vector<int> results = runChildren(ranks, [&](int rank) {
    usePlugin(11, job.algorithm, job.faulty < 0 || job.faulty == rank ? job.fault : "");
    ::setenv("NCCL_HOSTID", std::to_string(rank / job.ranksPerNode).c_str(), 1);
    check(unisonoHostSetDevice(rank));
    body(rank, sharedId(pipe, rank, ranks));
  });
  EXPECT_EQ(results, std::vector<int>(static_cast<size_t>(ranks), 0));
}

void runOnce(ncclComm_t comm, int rank, int ranks, size_t count) {
  Case call;
  call.count = count;
  CaseBuffers buffers(call, rank, ranks, rank);
  const DeviceStream stream(rank);
  check(buffers.enqueue(comm, stream));
  stream.synchronize();
  buffers.verify();
}

class CollNetProcesses : public ::testing::TestWithParam<const char*> {};

TEST_P(CollNetProcesses, ReduceInTheNetwork) {
  const Pipe counts;
  onNodes({.nodes = 2, .ranksPerNode = 2, .algorithm = GetParam()},
          [&](int rank, const ncclUniqueId& id) {
            ncclComm_t comm = nullptr;
            check(ncclCommInitRank(&comm, 4, id, rank));
            for (const size_t count : {1, 1000, 200'000}) runOnce(comm, rank, 4, count);
            check(ncclCommDestroy(comm));
            EXPECT_EQ(testing::fakeNetCounter(11, "fakeNetOpen"), 0);
            counts.write(operations(11));
          });
  int heads = 0;
  for (int rank = 0; rank < 4; rank++) heads += counts.read<int>() > 0 ? 1 : 0;
  EXPECT_GE(heads, 2) << "one of each node";
}
INSTANTIATE_TEST_SUITE_P(Algorithms, CollNetProcesses,
                         ::testing::Values("CollNetChain", "CollNetDirect"));

// ncclConfig_t.collnetEnable, which NCCL_COLLNET_ENABLE overrules.
TEST(CollNetSettings, VariableWinsOverConfiguration) {
  struct Setting {
    const char* variable;
    int field;
    bool used;
  };
  for (const auto& [variable, field, used] :
       {Setting{nullptr, 1, true}, Setting{nullptr, 0, false}, Setting{"0", 1, false},
        Setting{"1", 0, true}, Setting{nullptr, NCCL_CONFIG_UNDEF_INT, false}}) {
    onNodes({}, [&](int rank, const ncclUniqueId& id) {
      ::unsetenv("NCCL_COLLNET_ENABLE");
      if (variable != nullptr) ::setenv("NCCL_COLLNET_ENABLE", variable, 1);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.collnetEnable = field;
      ncclComm_t comm = nullptr;
      check(ncclCommInitRankConfig(&comm, 2, id, rank, &config));
      runOnce(comm, rank, 2, 1000);
      EXPECT_EQ(operations(11) > 0, used) << (variable == nullptr ? "unset" : variable) << field;
      // A child made without a configuration is as its parent.
      ncclComm_t child = nullptr;
      const int before = operations(11);
      check(ncclCommSplit(comm, 0, rank, &child, nullptr));
      runOnce(child, rank, 2, 1000);
      EXPECT_EQ(operations(11) > before, used);
      check(ncclCommDestroy(child));
      check(ncclCommDestroy(comm));
    });
  }
}

// What fails on all ranks, or while the heads connect, is named in a warning, and rings carry the
// calls.
class CollNetFallbacks : public ::testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(CollNetFallbacks, AreNamedAndCalledOff) {
  const auto [fault, faulty] = GetParam();
  const std::string file = ::testing::TempDir() + "unisono_collnet_" + std::to_string(::getpid());
  ::setenv("NCCL_DEBUG", "WARN", 1);
  ::setenv("NCCL_DEBUG_FILE", file.c_str(), 1);
  onNodes({.nodes = 3, .fault = fault, .faulty = faulty}, [&](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 3, id, rank));
    runOnce(comm, rank, 3, 50'000);
    EXPECT_EQ(operations(11), 0);
    check(ncclCommDestroy(comm));
  });
  std::ostringstream log;
  log << std::ifstream(file).rdbuf();
  const bool initialized = std::string(fault).find("connect") != std::string::npos ||
                           std::string(fault).find("listen") != std::string::npos;
  expectParts(log.str(), {"Sum11 (v11)", initialized ? "CollNet is not used" : "is ignored"});
  ::unlink(file.c_str());
  ::unsetenv("NCCL_DEBUG_FILE");
  ::unsetenv("NCCL_DEBUG");
}
INSTANTIATE_TEST_SUITE_P(Faults, CollNetFallbacks,
                         ::testing::Values(std::pair("collnet init fails", -1),
                                           std::pair("collnet has no devices", -1),
                                           std::pair("collnet listen fails", 1),
                                           std::pair("collnet connect fails", 0),
                                           std::pair("collnet connect fails", 2)));

TEST(CollNetMissing, IsCalledOff) {
  inChild([] {
    usePlugin(10, "CollNetChain");
    everyCall(Ranks(2, 1), {1000});
  });
}

// As with NCCL, ranks whose plug-ins differ are refused, unless the user can do without.
TEST(CollNetMismatch, IsRefusedOrIgnored) {
  for (const bool ignores : {false, true}) {
    onNodes({.fault = "collnet init fails"}, [&](int rank, const ncclUniqueId& id) {
      ::setenv("NCCL_IGNORE_COLLNET_MISMATCH", ignores ? "1" : "0", 1);
      ncclComm_t comm = nullptr;
      const ncclResult_t result = ncclCommInitRank(&comm, 2, id, rank);
      if (!ignores) {
        EXPECT_EQ(result, ncclSystemError);
        expectParts(ncclGetLastError(nullptr), {"Ranks 0 and 1", "Sum11 (v11)", "none"});
        return;
      }
      check(result);
      runOnce(comm, rank, 2, 1000);
      EXPECT_EQ(operations(11), 0);
      check(ncclCommDestroy(comm));
    });
  }
}

// What the plug-in cannot reduce is carried by others.
TEST(CollNetSupport, IsThatOfTheWeakestRank) {
  onNodes({.fault = "collnet sums int32"}, [](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 2, id, rank));
    runOnce(comm, rank, 2, 1000);  // float
    EXPECT_EQ(operations(11), 0);
    useOnce(comm, 1000);  // int
    EXPECT_GT(operations(11), 0);
    check(ncclCommDestroy(comm));
  });
}

// In the middle of a call: all ranks learn which device of which plug-in has failed, and where.
class CollNetFaults : public ::testing::TestWithParam<const char*> {};

TEST_P(CollNetFaults, AreNamed) {
  const Meeting joined;
  ::setenv("FAKE_NET_SENDS", "5", 1);
  onNodes({.fault = GetParam()}, [&](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 2, id, rank));
    joined.wait(rank);
    const EndlessCall call(comm, rank);
    static_cast<void>(call.enqueue());
    expectParts(call.awaitError(), {"through device fake", "of Sum11 (v11)", "ranks 0, 1",
                                    "returned 2 (ncclSystemError)", "rank 1"});
    call.abort();
  });
  ::unsetenv("FAKE_NET_SENDS");
}
INSTANTIATE_TEST_SUITE_P(Calls, CollNetFaults,
                         ::testing::Values("collnet operation fails", "collnet test fails"));

TEST(CollNetRegistration, FailsWithAName) {
  const Meeting joined;
  onNodes({.fault = "collnet regMr fails"}, [&](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 2, id, rank));
    joined.wait(rank);
    const EndlessCall call(comm, rank);
    const ncclResult_t result = call.enqueue();
    const std::string error = rank == 1 ? ncclGetLastError(comm) : call.awaitError();
    EXPECT_EQ(result, rank == 1 ? ncclSystemError : result);
    expectParts(error, {"Sum11 (v11)", "regMr returned 2 (ncclSystemError)"});
    call.abort();
  });
}

TEST(CollNetHang, IsEndedByAnAbort) {
  const Meeting joined, enqueued;
  onNodes({.fault = "collnet hangs", .faulty = -1}, [&](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 2, id, rank));
    joined.wait(rank);
    const EndlessCall call(comm, rank);
    check(call.enqueue());
    enqueued.wait(rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    call.abort();
  });
}

// What heads have sent and the plug-in does not reduce is in the report of the hang.
class CollNetInReports : public ::testing::TestWithParam<const char*> {};

TEST_P(CollNetInReports, IsSaidToHang) {
  const Log log;
  ::setenv("NCCL_DEBUG_FILE", log.file().c_str(), 1);
  ::setenv("UNISONO_HANG_SECONDS", kHangSeconds, 1);
  const Job job{.nodes = 2,
                .ranksPerNode = 2,
                .algorithm = GetParam(),
                .fault = "collnet hangs",
                .faulty = -1};
  const Gathering reported(4);
  onNodes(job, [&](int rank, const ncclUniqueId& id) {
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 4, id, rank));
    const EndlessCall call(comm, rank);
    check(call.enqueue());
    EXPECT_TRUE(log.waitForReport());
    reported.wait(rank);  // an abort ends the calls of the others
    call.abort();
  });
  ::unsetenv("NCCL_DEBUG_FILE");
  ::unsetenv("UNISONO_HANG_SECONDS");
  EXPECT_TRUE(log.hasReport()) << log.text();
  EXPECT_TRUE(std::regex_search(
      log.text(),
      std::regex(
          "waiting for the network: [1-9][0-9]* bytes of rank [0-3] on channel [0-9]+ do not "
          "come back from fake[0-9] of Sum11 \\(v11\\), which reduces for ranks [01], [23]")))
      << log.text();
}
INSTANTIATE_TEST_SUITE_P(Algorithms, CollNetInReports,
                         ::testing::Values("CollNetChain", "CollNetDirect", "NVLS"));

}  // namespace
}  // namespace unisono::system_test
