// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "child_processes.h"
#include "network_testing.h"
#include "support/fake_net.h"
#include "support/fake_verbs.h"

// Nodes of several GPUs with fewer ports: ranks send through the rank whose GPU is near the port
// (PXN). In processes of their own, as what a plug-in reads is read once.
namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;

constexpr int kPlugin = 11;
// The adapters next to the second and the third GPU of the topology.
constexpr const char* kPorts = "0000:67:01.0,0000:69:01.0";

using Variables = std::vector<std::pair<const char*, const char*>>;

void usePlugin(const Variables& variables = {}) {
  ::setenv("NCCL_NET_PLUGIN", testing::fakeNetPath(kPlugin).c_str(), 1);
  ::setenv("UNISONO_HOST_TOPOLOGY", UNISONO_TOPOLOGY, 1);
  ::setenv("FAKE_NET_PORTS", kPorts, 1);
  ::setenv("FAKE_NET_POINTERS", "7", 1);  // memory of hosts and of GPUs
  ::setenv("FAKE_NET_LATE", "1", 1);
  ::setenv("NCCL_PROTO", "Simple", 1);  // slots of LL are in memory of the host
  for (const auto& [name, value] : variables) ::setenv(name, value, 1);
}

// The log of this process, from the first use of the library on.
class Log {
 public:
  Log() : path_(::testing::TempDir() + "unisono-pxn-" + std::to_string(::getpid())) {
    ::setenv("NCCL_DEBUG", "INFO", 1);
    ::setenv("NCCL_DEBUG_FILE", path_.c_str(), 1);
  }
  ~Log() { ::unlink(path_.c_str()); }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  // How many lines have `text`.
  int count(const std::string& text) const {
    int found = 0;
    for (const std::string& line : lines()) {
      if (line.find(text) != std::string::npos) found++;
    }
    return found;
  }

 private:
  const std::string path_;
};

struct PxnCase {
  int nodes, ranksPerNode;
  Variables variables;
  bool forwards;
};

