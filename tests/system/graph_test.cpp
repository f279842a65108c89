// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "child_processes.h"
#include "support/seed.h"

// Calls that are captured into graphs: replays, and what is said of those that do not end. Nobody
// sees a replay but the kernels.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using testing::ContainsRegex;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPatience{60'000};
constexpr size_t kCount = 64;

// The calls of `body` on a stream.
class Graph {
 public:
  template <typename Body>
  Graph(cudaStream_t stream, Body body) : stream_(stream) {
    check(unisonoHostStreamBeginCapture(stream));
    body();
    check(unisonoHostStreamEndCapture(stream, &graph_));
  }
  ~Graph() { unisonoHostGraphDestroy(graph_); }
  Graph(const Graph&) = delete;
  void launch() const { launch(stream_); }
  void launch(cudaStream_t stream) const { check(unisonoHostGraphLaunch(graph_, stream)); }

 private:
  cudaStream_t stream_;
  unisonoHostGraph_t graph_ = nullptr;
};

// The log of all processes of a test.
class Log {
 public:
  Log() : file_(testing::TempDir() + "unisono_graph_" + std::to_string(::getpid())) {
    ::unlink(file_.c_str());
  }
  ~Log() { ::unlink(file_.c_str()); }
  const std::string& file() const { return file_; }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(file_).rdbuf();
    return all.str();
  }
  bool waitForReport() const {
    const auto deadline = Clock::now() + kPatience;
    while (text().find("unisono_hang") == std::string::npos) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return true;
  }

 private:
  const std::string file_;
};

// One rank of a job of processes that all log to one file.
struct Rank {
  Rank(const Log& log, const Pipe& pipe, int rank, int ranks, const char* hangSeconds = "2") {
    ::setenv("UNISONO_HANG_SECONDS", hangSeconds, 1);
    ::setenv("NCCL_DEBUG_FILE", log.file().c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "job";
    check(ncclCommInitRankConfig(&comm, ranks, sharedId(pipe, rank, ranks), rank, &config));
    buffer = DeviceBuffer(rank, kCount * sizeof(int));
    check(unisonoHostStreamCreate(&stream));
  }
  void sum() const {
    check(ncclAllReduce(buffer.as(), buffer.as(), kCount, ncclInt, ncclSum, comm, stream));
  }
  void synchronize() const { check(unisonoHostStreamSynchronize(stream)); }
  // The state of the communicator once it is an error, and after how long.
  ncclResult_t waitForError(milliseconds& after) const {
    const auto start = Clock::now();
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess && Clock::now() - start < kPatience) {
      std::this_thread::sleep_for(milliseconds(1));
      check(ncclCommGetAsyncError(comm, &state));
    }
    after = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    return state;
  }

  ncclComm_t comm = nullptr;
  DeviceBuffer buffer;
  cudaStream_t stream = nullptr;
};

// Rank 2 is late with its third replay.
TEST(Replays, ThatHangAreExplained) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int process) {
    const Rank rank(log, pipe, process, 3);
    const Graph other(rank.stream, [&] { rank.sum(); });
    const Graph graph(rank.stream, [&] { rank.sum(); });
    other.launch();
    rank.sum();
    for (int i = 0; i < 2; i++) graph.launch();
    rank.synchronize();
    if (process == 2) {
      EXPECT_TRUE(log.waitForReport());
    }
    graph.launch();
    rank.sum();
    rank.synchronize();
    check(ncclCommDestroy(rank.comm));
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, ContainsRegex("No progress for [0-9]+\\.[0-9] s: not arrived: rank 2\n"));
  EXPECT_THAT(text, ContainsRegex("call: +AllReduce\\(count 64, int32, sum\\), replay 3 of "
                                  "captured call 2 of rank [01], communicator job of 3 ranks\n"));
  EXPECT_THAT(text, HasSubstr("waiting:      ranks 0, 1\n"));
  EXPECT_THAT(text, HasSubstr("0 -> 2, 1 -> 2\n"));
  EXPECT_THAT(text, HasSubstr("rank 2 (process "));
  EXPECT_THAT(text, HasSubstr("runs none of its 2 captured calls, whose replays have begun 3 "
                              "collectives in all"));
  EXPECT_THAT(text, HasSubstr("\"replay\":3,"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"not_arrived\""));
}

// Rank 0 captures a sum where rank 1 captures a maximum, which does not hang. `hosts`: they share
// no memory.
void expectMismatchOfGraphs(bool hosts) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    if (hosts) {
      ::setenv("NCCL_HOSTID", std::to_string(process).c_str(), 1);
      ::setenv("NCCL_NET", "Socket", 1);
    }
    const Rank rank(log, pipe, process, 2, "30");
    const Graph same(rank.stream, [&] { rank.sum(); });
    const Graph other(rank.stream, [&] {
      check(ncclAllReduce(rank.buffer.as(), rank.buffer.as(), kCount, ncclInt,
                          process == 0 ? ncclSum : ncclMax, rank.comm, rank.stream));
    });
    rank.sum();
    same.launch();
    other.launch();
    other.launch();
    rank.synchronize();
    milliseconds after{0};
    const ncclResult_t state = rank.waitForError(after);
    EXPECT_TRUE(state == ncclInvalidUsage || state == ncclRemoteError) << state;
    for (const char* part :
         {"Calls in CUDA graphs differ between ranks ", "each has finished 4 collective calls",
          "rank 0 has run the captured AllReduce(count 64, int32, sum) 3 times, rank 1 1 times",
          "rank 1 has run the captured AllReduce(count 64, int32, max) 2 times, rank 0 0 times"}) {
      EXPECT_THAT(ncclGetLastError(rank.comm), HasSubstr(part));
    }
    check(ncclCommAbort(rank.comm));
  }));
}

