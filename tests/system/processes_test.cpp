// SPDX-License-Identifier: Apache-2.0
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <latch>
#include <set>
#include <sstream>
#include <thread>

#include "child_processes.h"
#include "collective_case.h"

// Ranks in several processes.
namespace unisono::system_test {
namespace {

enum class Between { peers, nodes, hostMemory, hostMemoryOfSender, sockets, socketsOfOneHost };

// Whose copy engines move data through host memory, as NCCL_SHM_MEMCPY_MODE has it.
enum class Copies { none, ofSender, ofReceiver, ofBoth };

struct Layout {
  int processes;
  int ranksEach;
  Between between;  // processes
  const char* algorithm = "";
  const char* protocol = "";
  Copies copies = Copies::none;
};

// Whether this process maps memory of the host that several GPUs use.
bool mapsHostMemory() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:unisono-host-memory") != std::string::npos) return true;
  }
  return false;
}

bool usesHostMemory(const Layout& layout) {
  return layout.between == Between::hostMemory || layout.between == Between::hostMemoryOfSender;
}

bool usesNetwork(const Layout& layout) {
  return layout.between == Between::sockets || layout.between == Between::socketsOfOneHost;
}

// The descriptors of sockets that are connected over the network.
std::set<int> openSockets() {
  std::set<int> sockets;
  for (int descriptor = 0; descriptor < 256; descriptor++) {
    sockaddr_storage address;
    socklen_t length = sizeof(address);
    const bool connected =
        ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0;
    if (connected && address.ss_family == AF_INET) sockets.insert(descriptor);
  }
  return sockets;
}

// Whether this process has a thread that moves data over the network or by copy engines.
bool hasProxy() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "unisono-proxy") return true;
  }
  return false;
}

