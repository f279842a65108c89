// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "child_processes.h"

// Clients of NCCL's RAS protocol. The service of a process starts with its first communicator and
// keeps its address, so all tests of this program share one.
namespace unisono::system_test {
namespace {

using nlohmann::json;

// 127.0.0.0/8 is the loopback interface. Every process has an address of its own there, at which no
// other test listens or connects.
sockaddr_in addressAt(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  static const auto number = static_cast<uint32_t>(::getpid());
  address.sin_addr.s_addr = htonl(0x7f40'0000U + number);
  return address;
}

std::string textOf(const sockaddr_in& address) {
  char text[INET_ADDRSTRLEN];
  ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
  return std::string(text) + ":" + std::to_string(ntohs(address.sin_port));
}

const int port = 28028;
const std::string where = textOf(addressAt(port));
int nextPort() {
  static int last = port;
  return ++last;
}

class Client {
 public:
  explicit Client(int at = port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval limit{60, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const sockaddr_in address = addressAt(at);
    connected_ =
        ::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  bool connected() const { return connected_; }
  void send(const std::string& text) const {
    EXPECT_EQ(::send(socket_, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  std::string line() const {
    std::string text;
    char letter = 0;
    while (::recv(socket_, &letter, 1, 0) == 1 && letter != '\n') text += letter;
    return text;
  }
  std::string all() const {
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = ::recv(socket_, buffer, sizeof(buffer), 0)) > 0;) {
      text.append(buffer, static_cast<size_t>(got));
    }
    return text;
  }

 private:
  int socket_;
  bool connected_ = false;
};

json status() {
  const Client client;
  client.send("CLIENT PROTOCOL 2\nTIMEOUT 5\nset format JSON\n");
  EXPECT_EQ(client.line(), "SERVER PROTOCOL 2");
  EXPECT_EQ(client.line(), "OK");
  EXPECT_EQ(client.line(), "OK");
  client.send("STATUS\n");
  return json::parse(client.all());
}

// A process whose address is taken says so once, and works. First, as a process can fork only
// before it uses the library.
TEST(RasAddress, ThatIsInUseIsOneWarning) {
  const std::string log = testing::TempDir() + "unisono_ras_" + std::to_string(::getpid());
  const int taken = ::socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = addressAt(nextPort());
  ASSERT_EQ(::bind(taken, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(taken, 1), 0);
  const std::string used = textOf(address);
  EXPECT_EQ(runChildren(1,
                        [&](int) {
                          ::setenv("NCCL_RAS_ENABLE", "1", 1);
                          ::setenv("NCCL_RAS_ADDR", used.c_str(), 1);
                          ::setenv("NCCL_DEBUG", "WARN", 1);
                          ::setenv("NCCL_DEBUG_FILE", log.c_str(), 1);
                          for (int round = 0; round < 2; round++) {
                            const Ranks ranks(2);
                            onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
                          }
                        }),
            std::vector<int>{0});
  ::close(taken);
  std::ostringstream all;
  all << std::ifstream(log).rdbuf();
  ::unlink(log.c_str());
  const std::string text = all.str();
  const size_t first = text.find("WARN");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find("WARN", first + 1), std::string::npos) << text;
  EXPECT_NE(text.find("RAS clients are not answered by this process"), std::string::npos) << text;
  EXPECT_NE(text.find(used), std::string::npos) << text;
}

// Process 0 answers clients of its own and hears of process 1, which joins it and is killed.
TEST(RasMonitor, TellsOfProcessesThatComeAndDie) {
  const int ownPort = nextPort();
  const Pipe pipe, process1, end;
  const std::vector<int> results = runChildren(2, [&](int process) {
    if (process == 1) {
      process1.write(::getpid());
      ncclComm_t comm = nullptr;
      check(unisonoHostSetDevice(1));
      check(ncclCommInitRank(&comm, 2, sharedId(pipe, 1, 2), 1));
      useOnce(comm);
      end.read<int>();
      ::raise(SIGKILL);
    }
    ::setenv("NCCL_RAS_ENABLE", "1", 1);
    ::setenv("NCCL_RAS_ADDR", textOf(addressAt(ownPort)).c_str(), 1);
    check(unisonoHostSetDevice(0));
    const auto alone = std::make_unique<Member>(newId(), 0, 1);
    const Client text(ownPort), structured(ownPort), trace(ownPort), wrong(ownPort);
    text.send("MONITOR\n");
    structured.send("set format json\nmonitor trace,ALL\n");
    trace.send("MONITOR trace\n");
    wrong.send("MONITOR lifecycle,x\n");
    EXPECT_EQ(text.line(), "OK");
    EXPECT_EQ(structured.line(), "OK");
    EXPECT_EQ(structured.line(), "OK");
    EXPECT_EQ(trace.line(), "OK");
    EXPECT_EQ(wrong.line(), "ERROR: Invalid event group 'x'");
    const std::string pid = std::to_string(process1.read<pid_t>());
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, 2, sharedId(pipe, 0, 2), 0));
    useOnce(comm);
    const auto expectEvent = [&](const std::string& name) {
      const std::string line = text.line();
      EXPECT_NE(line.find("] " + name + ": Process " + pid + " on node "), std::string::npos)
          << line;
      EXPECT_NE(line.find(" managing GPU 1 "), std::string::npos) << line;
      std::string object;
      do {
        object += structured.line() + "\n";
      } while (object.find("\n}\n") == std::string::npos);
      const json event = json::parse(object);
      EXPECT_EQ(event["group"], "LIFECYCLE");
      EXPECT_EQ(event["event"], name);
      EXPECT_EQ(std::to_string(event["peer"]["pid"].get<int>()), pid);
      EXPECT_EQ(event["peer"]["cuda_devs"], json::array({1}));
    };
    expectEvent("PEER_NEW");
    end.write(1);
    expectEvent("PEER_DEAD");
    // Who monitors can still ask.
    text.send("STATUS\n");
    EXPECT_NE(text.all().find("dead"), std::string::npos);
    trace.send("STATUS\n");
    EXPECT_EQ(trace.all().substr(0, 12), "NCCL version");
    EXPECT_OK(ncclCommAbort(comm));
  });
  EXPECT_EQ(results[0], 0);
  EXPECT_NE(results[1], 0);
}

// One text that a client of process 0 gets, of four processes on two hosts.
struct RemoteRas {
  Pipe pipe, ready, done, pid;
  int at = nextPort();

  void prepare(int process) const {
    ::setenv("NCCL_HOSTID", process < 2 ? "a" : "b", 1);
    ::setenv("NCCL_NET", "Socket", 1);
    if (process == 0) {
      ::setenv("NCCL_RAS_ENABLE", "1", 1);
      ::setenv("NCCL_RAS_ADDR", textOf(addressAt(at)).c_str(), 1);
    }
    check(unisonoHostSetDevice(process));
  }
  std::string ask(const std::string& commands) const {
    const Client client(at);
    client.send(commands);
    return client.all();
  }
  // `first`: a command that limits the wait for processes.
  json askJson(const std::string& first = "TIMEOUT 60\n") const {
    const std::string text = ask(first + "SET FORMAT json\nSTATUS\n");
    return json::parse(text.substr(text.find('{')));  // as SGLang reads it
  }
};

// Asks until the answer has `part`, for ten seconds: a busy machine may notice late that a call has
// ended, and tells until then that it waits.
template <typename Ask>
std::string askUntil(std::string_view part, Ask ask) {
  std::string answer = ask();
  for (int tries = 0; tries < 100 && answer.find(part) == std::string::npos; tries++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    answer = ask();
  }
  return answer;
}

// Process 0 is in one of the two communicators that a split makes, and tells of both.
TEST(RasOfSeveralHosts, TellsOfAllRanksOfTheJob) {
  const RemoteRas ras;
  expectAllPass(runChildren(4, [&](int process) {
    ras.prepare(process);
    ncclComm_t world = nullptr, half = nullptr;
    check(ncclCommInitRank(&world, 4, sharedId(ras.pipe, process, 4), process));
    check(ncclCommSplit(world, process / 2, process, &half, nullptr));
    useOnce(world);
    useOnce(half);
    if (process != 0) {
      ras.ready.write(process);
      ras.done.read<int>();
    } else {
      for (int other = 1; other < 4; other++) ras.ready.read<int>();
      const json job = ras.askJson();
      EXPECT_EQ(job["communicators_count"], 3) << job;
      EXPECT_EQ(job["ras"]["timeouts_count"], 0);
      std::vector<size_t> sizes;
      for (const json& communicator : job["communicators"]) {
        sizes.push_back(communicator["size"]);
        EXPECT_EQ(communicator["missing_ranks_count"], 0) << communicator;
        ASSERT_EQ(communicator["ranks"].size(), communicator["size"]);
        for (const json& rank : communicator["ranks"]) {
          EXPECT_EQ(rank["collective_counts"]["AllReduce"], 1);
          EXPECT_NE(rank["host"], "");
          EXPECT_GT(rank["pid"], 0);
        }
      }
      EXPECT_EQ(sizes, (std::vector<size_t>{4, 2, 2}));
      const std::string text = ras.ask("TIMEOUT 60\nSTATUS\n");
      EXPECT_NE(
          text.find("    0         1         1         4         4         4   RUNNING      OK"),
          std::string::npos)
          << text;
      EXPECT_NE(
          text.find("    1         2         1         2         2         4   RUNNING      OK"),
          std::string::npos)
          << text;
      const std::string verbose =
          askUntil("Rank 3 last call", [&] { return ras.ask("TIMEOUT 60\nVERBOSE STATUS\n"); });
      EXPECT_NE(verbose.find("Rank 3 last call AllReduce #1"), std::string::npos) << verbose;
      for (int other = 1; other < 4; other++) ras.done.write(other);
    }
    check(ncclCommDestroy(half));
    check(ncclCommDestroy(world));
  }));
}

// Of host b process 2 is stopped, of which process 3 tells; then process 3, so that nobody does.
TEST(RasOfSeveralHosts, TellsWhoDoesNotAnswer) {
  const RemoteRas ras;
  const std::vector<int> results = runChildren(4, [&](int process) {
    ras.prepare(process);
    ncclComm_t world = nullptr;
    check(ncclCommInitRank(&world, 4, sharedId(ras.pipe, process, 4), process));
    useOnce(world);
    if (process >= 2) {
      const int number = process;
      ras.pid.write(std::pair(number, ::getpid()));
    }
    if (process != 0) {
      ras.done.read<int>();
    } else {
      std::map<int, pid_t> pids;
      for (int i = 0; i < 2; i++) pids.insert(ras.pid.read<std::pair<int, pid_t>>());
      const auto missing = [&](const json& job) {
        std::vector<int> ranks;
        for (const json& rank : job["communicators"][0]["missing_ranks"]) {
          ranks.push_back(rank["rank"]);
          EXPECT_EQ(rank["status"]["unresponsive"], true);
          EXPECT_EQ(rank["status"]["considered_dead"], false);
          EXPECT_EQ(rank["pid"], pids[ranks.back()]);
          EXPECT_EQ(rank["cuda_dev"], ranks.back());
        }
        return ranks;
      };
      EXPECT_EQ(missing(ras.askJson()), std::vector<int>{});
      std::this_thread::sleep_for(std::chrono::seconds(1));  // its host maps its table
      using Clock = std::chrono::steady_clock;
      const auto deadline = Clock::now() + std::chrono::seconds(120);
      // Of those that run, one that the system keeps from it may be missing too.
      ::kill(pids[2], SIGSTOP);
      auto asked = Clock::now();
      for (; missing(ras.askJson("TIMEOUT 2\n")) != std::vector{2}; asked = Clock::now()) {
        ASSERT_TRUE(asked < deadline);
      }
      EXPECT_TRUE(Clock::now() - asked >= std::chrono::seconds(2)) << "the limit of the client";
      ::kill(pids[3], SIGSTOP);
      const auto areMissingSoon = [&] {
        asked = Clock::now();
        return missing(ras.askJson("")) == std::vector{2, 3} &&
               Clock::now() - asked < std::chrono::seconds(1);
      };
      while (!areMissingSoon()) ASSERT_TRUE(asked < deadline);
      const std::string text = ras.ask("TIMEOUT 2\nSTATUS\n");
      for (const std::string& part :
           {std::string("INCOMPLETE\n  Missing communicator data from 2 job processes\n"),
            std::string("  Missing communicator data from 2 ranks\n"),
            "Rank 3 -- GPU 3 managed by process " + std::to_string(pids[3]) + " on node ",
            std::string("TIMEOUT\n  Encountered ")}) {
        EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
      }
      for (const auto& [number, pid] : pids) ::kill(pid, SIGCONT);
      for (int other = 1; other < 4; other++) ras.done.write(other);
    }
    check(ncclCommDestroy(world));
  });
  expectAllPass(results);
}

TEST(Ras, IsOffByDefault) {
  const Setting address("NCCL_RAS_ADDR", where.c_str());
  const Ranks ranks(2);
  EXPECT_FALSE(Client().connected());
}

TEST(Ras, TellsOfCommunicatorsAndTheirCalls) {
  const Setting on("NCCL_RAS_ENABLE", "1"), address("NCCL_RAS_ADDR", where.c_str());
  const Ranks ranks(2);
  for (int i = 0; i < 3; i++) onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  const json all = status();
  EXPECT_EQ(all["nccl_version"], "2.28.9");
  EXPECT_EQ(all["communicators_count"], 1);
  ASSERT_EQ(all["communicators"].size(), 1u);
  const json communicator = all["communicators"][0];
  EXPECT_EQ(communicator["size"], 2);
  EXPECT_EQ(communicator["ranks_count"], 2);
  EXPECT_EQ(communicator["missing_ranks_count"], 0);
  for (size_t rank = 0; rank < 2; rank++) {
    const json told = communicator["ranks"][rank];
    EXPECT_EQ(told["rank"], rank);
    EXPECT_EQ(told["pid"], ::getpid());
    EXPECT_EQ(told["cuda_dev"], rank);
    EXPECT_EQ(told["collective_counts"]["AllReduce"], 3);
    EXPECT_EQ(told["collective_counts"].size(), 5u) << "those that NCCL counts";
    EXPECT_EQ(told["status"]["async_error"], 0);
    EXPECT_EQ(told["status"]["finalize_called"], false);
  }
  const std::string text = askUntil("last call AllReduce #3", [] {
    const Client client;
    client.send("verbose status\r\n");
    return client.all();
  });
  for (const char* part :
       {"NCCL version 2.28.9", "Job summary", "RUNNING", "last call AllReduce #3", "Errors"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(Ras, TellsOfAFailureAndOfTheEnd) {
  const Setting on("NCCL_RAS_ENABLE", "1"), address("NCCL_RAS_ADDR", where.c_str());
  {
    const Ranks ranks(2);
    onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
    // Calls that differ, which the watchdog finds.
    onThreads(2, [&](int rank) {
      const DeviceBuffer buffer(rank, 4000);
      ncclAllReduce(buffer.as(), buffer.as(), rank == 0 ? 8 : 9, ncclInt, ncclSum, ranks.comm(rank),
                    ranks.stream(rank));
    });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto isTold = [] {
      const json ranksOf = status()["communicators"][0]["ranks"];
      return ranksOf[0]["status"]["async_error"] != 0 && ranksOf[1]["status"]["async_error"] != 0;
    };
    while (!isTold()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      ::usleep(10'000);
    }
    for (int rank = 0; rank < 2; rank++) check(ncclCommAbort(ranks.comm(rank)));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (status()["communicators_count"] != 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    ::usleep(10'000);
  }
}

// Clients that do not speak the protocol, or do not read.
TEST(Ras, SurvivesStrangers) {
  const Setting on("NCCL_RAS_ENABLE", "1"), address("NCCL_RAS_ADDR", where.c_str());
  const Ranks ranks(2);
  const Client wrong;
  wrong.send("hello\nTIMEOUT x\nSET FORMAT xml\n");
  for (int i = 0; i < 3; i++) EXPECT_EQ(wrong.line().substr(0, 6), "ERROR:");
  const Client endless;
  endless.send(std::string(2000, 'x'));
  EXPECT_EQ(endless.all(), "") << "closed";
  const Client binary;
  binary.send(std::string("\0\xff\n\0STATUS\n", 11));
  EXPECT_EQ(binary.line().substr(0, 6), "ERROR:");
  std::vector<std::unique_ptr<Client>> many;
  for (int i = 0; i < 100; i++) many.push_back(std::make_unique<Client>());
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  many.clear();
  EXPECT_EQ(status()["communicators_count"], 1);
}

}  // namespace
}  // namespace unisono::system_test