TEST(Replays, ThatDifferAreNamed) {
  expectMismatchOfGraphs(false);
}

TEST(Replays, ThatDifferBetweenHostsAreNamed) {
  expectMismatchOfGraphs(true);
}

// Captured in another order, replayed with calls between, and at other moments.
TEST(Replays, ThatFitAreNoMismatch) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2, "30");
    const auto maximum = [&] {
      check(ncclAllReduce(rank.buffer.as(), rank.buffer.as(), kCount, ncclInt, ncclMax, rank.comm,
                          rank.stream));
    };
    const auto sum = [&] { rank.sum(); };
    const Graph first(rank.stream, [&] { process == 0 ? sum() : maximum(); });
    const Graph second(rank.stream, [&] { process == 0 ? maximum() : sum(); });
    const Graph& ofSum = process == 0 ? first : second;
    const Graph& ofMaximum = process == 0 ? second : first;
    for (int round = 0; round < 6; round++) {
      ofSum.launch();
      if (round % 2 == process) std::this_thread::sleep_for(milliseconds(500));
      ofMaximum.launch();
      rank.sum();
      if (round % 3 == 0) rank.synchronize();
    }
    rank.synchronize();
    std::this_thread::sleep_for(milliseconds(2500));  // the watchdogs compare
    ncclResult_t state = ncclInternalError;
    check(ncclCommGetAsyncError(rank.comm, &state));
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(rank.comm);
    check(ncclCommDestroy(rank.comm));
  }));
}

// The receiver replays, and the sender does not.
TEST(Replays, OfMessagesThatHangAreExplained) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2);
    const Graph graph(rank.stream, [&] {
      const int peer = 1 - process;
      check(process == 0
                ? ncclSend(rank.buffer.as(), kCount, ncclInt, peer, rank.comm, rank.stream)
                : ncclRecv(rank.buffer.as(), kCount, ncclInt, peer, rank.comm, rank.stream));
    });
    graph.launch();
    rank.synchronize();
    if (process == 0) {
      EXPECT_TRUE(log.waitForReport());
    }
    graph.launch();
    rank.synchronize();
    check(ncclCommDestroy(rank.comm));
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, ContainsRegex("No progress for [0-9]+\\.[0-9] s: not arrived: rank 0\n"));
  EXPECT_THAT(text, HasSubstr("Recv(count 64, int32) from rank 0, replay 2 of captured call 1"));
}

// What is captured is not compared until it hangs.
TEST(Replays, OfDifferentCallsAreNamedWhenTheyHang) {
  const Log log;
  const Pipe pipe;
  const Meeting done;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2);
    const DeviceBuffer large(process, 300'000 * sizeof(int));
    const auto sum = [&](size_t count) {
      check(ncclAllReduce(large.as(), large.as(), count, ncclInt, ncclSum, rank.comm, rank.stream));
    };
    // Connects what both need, so that neither waits for that on the CPU.
    sum(64);
    sum(300'000);
    rank.synchronize();
    const Graph graph(rank.stream, [&] { sum(process == 0 ? 64 : 300'000); });
    graph.launch();
    EXPECT_TRUE(log.waitForReport());
    done.wait(process);
    check(ncclCommAbort(rank.comm));
    rank.synchronize();
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("arrived with another call: "));
  EXPECT_THAT(text, HasSubstr("rank 0 called AllReduce(count 64, int32, sum)"));
  EXPECT_THAT(text, HasSubstr("rank 1 called AllReduce(count 300000, int32, sum)"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"different_calls\""));
}

// A rank that has destroyed its communicator took part in two replays and a call, and is missing in
// the third replay: an error, not a hang.
TEST(Replays, ThatNeedARankThatHasLeftFail) {
  const Log log;
  const Pipe pipe;
  const Meeting gone;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2, "30");
    const Graph graph(rank.stream, [&] { rank.sum(); });
    for (int i = 0; i < 2; i++) graph.launch();
    rank.sum();
    rank.synchronize();
    if (process == 1) check(ncclCommDestroy(rank.comm));
    gone.wait(process);
    if (process == 1) return gone.wait(process);
    // What the other rank took part in was no error.
    std::this_thread::sleep_for(milliseconds(700));
    ncclResult_t state = ncclInternalError;
    check(ncclCommGetAsyncError(rank.comm, &state));
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(rank.comm);
    graph.launch();
    milliseconds after{0};
    EXPECT_EQ(rank.waitForError(after), ncclRemoteError);
    EXPECT_LT(after, milliseconds(scaled(2000, 6000)));
    EXPECT_THAT(ncclGetLastError(rank.comm),
                ContainsRegex("Rank 1 \\(process [0-9]+.* was destroyed before it took part in "
                              "collective call 4"));
    rank.synchronize();
    EXPECT_EQ(ncclAllReduce(rank.buffer.as(), rank.buffer.as(), 1, ncclInt, ncclSum, rank.comm,
                            rank.stream),
              ncclRemoteError);
    graph.launch();  // does nothing any more, and ends
    rank.synchronize();
    check(ncclCommDestroy(rank.comm));
    gone.wait(process);
  }));
}