// A sanitizer has nothing new to see in a number between the smallest and the largest.
void everyCallOfSizes(const Ranks& ranks) {
  if (kSanitized) {
    everyCall(ranks, {1, 60'001});
  } else {
    everyCall(ranks, {1, 4099, 60'001});
  }
}

class Pxn : public ::testing::TestWithParam<PxnCase> {};

TEST_P(Pxn, MovesTheDataOfEveryCall) {
  inChild([] {
    const auto& [nodes, ranksPerNode, variables, forwards] = GetParam();
    usePlugin(variables);
    const Log log;
    {
      const Ranks ranks(nodes, ranksPerNode);
      everyCallOfSizes(ranks);
    }
    EXPECT_EQ(log.count("(PXN)") > 0, forwards);
  });
}
INSTANTIATE_TEST_SUITE_P(
    All, Pxn,
    ::testing::Values(PxnCase{2, 4, {{"NCCL_ALGO", "ring"}}, true},
                      PxnCase{2, 4, {{"NCCL_PROTO", "LL,Simple"}}, true},
                      PxnCase{2, 4, {{"NCCL_ALGO", "tree"}}, true},
                      PxnCase{3, 3, {{"NCCL_ALGO", "tree"}, {"NCCL_PROTO", "LL"}}, true},
                      PxnCase{2, 4, {{"NCCL_ALGO", "DirectTree,ring"}}, true},
                      PxnCase{2, 4, {{"NCCL_ALGO", "tree"}, {"NCCL_PXN_DISABLE", "1"}}, false},
                      PxnCase{2, 4, {{"NCCL_ALGO", "tree"}, {"FAKE_NET_POINTERS", "1"}}, false}));

// Adapters that turn out not to take memory of GPUs.
TEST(PxnOverHostMemory, MovesTheDataOfEveryCall) {
  inChild([] {
    usePlugin({{"NCCL_ALGO", "tree"}, {"FAKE_NET", "regMr of a GPU fails"}});
    ::setenv("NCCL_DMABUF_ENABLE", "0", 1);
    const Log log;
    {
      const Ranks ranks(2, 4);
      everyCallOfSizes(ranks);
    }
    EXPECT_GT(log.count("(PXN)"), 0);
    EXPECT_EQ(log.count("GPUDirect for rank"), 0);
  });
}

// One adapter for all, next to the second GPU. Rings that enter by it leave by another GPU.
TEST(PxnOverVerbs, MovesTheDataOfEveryCall) {
  namespace fs = std::filesystem;
  const fs::path folder =
      fs::path(::testing::TempDir()) / ("unisono_pxn_" + std::to_string(::getpid()));
  const fs::path device = folder / "devices/0000:67:01.0";
  fs::create_directories(device);
  fs::create_directories(folder / "a0");
  fs::create_directory_symlink(device, folder / "a0/device");
  for (const char* algorithm : {"ring", "tree"}) {
    inChild([&] {
      testing::loadFakeVerbs();
      ::setenv("NCCL_NET", "IB", 1);
      ::setenv("FAKE_VERBS", "a0 ib", 1);
      ::setenv("FAKE_VERBS_SYSFS", folder.c_str(), 1);
      ::setenv("FAKE_VERBS_LATE", "1", 1);
      ::setenv("NCCL_NET_FORCE_FLUSH", "1", 1);
      ::setenv("FAKE_VERBS_DELAY", "100", 1);
      ::setenv("UNISONO_HOST_TOPOLOGY", UNISONO_TOPOLOGY, 1);
      ::setenv("NCCL_ALGO", algorithm, 1);
      ::setenv("NCCL_PROTO", "Simple", 1);
      const Log log;
      {
        const Ranks ranks(2, 4);
        everyCallOfSizes(ranks);
      }
      EXPECT_GT(log.count("GPUDirect by DMA-BUF for rank"), 0);
      // What outlived a rank ends soon after; at most until the alarm of the process.
      while (testing::fakeVerbsCounter("fakeVerbsOpen") != 0) std::this_thread::sleep_for(1ms);
    });
  }
  fs::remove_all(folder);
}

// Where the messages of one rank to another pass.
struct Route {
  int forwarder, sendPort, receivePort;  // -1: not found in the log
};
Route routeOf(const Log& log, int sender, int receiver) {
  const auto portIn = [](const std::string& line) {
    constexpr std::string_view kBefore = "through device fake";
    const size_t place = line.find(kBefore);
    return place == std::string::npos ? -1 : line[place + kBefore.size()] - '0';
  };
  const std::string from = std::to_string(sender), to = std::to_string(receiver);
  const std::string sends = ": sends to rank " + to + " ",
                    forOther = " for rank " + from + " (PXN)";
  const std::string receives = "rank " + to + ": receives from rank " + from + " ";
  Route route{-1, -1, -1};
  for (const std::string& line : log.lines()) {
    if (line.find(receives) != std::string::npos) route.receivePort = portIn(line);
    const size_t place = line.find(sends);
    if (place == std::string::npos || portIn(line) < 0) continue;
    const size_t word = line.rfind("rank ", place);
    const int rank = std::stoi(line.substr(word + 5));
    const bool isForwarded = line.find(" (PXN)") != std::string::npos;
    if (isForwarded ? line.find(forOther) == std::string::npos : rank != sender) continue;
    route.forwarder = rank;
    route.sendPort = portIn(line);
  }
  return route;
}

constexpr Call kMessages[] = {Call::allToAll, Call::gather, Call::scatter, Call::sendReceive};

// Every GPU has a port of its own, and every rank exchanges data with every other one.
struct RailCase {
  Variables variables;
  bool forwards;
};
class PxnForMessages : public ::testing::TestWithParam<RailCase> {};

TEST_P(PxnForMessages, KeepsThemOnTheReceiversRail) {
  inChild([] {
    constexpr int kNodes = 3, kOfNode = 4;
    usePlugin(GetParam().variables);
    ::setenv("FAKE_NET_PORTS", "0000:65:01.0,0000:67:01.0,0000:69:01.0,0000:6b:01.0", 1);
    const Log log;
    {
      const Ranks ranks(kNodes, kOfNode);
      everyCall(ranks, kMessages, {1, 700, 60'001});
    }
    for (int sender = 0; sender < kNodes * kOfNode; sender++) {
      for (int receiver = 0; receiver < kNodes * kOfNode; receiver++) {
        const int node = sender / kOfNode;
        if (node == receiver / kOfNode) continue;
        const int own = sender % kOfNode, rail = receiver % kOfNode;
        const Route route = routeOf(log, sender, receiver);
        EXPECT_EQ(route.receivePort, rail) << sender << " to " << receiver;
        EXPECT_EQ(route.sendPort, GetParam().forwards ? rail : own) << sender << " to " << receiver;
        EXPECT_EQ(route.forwarder, node * kOfNode + (GetParam().forwards ? rail : own))
            << sender << " to " << receiver;
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(All, PxnForMessages,
                         ::testing::Values(RailCase{{}, true},
                                           RailCase{{{"NCCL_P2P_PXN_LEVEL", "1"}}, true},
                                           RailCase{{{"NCCL_P2P_PXN_LEVEL", "0"}}, false},
                                           RailCase{{{"NCCL_PXN_DISABLE", "1"}}, false}));

// A rank for each process: `nodes` of four, on the devices of a node each.
constexpr int kPerNode = 4, kRanks = 2 * kPerNode;

void onProcesses(const Variables& variables,
                 const std::function<void(int rank, ncclComm_t comm)>& body) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(kRanks, [&](int rank) {
    usePlugin(variables);
    ::setenv("NCCL_HOSTID", std::to_string(rank / kPerNode).c_str(), 1);
    check(unisonoHostSetDevice(rank % kPerNode));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, kRanks, sharedId(pipe, rank, kRanks), rank));
    body(rank, comm);
  });
  EXPECT_EQ(results, std::vector<int>(kRanks, 0));
}

// Broadcasts `count` numbers from `root`, once, and ends the communicator; with `delay` of this
// rank before each.
void broadcastAndLeave(int rank, ncclComm_t comm, int root, size_t count,
                       std::chrono::milliseconds delay) {
  const int device = rank % kPerNode;
  const DeviceBuffer buffer(device, count * sizeof(int));
  const DeviceStream stream(device);
  const auto valueOf = [](size_t i) { return static_cast<int>(i * 7919); };
  for (size_t i = 0; i < count; i++) buffer.as<int>()[i] = rank == root ? valueOf(i) : -1;
  std::this_thread::sleep_for(delay);
  check(ncclBroadcast(buffer.as(), buffer.as(), count, ncclInt, root, comm, stream));
  check(ncclCommDestroy(comm));
  int wrong = 0;
  for (size_t i = 0; i < count; i++) wrong += buffer.as<int>()[i] != valueOf(i) ? 1 : 0;
  EXPECT_EQ(wrong, 0);
}

// Ranks of the first node that are near a port. One channel leaves through each.
constexpr int kForwarders[] = {1, 2};

// Each rank leaves as soon as its own part is done, and its process exits. The forwarder, which
// sends first, sleeps when another rank of its node makes the call, of which it sends the data.
TEST(PxnForwarders, FinishForRanksThatAreLate) {
  for (const int forwarder : kForwarders) {
    for (const char* protocol : {"Simple", "LL"}) {
      onProcesses({{"NCCL_ALGO", "ring"}, {"NCCL_PROTO", protocol}},
                  [&](int rank, ncclComm_t comm) {
                    useOnce(comm, 10'000);
                    const bool isLate = rank < kPerNode && rank != forwarder;
                    broadcastAndLeave(rank, comm, forwarder, 5000, isLate ? 400ms : 0ms);
                  });
    }
  }
}

TEST(PxnForwarders, FinishLargeMessages) {
  onProcesses({{"NCCL_ALGO", "ring"}}, [](int rank, ncclComm_t comm) {
    broadcastAndLeave(rank, comm, 0, 3 << 20, 20ms * rank);
  });
}

// The others of their node end without ncclCommDestroy once the forwarders have called it.
// Processes of forwarders then end too, well before the limit of 30 s for senders that are late.
TEST(PxnForwarders, DoNotWaitForSendersThatHaveEnded) {
  const Pipe left[kRanks];
  const auto begin = std::chrono::steady_clock::now();
  onProcesses({{"NCCL_ALGO", "ring"}}, [&](int rank, ncclComm_t comm) {
    useOnce(comm, 10'000);
    if (std::ranges::find(kForwarders, rank) != std::end(kForwarders)) {
      check(ncclCommDestroy(comm));
      for (const Pipe& pipe : left) pipe.write(::getpid());
      return;
    }
    for (size_t i = 0; i < std::size(kForwarders); i++) {
      const auto process = left[rank].read<pid_t>();
      // So that no connection fails, the receivers stay until the parent has seen the end.
      while (rank >= kPerNode && ::kill(process, 0) == 0) std::this_thread::sleep_for(1ms);
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 25s);
}

// A rank of the same process that was not destroyed never ends.
TEST(PxnForwarders, DoNotWaitForTheirOwnProcess) {
  const auto begin = std::chrono::steady_clock::now();
  inChild([] {
    usePlugin({{"NCCL_ALGO", "ring"}});
    const Log log;
    // Only the forwarders are destroyed. Static, so that the others are no leak.
    static auto& ranks = *new Ranks(2, kPerNode);
    everyCall(ranks, {1000});
    for (const int forwarder : kForwarders) check(ncclCommDestroy(ranks.comm(forwarder)));
    EXPECT_GT(log.count("(PXN)"), 0);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 25s);
}

// One thread destroys all ranks of its process, the last ones first: forwarders before the ranks
// that they serve, and calls are still running.
TEST(PxnForwarders, EndInAnyOrder) {
  inChild([] {
    usePlugin({{"NCCL_ALGO", "ring"}});
    const Log log;
    std::vector<DeviceStream> streams;
    for (int rank = 0; rank < kRanks; rank++) streams.emplace_back(rank % kPerNode);
    std::vector<ncclComm_t> comms(kRanks);
    const ncclUniqueId id = newId();
    check(ncclGroupStart());
    for (int rank = 0; rank < kRanks; rank++) {
      const Setting node("NCCL_HOSTID", std::to_string(rank / kPerNode).c_str());
      check(unisonoHostSetDevice(rank % kPerNode));
      check(ncclCommInitRank(&comms[static_cast<size_t>(rank)], kRanks, id, rank));
    }
    check(ncclGroupEnd());
    std::vector<DeviceBuffer> buffers;
    for (int rank = 0; rank < kRanks; rank++) {
      buffers.emplace_back(rank % kPerNode, size_t{4} << 20);
      std::fill_n(buffers.back().as<int>(), 1 << 20, rank);
    }
    check(ncclGroupStart());
    for (size_t rank = 0; rank < kRanks; rank++) {
      check(ncclAllReduce(buffers[rank].as(), buffers[rank].as(), 1 << 20, ncclInt, ncclSum,
                          comms[rank], streams[rank]));
    }
    check(ncclGroupEnd());
    for (auto comm = comms.rbegin(); comm != comms.rend(); comm++) check(ncclCommDestroy(*comm));
    for (const DeviceBuffer& each : buffers) {
      EXPECT_EQ(std::count(each.as<int>(), each.as<int>() + (1 << 20), kRanks * (kRanks - 1) / 2),
                1 << 20);
    }
    EXPECT_GT(log.count("(PXN)"), 0);
    // What outlived a rank is closed soon after; at most until the alarm of the process.
    while (testing::fakeNetCounter(kPlugin, "fakeNetOpen") != 0) std::this_thread::sleep_for(1ms);
  });
}

// Sends `count` numbers from one rank to another, in a call of these two. The text of the error if
// it fails.
std::string sendOne(int rank, ncclComm_t comm, int sender, int receiver, size_t count) {
  if (rank != sender && rank != receiver) return "";
  const DeviceBuffer buffer(rank % kPerNode, count * sizeof(int));
  const DeviceStream stream(rank % kPerNode);
  const auto valueOf = [&](size_t i) { return static_cast<int>(i * 7919) + sender; };
  for (size_t i = 0; i < count; i++) buffer.as<int>()[i] = rank == sender ? valueOf(i) : -1;
  const ncclResult_t result = rank == sender
                                  ? ncclSend(buffer.as(), count, ncclInt, receiver, comm, stream)
                                  : ncclRecv(buffer.as(), count, ncclInt, sender, comm, stream);
  if (result != ncclSuccess) return ncclGetLastError(comm);
  unisonoHostStreamSynchronize(stream);
  int wrong = 0;
  for (size_t i = 0; i < count; i++) wrong += buffer.as<int>()[i] != valueOf(i) ? 1 : 0;
  EXPECT_EQ(wrong, 0);
  return "";
}

// The port of the receiver, rank 5, is near rank 1, which is busy with something else.
constexpr int kSender = 0, kReceiver = kPerNode + kForwarders[0];

TEST(PxnForwarders, ConnectMessagesOfOthers) {
  const Pipe counted;
  onProcesses({}, [&](int rank, ncclComm_t comm) {
    const auto bytes = [comm] {
      uint64_t value = 0;
      check(ncclCommMemStats(comm, ncclStatGpuMemTotal, &value));
      return value;
    };
    const uint64_t before = bytes();
    if (rank == kForwarders[0]) counted.write(rank);
    if (rank == kSender) counted.read<int>();
    if (rank != kSender && rank != kReceiver) std::this_thread::sleep_for(300ms);
    // At most until the alarm of the process: it makes no call, and its memory grows all the same.
    while (rank == kForwarders[0] && bytes() == before) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(sendOne(rank, comm, kSender, kReceiver, 50'000), "");
    useOnce(comm, 10'000);
    EXPECT_EQ(sendOne(rank, comm, kSender, kReceiver, 100), "");
    for (int other = 1; other < kPerNode; other++) {
      EXPECT_EQ(sendOne(rank, comm, other, kReceiver, 60'000), "");
      EXPECT_EQ(sendOne(rank, comm, kReceiver, other, 60'000), "");
    }
    useOnce(comm, 10'000);
    check(ncclCommDestroy(comm));
  });
}

TEST(PxnForwarders, ConnectMessagesAfterASuspension) {
  onProcesses({}, [](int rank, ncclComm_t comm) {
    for (int round = 0; round < 3; round++) {
      EXPECT_EQ(sendOne(rank, comm, kSender, kReceiver, 5000), "");
      check(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
      if (rank != kSender && rank != kReceiver) std::this_thread::sleep_for(20ms);
      check(ncclCommResume(comm));
    }
    useOnce(comm, 10'000);
    check(ncclCommDestroy(comm));
  });
}

// A message is the first between its ranks when the forwarder has ended.
TEST(PxnForwarders, ThatHaveLeftAreNamed) {
  onProcesses({}, [](int rank, ncclComm_t comm) {
    if (rank != kSender && rank != kReceiver) {
      check(ncclCommDestroy(comm));
      return;
    }
    std::this_thread::sleep_for(200ms);
    const std::string error = sendOne(rank, comm, kSender, kReceiver, 100);
    if (rank == kSender) expectParts(error, {"Rank 1", "PXN"});
    EXPECT_NE(error, "");
    check(ncclCommAbort(comm));
  });
}

TEST(PxnForwarders, SayWhyTheyCannotConnect) {
  const Pipe ready;
  onProcesses({{"FAKE_NET", "connect fails"}}, [&](int rank, ncclComm_t comm) {
    ready.write(rank);
    for (int i = 0; rank == kSender && i < kRanks; i++)
      ready.read<int>();  // all have a communicator
    std::string error = sendOne(rank, comm, kSender, kReceiver, 100);
    ncclResult_t state = ncclSuccess;
    while (error.empty() && state == ncclSuccess) {
      std::this_thread::sleep_for(1ms);
      check(ncclCommGetAsyncError(comm, &state));
    }
    if (error.empty()) error = ncclGetLastError(comm);
    expectParts(error, {"connect of the net plug-in", "ank 1"});
    check(ncclCommAbort(comm));
  });
}

// The host of the receiver has two ports at one GPU, and that of the sender has them at two: every
// second channel is forwarded.
TEST(PxnForwarders, TakeSomeOfTheChannels) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(4, [&](int rank) {
    usePlugin({{"NCCL_MIN_P2P_NCHANNELS", "8"}});
    const bool isSender = rank < 2;
    ::setenv("FAKE_NET_PORTS", isSender ? "0000:65:01.0,0000:67:01.0" : "0000:69:01.0,0000:69:01.0",
             1);
    ::setenv("NCCL_HOSTID", isSender ? "0" : "1", 1);
    check(unisonoHostSetDevice(rank));
    const Log log;
    {
      ncclComm_t comm = nullptr;
      check(ncclCommInitRank(&comm, 4, sharedId(pipe, rank, 4), rank));
      EXPECT_EQ(sendOne(rank, comm, 0, 2, 3'000'000), "");
      EXPECT_EQ(sendOne(rank, comm, 2, 0, 3'000'000), "");
      useOnce(comm, 100);
      check(ncclCommDestroy(comm));
    }
    // Of ranks 0 and 1.
    for (int device = 0; device < 2; device++) {
      const std::string text = "sends to rank 2 through device fake" + std::to_string(device);
      EXPECT_EQ(log.count(text) > 0, rank == device);
    }
  });
  EXPECT_EQ(results, std::vector<int>(4, 0));
}

// Calls until one fails. The text of the error.
std::string callUntilError(int rank, ncclComm_t comm, const std::function<void()>& afterFirst) {
  EndlessCall call(comm, rank % kPerNode);
  for (int i = 0;; i++) {
    ncclResult_t state = call.enqueue();
    if (state == ncclSuccess) check(ncclCommGetAsyncError(comm, &state));
    if (state != ncclSuccess) break;
    if (i == 3) afterFirst();
    std::this_thread::sleep_for(5ms);
  }
  std::string text = ncclGetLastError(comm);
  call.abort();
  return text;
}

TEST(PxnForwarders, AreNamedWhenTheyDie) {
  onProcesses({{"NCCL_ALGO", "ring"}}, [](int rank, ncclComm_t comm) {
    const std::string error = callUntilError(rank, comm, [rank] {
      if (rank == kForwarders[0]) ::_exit(0);
    });
    EXPECT_TRUE(error.find("ank 1") != std::string::npos ||
                error.find("peer 1") != std::string::npos)
        << error;
  });
}

TEST(PxnForwarders, AreNamedWhenTheyAbort) {
  onProcesses({{"NCCL_ALGO", "ring"}}, [](int rank, ncclComm_t comm) {
    if (rank == kForwarders[0]) {
      const EndlessCall call(comm, rank % kPerNode);
      for (int i = 0; i < 4; i++) check(call.enqueue());
      call.abort();
      return;
    }
    const std::string error = callUntilError(rank, comm, [] {});
    EXPECT_NE(error.find("ank 1"), std::string::npos) << error;
  });
}

// The connection of a forwarder fails: all ranks learn of it, with the rank for which it was.
TEST(PxnForwarders, SayForWhomTheySend) {
  const Variables failing = {{"NCCL_ALGO", "ring"}};
  onProcesses(failing, [](int rank, ncclComm_t comm) {
    if (rank == kForwarders[0]) ::setenv("FAKE_NET", "send fails", 1);
    const std::string error = callUntilError(rank, comm, [] {});
    expectParts(error, {"through device fake0 of Fake11 (v11), GPUDirect by DMA-BUF for rank 0 "
                        "(PXN) failed",
                        "rank 1"});
  });
}

}  // namespace
}  // namespace unisono::system_test
