// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "hang_testing.h"
#include "support/seed.h"

// Calls that are captured into graphs: replays, and what is said of those that do not end. Nobody
// sees a replay but the kernels.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using testing::ContainsRegex;
using testing::HasSubstr;

// Rank 2 is late with its third replay.
TEST(Replays, ThatHangAreExplained) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int process) {
    const Rank rank(log, pipe, process, 3);
    const Graph other(rank.stream, [&] { check(rank.sum(kFewInts)); });
    const Graph graph(rank.stream, [&] { check(rank.sum(kFewInts)); });
    other.launch();
    check(rank.sum(kFewInts));
    for (int i = 0; i < 2; i++) graph.launch();
    rank.synchronize();
    if (process == 2) {
      EXPECT_TRUE(log.waitForReport());
    }
    graph.launch();
    check(rank.sum(kFewInts));
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

// Processes that share no memory.
void onHost(int host) {
  ::setenv("NCCL_HOSTID", std::to_string(host).c_str(), 1);
  ::setenv("NCCL_NET", "Socket", 1);
}

// Rank 0 captures a sum where rank 1 captures a maximum, which does not hang.
void expectMismatchOfGraphs(bool hosts) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    if (hosts) onHost(process);
    const Rank rank(log, pipe, process, 2, "30");
    const Graph same(rank.stream, [&] { check(rank.sum(kFewInts)); });
    const Graph other(rank.stream, [&] {
      check(ncclAllReduce(rank.buffer.as(), rank.buffer.as(), kFewInts, ncclInt,
                          process == 0 ? ncclSum : ncclMax, rank.comm, rank.stream));
    });
    check(rank.sum(kFewInts));
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

// Rank 0 sends 64 and 63 elements in graphs to rank 1, which receives 64 and 64, the second without
// a graph if it does not capture it. Nothing hangs, as these take equally many lines.
void expectMismatchOfMessages(bool hosts, bool captures) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    if (hosts) onHost(process);
    const Rank rank(log, pipe, process, 2, "30");
    const auto message = [&](size_t count) {
      check(process == 0 ? ncclSend(rank.buffer.as(), count, ncclInt, 1, rank.comm, rank.stream)
                         : ncclRecv(rank.buffer.as(), count, ncclInt, 0, rank.comm, rank.stream));
    };
    const Graph same(rank.stream, [&] { message(kFewInts); });
    same.launch();
    if (process == 0 || captures) {
      const Graph other(rank.stream, [&] { message(process == 0 ? kFewInts - 1 : kFewInts); });
      other.launch();
      rank.synchronize();
    } else {
      message(kFewInts);
      rank.synchronize();
    }
    milliseconds after{0};
    const ncclResult_t state = rank.waitForError(after);
    EXPECT_TRUE(state == ncclInvalidUsage || state == ncclRemoteError) << state;
    EXPECT_THAT(ncclGetLastError(rank.comm),
                HasSubstr("Messages in CUDA graphs differ between ranks 0 and 1: rank 0 has sent 2 "
                          "messages to rank 1, of 508 bytes in all, and rank 1 has received as "
                          "many of other sizes, of 512 bytes in all"));
    check(ncclCommAbort(rank.comm));
  }));
}

TEST(Replays, OfMessagesThatDifferAreNamed) {
  expectMismatchOfMessages(false, true);
}

TEST(Replays, OfMessagesThatDifferFromCallsAreNamed) {
  expectMismatchOfMessages(false, false);
}

TEST(Replays, OfMessagesThatDifferBetweenHostsAreNamed) {
  expectMismatchOfMessages(true, true);
}