TEST(Replays, ThatNeedARankThatWasKilledFail) {
  const Log log;
  const Pipe pipe;
  const std::vector<int> results = runChildren(3, [&](int process) {
    const Rank rank(log, pipe, process, 3, "30");
    const Graph graph(rank.stream, [&] { rank.sum(); });
    for (int i = 0; i < 2; i++) graph.launch();
    rank.synchronize();
    if (process == 1) ::raise(SIGKILL);
    graph.launch();
    milliseconds after{0};
    EXPECT_EQ(rank.waitForError(after), ncclRemoteError);
    EXPECT_LT(after, milliseconds(scaled(2000, 6000)));
    EXPECT_THAT(ncclGetLastError(rank.comm), HasSubstr("Rank 1 (process "));
    rank.synchronize();
    EXPECT_LT(after, milliseconds(scaled(2000, 6000)));
    check(ncclCommDestroy(rank.comm));
  });
  EXPECT_EQ(results[0], 0);
  EXPECT_EQ(results[2], 0);
}

// The last test, as the others fork.
// Every kind of kernel: small and large calls of the direct family, rings, messages.
TEST(Graphs, ReplaysDoWhatTheCallsDo) {
  constexpr int kRanks = 3;
  constexpr size_t kLarge = 100'000;
  std::mt19937 random(test::seed());
  for (const char* algorithm : {"", "ring"}) {
    const Setting choice("NCCL_ALGO", algorithm);
    const Ranks ranks(kRanks);
    const int rounds = static_cast<int>(random() % 4) + 2;
    const unsigned seed = random();
    onThreads(kRanks, [&](int rank) {
      const int next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
      ncclComm_t comm = ranks.comm(rank);
      const cudaStream_t stream = ranks.stream(rank);
      const DeviceBuffer small(rank, kCount * sizeof(int)), large(rank, kLarge * sizeof(int)),
          sent(rank, sizeof(int)), received(rank, sizeof(int)),
          all(rank, kRanks * kCount * sizeof(int));
      // Some are captured before anything is connected.
      const Graph first(stream, [&] {
        check(ncclAllReduce(small.as(), small.as(), kCount, ncclInt, ncclSum, comm, stream));
      });
      const Graph second(stream, [&] {
        check(ncclAllReduce(large.as(), large.as(), kLarge, ncclInt, ncclSum, comm, stream));
        check(ncclAllGather(small.as(), all.as(), kCount, ncclInt, comm, stream));
        check(ncclGroupStart());
        check(ncclSend(sent.as(), 1, ncclInt, next, comm, stream));
        check(ncclRecv(received.as(), 1, ncclInt, previous, comm, stream));
        check(ncclGroupEnd());
      });
      std::mt19937 same(seed);  // on all ranks
      for (int round = 0; round < rounds; round++) {
        const auto base = static_cast<int>(same() % 1000);
        const std::vector<int> mine(kCount, base + rank), many(kLarge, base - rank);
        const int word = base * 10 + rank;
        device::copy(small.as(), mine.data(), mine.size() * sizeof(int));
        device::copy(large.as(), many.data(), many.size() * sizeof(int));
        device::copy(sent.as(), &word, sizeof(int));
        if (same() % 2 == 0) {
          check(ncclAllReduce(small.as(), small.as(), kCount, ncclInt, ncclSum, comm, stream));
        } else {
          first.launch();
        }
        second.launch();
        device::synchronize(stream);
        std::vector<int> sums(kCount), gathered(kRanks * kCount), differences(kLarge);
        int got = 0;
        device::copy(sums.data(), small.as(), sums.size() * sizeof(int));
        device::copy(gathered.data(), all.as(), gathered.size() * sizeof(int));
        device::copy(differences.data(), large.as(), differences.size() * sizeof(int));
        device::copy(&got, received.as(), sizeof(int));
        EXPECT_EQ(sums, std::vector<int>(kCount, 3 * base + 3));
        EXPECT_EQ(gathered, std::vector<int>(kRanks * kCount, 3 * base + 3));
        EXPECT_EQ(differences, std::vector<int>(kLarge, 3 * base - 3));
        EXPECT_EQ(got, base * 10 + previous);
      }
    });
  }
}

}  // namespace
}  // namespace unisono::system_test