void setSockets(int process) {
  ::setenv("NCCL_HOSTID", std::to_string(process).c_str(), 1);
  ::setenv("NCCL_NET", "Socket", 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  // Connections to every second process have several sockets.
  if (process % 2 == 1) ::setenv("NCCL_SOCKET_NTHREADS", "2", 1);
}

// One process's ranks, each on a thread.
void runRanks(const Layout& layout, int process, const ncclUniqueId& id) {
  const int ranks = layout.processes * layout.ranksEach;
  onThreads(layout.ranksEach, [&](int thread) {
    const int rank = process * layout.ranksEach + thread;
    // Simulated devices are the same ones in every process of a node.
    const int device = rank % 8;
    check(unisonoHostSetDevice(device));
    Member member(id, rank, ranks);
    DeviceStream stream(device);
    for (Call call : kCalls) {
      for (size_t count : {size_t{1}, size_t{4099}, static_cast<size_t>(scaled(200'003, 30'001))}) {
        Case made;
        made.call = call;
        made.count = count;
        made.root = ranks - 1;
        made.type = bench::ElementType::bfloat16;
        CaseBuffers buffers(made, rank, ranks, device);
        check(buffers.enqueue(member.comm, stream));
        stream.synchronize();
        buffers.verify();
      }
    }
    EXPECT_EQ(mapsHostMemory(), usesHostMemory(layout));
    EXPECT_EQ(hasProxy(), usesNetwork(layout) || layout.copies != Copies::none);
    ncclComm_t child = nullptr;
    check(ncclCommSplit(member.comm, rank % 2, -rank, &child, nullptr));
    useOnce(child);
    check(ncclCommDestroy(child));
  });
}

class Processes : public ::testing::TestWithParam<Layout> {};

TEST_P(Processes, EveryCall) {
  const Layout layout = GetParam();
#ifdef __SANITIZE_THREAD__
  // The groups of a tree use a buffer one after the other because data pass another process, where
  // ThreadSanitizer does not see them. Trees inside one process are in other tests.
  if (layout.algorithm == std::string_view("tree")) {
    GTEST_SKIP() << "ThreadSanitizer does not see the order that another process makes";
  }
#endif
  const Pipe pipe, done;
  const std::vector<int> results = runChildren(layout.processes, [&](int process) {
    if (layout.between == Between::nodes) {
      ::setenv("NCCL_HOSTID", std::to_string(process).c_str(), 1);
    }
    if (usesHostMemory(layout)) ::setenv("NCCL_P2P_DISABLE", "1", 1);
    if (layout.between == Between::hostMemoryOfSender) ::setenv("NCCL_SHM_LOCALITY", "1", 1);
    if (layout.copies != Copies::none) {
      ::setenv("NCCL_SHM_USE_CUDA_MEMCPY", "1", 1);
      ::setenv("NCCL_SHM_MEMCPY_MODE", std::to_string(static_cast<int>(layout.copies)).c_str(), 1);
    }
    if (layout.between == Between::sockets) setSockets(process);
    if (layout.between == Between::socketsOfOneHost) {
      ::setenv("NCCL_P2P_DISABLE", "1", 1);
      ::setenv("NCCL_SHM_DISABLE", "1", 1);
    }
    if (*layout.algorithm != '\0') ::setenv("NCCL_ALGO", layout.algorithm, 1);
    ::setenv("NCCL_PROTO", layout.protocol, 1);
    runRanks(layout, process, sharedId(pipe, process, layout.processes));
    // The root's process lives until all have joined; the others may go when they like.
    if (process != 0) {
      done.write(process);
    } else {
      for (int other = 1; other < layout.processes; other++) done.read<int>();
    }
  });
  for (int process = 0; process < layout.processes; process++) {
    EXPECT_EQ(results[static_cast<size_t>(process)], 0) << "process " << process;
  }
}

std::string nameOf(const ::testing::TestParamInfo<Layout>& test) {
  constexpr const char* kNames[] = {
      "", "Nodes", "HostMemory", "HostMemoryOfSender", "Sockets", "SocketsOfOneHost"};
  constexpr const char* kCopies[] = {"", "CopiedBySender", "CopiedByReceiver", "CopiedByBoth"};
  return std::to_string(test.param.processes) + "x" + std::to_string(test.param.ranksEach) +
         kNames[static_cast<int>(test.param.between)] +
         kCopies[static_cast<int>(test.param.copies)] + test.param.algorithm + test.param.protocol;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Processes,
    ::testing::Values(Layout{2, 1, Between::peers}, Layout{3, 1, Between::peers},
                      Layout{4, 1, Between::peers}, Layout{2, 2, Between::peers},
                      Layout{4, 2, Between::peers}, Layout{2, 2, Between::nodes},
                      Layout{4, 1, Between::nodes}, Layout{2, 1, Between::hostMemory},
                      Layout{3, 2, Between::hostMemory}, Layout{3, 2, Between::hostMemoryOfSender},
                      Layout{3, 1, Between::hostMemory, "tree", "Simple"},
                      Layout{2, 1, Between::hostMemory, "ring", "LL"},
                      Layout{3, 2, Between::hostMemory, "", "", Copies::ofSender},
                      Layout{3, 1, Between::hostMemoryOfSender, "", "", Copies::ofReceiver},
                      Layout{2, 2, Between::hostMemory, "tree", "Simple", Copies::ofBoth},
                      Layout{2, 1, Between::sockets}, Layout{2, 2, Between::sockets},
                      Layout{3, 1, Between::sockets, "tree", "Simple"},
                      Layout{2, 1, Between::socketsOfOneHost}),
    nameOf);

// With buffers that the other process has mapped.
class Suspends : public ::testing::TestWithParam<bool> {};

TEST_P(Suspends, BetweenProcesses) {
  const bool overNetwork = GetParam();
  const Pipe pipe;
  const Meeting ready;
  const std::vector<int> results = runChildren(2, [&](int process) {
    if (overNetwork) setSockets(process);
    const ncclComm_t comm = joinTwo(pipe, process);
    const auto memory = [&](ncclCommMemStat_t stat) {
      uint64_t bytes = 0;
      check(ncclCommMemStats(comm, stat, &bytes));
      return bytes;
    };
    for (int round = 0; round < 3; round++) {
      useOnce(comm);
      useOnce(comm, 1'000'000);
      useOnce(comm, 1'000'000);
      EXPECT_GT(memory(ncclStatGpuMemSuspend), 0u);
      const uint64_t persistent = memory(ncclStatGpuMemPersist);
      check(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
      EXPECT_EQ(memory(ncclStatGpuMemTotal), persistent);
      check(ncclCommResume(comm));
    }
    useOnce(comm, 1'000'000);
    ready.wait(process);
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

INSTANTIATE_TEST_SUITE_P(Networks, Suspends, ::testing::Bool());

bool canEnterNetworkNamespace() {
  return runChildren(1, [](int) { ::_exit(::unshare(CLONE_NEWNET) == 0 ? 0 : 1); }).front() == 0;
}

// Ranks of one machine that reach each other over TCP, but not each other's memory, use the
// network, unless the user says that they are one host. The namespace of a process is that of its
// first thread: here it leaves the one that the ranks' threads talk in.
class ProcessesInOtherNetworkNamespaces : public ::testing::TestWithParam<bool> {};
TEST_P(ProcessesInOtherNetworkNamespaces, UseTheNetworkOrAreRefused) {
  if (!canEnterNetworkNamespace()) {
    GTEST_SKIP() << "NOT TESTED: network namespaces need more rights than we have";
  }
  const Pipe pipe;
  const std::vector<int> results = runChildren(2, [&](int process) {
    std::latch left(1);
    std::thread rank([&] {
      left.wait();
      check(unisonoHostSetDevice(process));
      if (GetParam()) ::setenv("NCCL_HOSTID", "one", 1);
      ncclComm_t comm = nullptr;
      const ncclResult_t result = ncclCommInitRank(&comm, 2, sharedId(pipe, process, 2), process);
      EXPECT_EQ(result, GetParam() ? ncclInvalidUsage : ncclSuccess) << ncclGetLastError(nullptr);
      if (result == ncclSuccess) {
        useOnce(comm, 100'000);
        check(ncclCommDestroy(comm));
      } else {
        EXPECT_NE(std::strstr(ncclGetLastError(nullptr), "network namespaces"), nullptr)
            << ncclGetLastError(nullptr);
      }
    });
    if (process == 1 && ::unshare(CLONE_NEWNET) != 0) throw std::runtime_error("unshare");
    left.count_down();
    rank.join();
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

INSTANTIATE_TEST_SUITE_P(WithOneHostId, ProcessesInOtherNetworkNamespaces, ::testing::Bool());

// Enters a network namespace with a loopback interface, where listeners queue few connections.
void enterNetworkWithShortQueues() {
  if (::unshare(CLONE_NEWNET) != 0) throw std::runtime_error("unshare");
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request = {};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING | IFF_LOOPBACK;
  if (::ioctl(socket, SIOCSIFFLAGS, &request) != 0) throw std::runtime_error("SIOCSIFFLAGS");
  ::close(socket);
  std::ofstream("/proc/sys/net/core/somaxconn") << 16 << std::flush;
  int queued = 0;
  std::ifstream("/proc/sys/net/core/somaxconn") >> queued;
  if (queued != 16) throw std::runtime_error("somaxconn");
}

// All ranks connect to all others at once: more than the queue of a listener holds.
TEST(ProcessesWithShortQueues, FirstAllToAllOfManyRanks) {
  if (!canEnterNetworkNamespace()) {
    GTEST_SKIP() << "NOT TESTED: network namespaces need more rights than we have";
  }
  const std::vector<int> results = runChildren(1, [](int) {
    enterNetworkWithShortQueues();
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    constexpr int kRanks = scaled(48, 24);
    const ncclUniqueId id = newId();
    onThreads(kRanks, [&](int rank) {
      const int device = deviceOf(rank);
      Member member(id, rank, kRanks);
      DeviceStream stream(device);
      Case made;
      made.call = Call::allToAll;
      made.count = 4;
      CaseBuffers buffers(made, rank, kRanks, device);
      check(buffers.enqueue(member.comm, stream));
      stream.synchronize();
      buffers.verify();
    });
  });
  EXPECT_EQ(results, std::vector<int>({0}));
}

// Without a list, sockets use all interfaces but the loopback.
TEST(ProcessesWithTwoInterfaces, UseBoth) {
  const bool hasTool = std::system("ip -V >/dev/null 2>&1") == 0;
  if (!hasTool || !canEnterNetworkNamespace()) {
    GTEST_SKIP() << "NOT TESTED: needs ip(8) and the right to make network namespaces";
  }
  const std::string log = testing::TempDir() + "unisono_interfaces_" + std::to_string(::getpid());
  const std::vector<int> results = runChildren(1, [&](int) {
    if (::unshare(CLONE_NEWNET) != 0) throw std::runtime_error("unshare");
    const int made = std::system(
        "ip link set lo up && ip link add one type veth peer name two && "
        "ip addr add 192.0.2.1/24 dev one && ip addr add 198.51.100.1/24 dev two && "
        "ip link set one up && ip link set two up");
    if (made != 0) throw std::runtime_error("ip");
    ::setenv("NCCL_NET", "Socket", 1);
    ::setenv("NCCL_DEBUG", "INFO", 1);
    ::setenv("NCCL_DEBUG_FILE", log.c_str(), 1);
    const Ranks ranks(2, 1);
    Case call;
    call.call = Call::allReduce;
    call.count = 100'000;
    runCase(ranks, call);
  });
  EXPECT_EQ(results, std::vector<int>({0}));
  std::ostringstream text;
  text << std::ifstream(log).rdbuf();
  for (const char* part :
       {" initialized in ", "sends to rank 1 to 192.0.2.1:", "sends to rank 1 to 198.51.100.1:",
        " over one", " over two", "sends to rank 0 to 198.51.100.1:"}) {
    EXPECT_NE(text.str().find(part), std::string::npos) << part << "\n" << text.str();
  }
  EXPECT_EQ(text.str().find("127.0.0.1"), std::string::npos) << text.str();
  ::unlink(log.c_str());
}

// What only one rank finds wrong, after all have joined, is told to the others.
TEST(ProcessesThatFail, TellTheOthersWhy) {
  const Pipe pipe;
  const std::vector<int> results = runChildren(3, [&](int process) {
    if (process == 2) ::setenv("NCCL_TOPO_FILE", "/proc/version", 1);
    check(unisonoHostSetDevice(process));
    ncclComm_t comm = nullptr;
    EXPECT_NE(ncclCommInitRank(&comm, 3, sharedId(pipe, process, 3), process), ncclSuccess);
    const std::string text = ncclGetLastError(nullptr);
    EXPECT_NE(text.find("/proc/version"), std::string::npos) << text;
    EXPECT_EQ(text.find("Rank 2 reports") != std::string::npos, process != 2) << text;
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 0}));
}

// A process that dies in the middle leaves the others with an error or a wait that abort ends.
void abortAfterADeath(bool sockets) {
  const Pipe pipe;
  const Meeting arrived;
  const std::vector<int> results = runChildren(2, [&](int process) {
    if (sockets) setSockets(process);
    const ncclComm_t comm = joinTwo(pipe, process);
    useOnce(comm, 300'000);
    // What the network still had to send has arrived.
    arrived.wait(process);
    if (process == 1) ::_exit(0);
    DeviceBuffer buffer(0, 1 << 20);
    DeviceStream stream(0);
    ncclAllReduce(buffer.as(), buffer.as(), 1 << 18, ncclInt, ncclSum, comm, stream);
    check(ncclCommAbort(comm));
    unisonoHostStreamSynchronize(stream);
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}
TEST(ProcessesThatDie, OthersCanAbort) {
  abortAfterADeath(false);
}
TEST(ProcessesThatDie, OthersCanAbortACallOverSockets) {
  abortAfterADeath(true);
}

// The others wait for it in a kernel: they hear who it was, and their streams complete.
void dieInACallOfTheOthers(bool sockets) {
  const Pipe pipe, called;
  const std::vector<int> results = runChildren(3, [&](int process) {
    if (sockets) setSockets(process);
    check(unisonoHostSetDevice(process));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 3, sharedId(pipe, process, 3), process));
    useOnce(comm, 300'000);
    if (process == 2) {
      for (int other = 0; other < 2; other++) called.read<int>();
      ::kill(::getpid(), SIGKILL);
    }
    called.write(process);
    DeviceBuffer buffer(process, 1 << 20);
    DeviceStream stream(process);
    // The death may be known already.
    static_cast<void>(
        ncclAllReduce(buffer.as(), buffer.as(), 1 << 18, ncclInt, ncclSum, comm, stream));
    EXPECT_EQ(unisonoHostStreamSynchronize(stream), ncclSuccess);
    ncclResult_t state = ncclSuccess;
    EXPECT_OK(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclRemoteError);
    const std::string text = ncclGetLastError(comm);
    const bool named = text.find("Rank 2 (process ") != std::string::npos;
    // On a busy machine the end of a connection may be known first.
    EXPECT_TRUE(named || (sockets && text.find("peer 2") != std::string::npos)) << text;
    EXPECT_EQ(ncclAllReduce(buffer.as(), buffer.as(), 4, ncclInt, ncclSum, comm, stream),
              ncclRemoteError);
    EXPECT_OK(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 100 + SIGKILL}));
}
TEST(ProcessesThatDie, InACallOfTheOthers) {
  dieInACallOfTheOthers(false);
}
TEST(ProcessesThatDie, InACallOverSockets) {
  dieInACallOfTheOthers(true);
}

// Connections that end although their processes live: the ranks are told which. An abort does not
// wait for the network.
TEST(ProcessesOverSockets, HearOfConnectionsThatFail) {
  const Pipe pipe;
  const Meeting meeting;
  const std::vector<int> results = runChildren(2, [&](int process) {
    setSockets(process);
    const ncclComm_t comm = joinTwo(pipe, process);
    const std::set<int> before = openSockets();
    useOnce(comm, 300'000);
    meeting.wait(process);
    if (process == 1) {
      for (const int socket : openSockets()) {
        if (!before.contains(socket)) ::shutdown(socket, SHUT_RDWR);
      }
    }
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess) {
      check(ncclCommGetAsyncError(comm, &state));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(state, ncclRemoteError);
    const std::string text = ncclGetLastError(comm);
    EXPECT_NE(text.find("network connection"), std::string::npos) << text;
    EXPECT_NE(text.find("over lo"), std::string::npos) << text;
    check(ncclCommAbort(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

// The resident memory of this process, in KiB.
long residentMemory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::atol(line.c_str() + 6);
  }
  return 0;
}

// Two processes go on after a third one has died, again and again: UNISONO_TEST_DEATHS times.
TEST(ProcessesThatDie, AreReplacedManyTimes) {
  const char* asked = std::getenv("UNISONO_TEST_DEATHS");
  const int deaths = asked == nullptr ? scaled(20, 3) : std::atoi(asked);
  const int settled = deaths / 10;  // the process has what it keeps by then
  const Pipe toSecond, toVictims;
  const std::vector<int> results = runChildren(2 + deaths, [&](int process) {
    if (process >= 2) {
      const auto id = toVictims.read<ncclUniqueId>();
      check(unisonoHostSetDevice(2));
      ncclComm_t comm = nullptr;
      check(ncclCommInitRank(&comm, 3, id, 2));
      useOnce(comm, 300'000);
      ::raise(SIGKILL);
    }
    check(unisonoHostSetDevice(process));
    int descriptors = 0, threads = 0;
    long memory = 0;
    for (int death = 0; death < deaths; death++) {
      ncclUniqueId id;
      if (process == 0) {
        id = newId();
        toSecond.write(id);
        toVictims.write(id);
      } else {
        id = toSecond.read<ncclUniqueId>();
      }
      ncclComm_t comm = nullptr, child = nullptr;
      check(ncclCommInitRank(&comm, 3, id, process));
      useOnce(comm, 300'000);
      DeviceBuffer buffer(process, 1 << 20);
      const DeviceStream stream(process);
      static_cast<void>(
          ncclAllReduce(buffer.as(), buffer.as(), 1 << 18, ncclInt, ncclSum, comm, stream));
      ncclResult_t state = ncclSuccess;
      while (state == ncclSuccess) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        check(ncclCommGetAsyncError(comm, &state));
      }
      EXPECT_EQ(state, ncclRemoteError);
      int excluded[] = {2};
      ncclComm_t refused = nullptr;
      EXPECT_EQ(ncclCommShrink(comm, excluded, 1, &refused, nullptr, NCCL_SHRINK_DEFAULT),
                ncclRemoteError);
      check(ncclCommShrink(comm, excluded, 1, &child, nullptr, NCCL_SHRINK_ABORT));
      stream.synchronize();
      useOnce(child, 300'000);
      check(ncclCommDestroy(comm));
      check(ncclCommDestroy(child));
      if (death == settled) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        descriptors = openDescriptors();
        threads = runningThreads();
        memory = residentMemory();
      }
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while ((openDescriptors() > descriptors || runningThreads() > threads) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_LE(openDescriptors(), descriptors);
    EXPECT_LE(runningThreads(), threads);
    constexpr long kAllowance = 16 << 10;  // KiB: freed memory that the allocator keeps
    // Sanitizers keep more of their own.
    if (!kSanitized) {
      EXPECT_LE(residentMemory(), memory + kAllowance);
    }
    if (asked != nullptr) {
      std::printf(
          "process %d: %d descriptors (%d), %d threads (%d), %ld KiB (%ld) after %d deaths\n",
          process, openDescriptors(), descriptors, runningThreads(), threads, residentMemory(),
          memory, deaths);
    }
  });
  for (size_t process = 0; process < results.size(); process++) {
    EXPECT_EQ(results[process], process < 2 ? 0 : 100 + SIGKILL) << "process " << process;
  }
}

// The peer goes before the two are connected: the call itself ends with an error that names it.
// Rank 2 connects rank 3 to the others until it leaves.
TEST(ProcessesThatDie, AfterTheRankBetweenHasLeft) {
  const Pipe pipe, left, gone;
  const std::vector<int> results = runChildren(4, [&](int process) {
    check(unisonoHostSetDevice(process));
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 4, sharedId(pipe, process, 4), process));
    if (process == 2) {
      check(ncclCommDestroy(comm));
      for (int other = 0; other < 3; other++) left.write(process);
      for (int other = 0; other < 2; other++) gone.read<int>();
      return;
    }
    left.read<int>();
    if (process == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      ::raise(SIGKILL);
    }
    ncclResult_t state = ncclSuccess;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (state == ncclSuccess && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      check(ncclCommGetAsyncError(comm, &state));
    }
    EXPECT_EQ(state, ncclRemoteError);
    EXPECT_NE(std::strstr(ncclGetLastError(comm), "Rank 3 (process "), nullptr)
        << ncclGetLastError(comm);
    gone.write(process);
    EXPECT_OK(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 0, 100 + SIGKILL}));
}

// A death ends every communicator that the process is in, with its number there, and no other one:
// the communicator that they were split from, or one that was split from it.
TEST(ProcessesThatDie, EndAllTheirCommunicatorsAndNoOther) {
  const Pipe pipe, ready;
  const std::vector<int> results = runChildren(3, [&](int process) {
    check(unisonoHostSetDevice(process));
    ncclComm_t parent = nullptr, all = nullptr, spared = nullptr;
    check(ncclCommInitRank(&parent, 3, sharedId(pipe, process, 3), process));
    check(ncclCommSplit(parent, 0, -process, &all, nullptr));  // the victim is rank 0 there
    check(ncclCommSplit(all, process == 2 ? NCCL_SPLIT_NOCOLOR : 0, process, &spared, nullptr));
    useOnce(all);
    if (spared != nullptr) useOnce(spared);
    if (process == 2) {
      for (int other = 0; other < 2; other++) ready.read<int>();
      ::raise(SIGKILL);
    }
    ready.write(process);
    for (const auto& [comm, name] :
         {std::pair(parent, "Rank 2 (process "), std::pair(all, "Rank 0 (process ")}) {
      ncclResult_t state = ncclSuccess;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (state == ncclSuccess && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        check(ncclCommGetAsyncError(comm, &state));
      }
      EXPECT_EQ(state, ncclRemoteError);
      EXPECT_NE(std::strstr(ncclGetLastError(comm), name), nullptr) << ncclGetLastError(comm);
    }
    useOnce(spared);
    EXPECT_OK(process == 0 ? ncclCommDestroy(parent) : ncclCommAbort(parent));
    ncclComm_t child = nullptr;
    check(ncclCommSplit(spared, 0, -process, &child, nullptr));
    EXPECT_OK(ncclCommDestroy(all));
    useOnce(child);
    useOnce(spared, 300'000);
    ncclResult_t state = ncclInternalError;
    EXPECT_OK(ncclCommGetAsyncError(spared, &state));
    EXPECT_EQ(state, ncclSuccess);
    EXPECT_OK(ncclCommDestroy(spared));
    EXPECT_OK(ncclCommDestroy(child));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0, 100 + SIGKILL}));
}

TEST(ProcessesThatDie, BeforeTheFirstCall) {
  const Pipe pipe, joined;
  const std::vector<int> results = runChildren(2, [&](int process) {
    const ncclComm_t comm = joinTwo(pipe, process);
    if (process == 1) {
      joined.read<int>();  // a death before that is an error of the other's initialization
      ::_exit(0);
    }
    joined.write(process);
    DeviceBuffer buffer(0, 64);
    DeviceStream stream(0);
    const ncclResult_t result =
        ncclAllReduce(buffer.as(), buffer.as(), 4, ncclInt, ncclSum, comm, stream);
    EXPECT_EQ(result, ncclRemoteError);
    EXPECT_NE(std::strstr(ncclGetLastError(comm), "1"), nullptr) << ncclGetLastError(comm);
    ncclResult_t state = ncclSuccess;
    EXPECT_OK(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclRemoteError);
    EXPECT_OK(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

// A process takes others in, one after the other.
TEST(ProcessesThatJoin, MakeACommunicatorGrow) {
  constexpr int kProcesses = 3;
  const Pipe ids[kProcesses];
  const std::vector<int> results = runChildren(kProcesses, [&](int process) {
    check(unisonoHostSetDevice(process));
    ncclComm_t comm = nullptr;
    if (process == 0) check(ncclCommInitRank(&comm, 1, newId(), 0));
    for (int ranks = 2; ranks <= kProcesses; ranks++) {
      const int newcomer = ranks - 1;
      ncclUniqueId id;
      ncclComm_t grown = nullptr;
      if (process == 0) {
        check(ncclCommGetUniqueId(comm, &id));
        ids[newcomer].write(id);
      }
      if (process > newcomer) continue;
      if (process == newcomer) {
        id = ids[newcomer].read<ncclUniqueId>();
        check(ncclCommGrow(nullptr, ranks, &id, process, &grown, nullptr));
      } else {
        check(ncclCommGrow(comm, ranks, process == 0 ? &id : nullptr, -1, &grown, nullptr));
        useOnce(comm);
        check(ncclCommDestroy(comm));
      }
      comm = grown;
      useOnce(comm);
      useOnce(comm, 300'000);
    }
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>(kProcesses, 0));
}

}  // namespace
}  // namespace unisono::system_test