// Captured in another order, replayed with calls between, and at other moments.
TEST(Replays, ThatFitAreNoMismatch) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2, "30");
    const auto maximum = [&] {
      check(ncclAllReduce(rank.buffer.as(), rank.buffer.as(), kFewInts, ncclInt, ncclMax, rank.comm,
                          rank.stream));
    };
    const auto sum = [&] { check(rank.sum(kFewInts)); };
    const Graph first(rank.stream, [&] { process == 0 ? sum() : maximum(); });
    const Graph second(rank.stream, [&] { process == 0 ? maximum() : sum(); });
    const Graph& ofSum = process == 0 ? first : second;
    const Graph& ofMaximum = process == 0 ? second : first;
    const auto exchange = [&](size_t count) {
      check(ncclGroupStart());
      check(ncclSend(rank.buffer.as(), count, ncclInt, 1 - process, rank.comm, rank.stream));
      check(ncclRecv(rank.buffer.as<int>() + kManyInts, count, ncclInt, 1 - process, rank.comm,
                     rank.stream));
      check(ncclGroupEnd());
    };
    const Graph exchanges(rank.stream, [&] { exchange(2 * kFewInts); });
    for (int round = 0; round < 6; round++) {
      ofSum.launch();
      if (round % 2 == process) std::this_thread::sleep_for(milliseconds(500));
      ofMaximum.launch();
      // Rank 0 replays what rank 1 calls, and the other way round.
      process == 0 ? exchanges.launch() : exchange(2 * kFewInts);
      process == 1 ? exchanges.launch() : exchange(2 * kFewInts);
      check(rank.sum(kFewInts));
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
                ? ncclSend(rank.buffer.as(), kFewInts, ncclInt, peer, rank.comm, rank.stream)
                : ncclRecv(rank.buffer.as(), kFewInts, ncclInt, peer, rank.comm, rank.stream));
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
  EXPECT_THAT(text, HasSubstr("rank 0 has begun 1 message to rank 1, with those of replays; rank 1 "
                              "is in message 2"));
  EXPECT_THAT(text, HasSubstr("\"call\":\"Recv\",\"sequence\":2,"));
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
    const Graph graph(rank.stream, [&] { check(rank.sum(kFewInts)); });
    for (int i = 0; i < 2; i++) graph.launch();
    check(rank.sum(kFewInts));
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
    const Graph graph(rank.stream, [&] { check(rank.sum(kFewInts)); });
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
// Every kind of kernel: small and large calls of the direct family, rings, messages. Copy engines
// that move the data through host memory take part in replays too.
TEST(Graphs, ReplaysDoWhatTheCallsDo) {
  constexpr int kRanks = 3;
  constexpr size_t kLarge = 100'000;
  std::mt19937 random(test::seed());
  struct Way {
    const char *algorithm, *protocol, *copies;
  };
  for (const Way& way : {Way{"", "", "0"}, Way{"ring", "", "0"}, Way{"ring", "Simple", "1"}}) {
    const Setting algorithm("NCCL_ALGO", way.algorithm), protocol("NCCL_PROTO", way.protocol),
        hostMemory("NCCL_P2P_DISABLE", way.copies), copies("NCCL_SHM_USE_CUDA_MEMCPY", way.copies),
        both("NCCL_SHM_MEMCPY_MODE", "3");
    const Ranks ranks(kRanks);
    const int rounds = static_cast<int>(random() % 4) + 2;
    const unsigned seed = random();
    onThreads(kRanks, [&](int rank) {
      const int next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
      ncclComm_t comm = ranks.comm(rank);
      const cudaStream_t stream = ranks.stream(rank);
      const DeviceBuffer small(rank, kFewInts * sizeof(int)), large(rank, kLarge * sizeof(int)),
          sent(rank, sizeof(int)), received(rank, sizeof(int)),
          all(rank, kRanks * kFewInts * sizeof(int));
      // Some are captured before anything is connected.
      const Graph first(stream, [&] {
        check(ncclAllReduce(small.as(), small.as(), kFewInts, ncclInt, ncclSum, comm, stream));
      });
      const Graph second(stream, [&] {
        check(ncclAllReduce(large.as(), large.as(), kLarge, ncclInt, ncclSum, comm, stream));
        check(ncclAllGather(small.as(), all.as(), kFewInts, ncclInt, comm, stream));
        check(ncclGroupStart());
        check(ncclSend(sent.as(), 1, ncclInt, next, comm, stream));
        check(ncclRecv(received.as(), 1, ncclInt, previous, comm, stream));
        check(ncclGroupEnd());
      });
      std::mt19937 same(seed);  // on all ranks
      for (int round = 0; round < rounds; round++) {
        const auto base = static_cast<int>(same() % 1000);
        const std::vector<int> mine(kFewInts, base + rank), many(kLarge, base - rank);
        const int word = base * 10 + rank;
        device::copy(small.as(), mine.data(), mine.size() * sizeof(int));
        device::copy(large.as(), many.data(), many.size() * sizeof(int));
        device::copy(sent.as(), &word, sizeof(int));
        if (same() % 2 == 0) {
          check(ncclAllReduce(small.as(), small.as(), kFewInts, ncclInt, ncclSum, comm, stream));
        } else {
          first.launch();
        }
        second.launch();
        device::synchronize(stream);
        std::vector<int> sums(kFewInts), gathered(kRanks * kFewInts), differences(kLarge);
        int got = 0;
        device::copy(sums.data(), small.as(), sums.size() * sizeof(int));
        device::copy(gathered.data(), all.as(), gathered.size() * sizeof(int));
        device::copy(differences.data(), large.as(), differences.size() * sizeof(int));
        device::copy(&got, received.as(), sizeof(int));
        EXPECT_EQ(sums, std::vector<int>(kFewInts, 3 * base + 3));
        EXPECT_EQ(gathered, std::vector<int>(kRanks * kFewInts, 3 * base + 3));
        EXPECT_EQ(differences, std::vector<int>(kLarge, 3 * base - 3));
        EXPECT_EQ(got, base * 10 + previous);
      }
    });
  }
}

TEST(Graphs, OfSomeStreamsOfAGroupAreRefused) {
  const Ranks ranks(1);
  const DeviceBuffer buffer(deviceOf(0), sizeof(int));
  const DeviceStream captured(deviceOf(0)), plain(deviceOf(0));
  check(unisonoHostStreamBeginCapture(captured));
  for (const bool isFirst : {true, false}) {
    check(ncclGroupStart());
    for (const bool uses : {isFirst, !isFirst}) {
      check(ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, ranks.comm(0),
                          uses ? captured : plain));
    }
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    EXPECT_NE(std::strstr(ncclGetLastError(nullptr), "captured"), nullptr);
  }
  unisonoHostGraph_t graph = nullptr;
  check(unisonoHostStreamEndCapture(captured, &graph));
  check(unisonoHostGraphDestroy(graph));
  useOnce(ranks.comm(0));
}

}  // namespace
}  // namespace unisono::system_test
