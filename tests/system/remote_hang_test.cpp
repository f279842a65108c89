// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <csignal>

#include "hang_testing.h"

// Calls that never end on ranks of several hosts, which share no memory: NCCL_HOSTID makes hosts of
// processes, and sockets join them. The report is one for all hosts.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

void onHost(int host) {
  ::setenv("NCCL_HOSTID", ("host" + std::to_string(host)).c_str(), 1);
  ::setenv("NCCL_NET", "Socket", 1);
}

// Lets another process go on once there is a report.
void continueAfterReport(const Log& log, pid_t victim) {
  EXPECT_TRUE(log.waitForReport());
  ::kill(victim, SIGCONT);
}

// Two hosts of two ranks: `late` makes its second call when the report is there.
std::string reportOfLateRank(int late, int ranksPerHost) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(4, [&](int process) {
    onHost(process / ranksPerHost);
    const Rank rank(log, pipe, process, 4);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    if (process == late) {
      EXPECT_TRUE(log.waitForReport());
      std::this_thread::sleep_for(milliseconds(1500));  // for a second report, if there were one
    }
    check(rank.sum(kFewInts, ncclMax));
    rank.finish();
  }));
  EXPECT_EQ(log.reports(), 1) << log.text();
  return log.text();
}

TEST(RemoteHang, NamesTheLateRankOfAnotherHost) {
  const std::string text = reportOfLateRank(3, 2);
  EXPECT_THAT(text, ContainsRegex("No progress for [0-9]+\\.[0-9] s: not arrived: rank 3\n"));
  EXPECT_THAT(text, HasSubstr("call:         AllReduce #2 (count 64, int32, max) of rank 0, "
                              "communicator job of 4 ranks\n"));
  EXPECT_THAT(text,
              AllOf(HasSubstr("not arrived:  rank 3\n"), HasSubstr("waiting:      ranks 0-2\n"),
                    HasSubstr("finished:     none\n"), HasSubstr("0 -> 3, 1 -> 3, 2 -> 3\n")));
  EXPECT_THAT(text,
              ContainsRegex("rank 3 \\(process [0-9]+, device 3\\) has finished AllReduce #1"));
  EXPECT_THAT(text, HasSubstr("\"not_arrived\":[3],\"waiting\":[0,1,2],\"finished\":[],"
                              "\"no_answer\":[]"));
}

// The lowest rank that waits reports, whoever of the others notices first.
TEST(RemoteHang, IsReportedByTheLowestRankThatWaits) {
  const std::string text = reportOfLateRank(0, 1);
  EXPECT_THAT(text, HasSubstr("not arrived: rank 0\n"));
  EXPECT_THAT(text, HasSubstr("AllReduce #2 (count 64, int32, max) of rank 1,"));
  EXPECT_THAT(text, HasSubstr("waiting:      ranks 1-3\n"));
}

// Nobody else of its host can say that the process of rank 1 is stopped.
TEST(RemoteHang, ListsWhoDoesNotAnswer) {
  const Log log;
  const Pipe pipe, toHelper;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) return continueAfterReport(log, toHelper.read<pid_t>());
    onHost(process);
    const Rank rank(log, pipe, process, 3);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    if (process == 1) {
      toHelper.write(::getpid());
      std::this_thread::sleep_for(milliseconds(600));  // the others finish the call
      ::raise(SIGSTOP);
    }
    check(rank.sum(kFewInts));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_EQ(log.reports(), 1) << text;
  EXPECT_THAT(text, HasSubstr(": no answer from rank 1, for which the others may wait\n"));
  EXPECT_THAT(text, HasSubstr("waiting:      ranks 0, 2\n"));
  EXPECT_THAT(text, HasSubstr("no answer:    rank 1\n"));
  EXPECT_THAT(text,
              ContainsRegex("rank 1 \\(process [0-9]+ on host .*, .*:[0-9]+\\) did not answer"));
  EXPECT_THAT(text, ContainsRegex("next: +Look whether this process runs, and whether its host"));
  EXPECT_THAT(text, AllOf(HasSubstr("\"verdict\":\"no_answer\""), HasSubstr("\"no_answer\":[1]")));
}

// Its neighbour on the same host says that it is stopped.
TEST(RemoteHang, SaysThatAProcessOfAnotherHostIsStopped) {
  const Log log;
  const Pipe pipe, toHelper;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) return continueAfterReport(log, toHelper.read<pid_t>());
    onHost(process == 0 ? 0 : 1);
    const Rank rank(log, pipe, process, 3);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    if (process == 1) {
      toHelper.write(::getpid());
      std::this_thread::sleep_for(milliseconds(600));  // its watchdog sees that the call is done
      ::raise(SIGSTOP);
    }
    check(rank.sum(kFewInts));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_EQ(log.reports(), 1) << text;
  EXPECT_THAT(text, HasSubstr("not arrived: rank 1\n"));
  EXPECT_THAT(text, HasSubstr("its process is stopped"));
  EXPECT_THAT(text, ContainsRegex("next: +Let process [0-9]+ go on \\(kill -CONT [0-9]+\\)"));
}

class RemoteKernels : public testing::TestWithParam<const char*> {};

// Rank 1 stops when its call has begun.
TEST_P(RemoteKernels, AreSaidToBeStuck) {
  const Log log;
  const Pipe pipe, toHelper, done;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) return continueAfterReport(log, toHelper.read<pid_t>());
    onHost(process == 0 ? 0 : 1);
    ::setenv("NCCL_ALGO", "ring", 1);
    ::setenv("NCCL_PROTO", GetParam(), 1);
    const Rank rank(log, pipe, process, 3);
    // Takes far longer than the rank takes to stop itself.
    const size_t count = scaled(16'000'000, 4'000'000);
    DeviceBuffer large(process, count * sizeof(int));
    check(rank.sum(kManyInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    // Rank 1 may end the first call before its proxy has sent all that the others need for theirs.
    if (process != 1) done.write(process);
    if (process == 1) {
      done.read<int>();
      done.read<int>();
      toHelper.write(::getpid());
    }
    check(ncclAllReduce(large.as(), large.as(), count, ncclInt, ncclSum, rank.comm, rank.stream));
    if (process == 1) ::raise(SIGSTOP);
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_EQ(log.reports(), 1) << text;
  EXPECT_THAT(text, ContainsRegex("stuck in the kernel: rank [02] waits for "));
  EXPECT_THAT(text, ContainsRegex("step [0-9]+ of channel [0-9]+"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"in_kernel\""));
}
INSTANTIATE_TEST_SUITE_P(Protocols, RemoteKernels, testing::Values("Simple", "LL128"),
                         [](const auto& test) { return std::string(test.param); });

// Rank 1 stops in the middle of a call, and nobody else of its host can say so: what the others
// have for it and miss from it names it.
TEST(RemoteHang, NamesTheTrafficOfARankThatStopsInACall) {
  const Log log;
  const Pipe pipe, toHelper, done;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) return continueAfterReport(log, toHelper.read<pid_t>());
    onHost(process);
    ::setenv("NCCL_ALGO", "ring", 1);
    const Rank rank(log, pipe, process, 3);
    // Takes far longer than the rank takes to stop itself, and more than sockets hold.
    const size_t count = scaled(16'000'000, 8'000'000);
    DeviceBuffer large(process, count * sizeof(int));
    check(rank.sum(kManyInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    // Rank 1 may end the first call before its proxy has sent all that the others need for theirs.
    if (process != 1) done.write(process);
    if (process == 1) {
      done.read<int>();
      done.read<int>();
      toHelper.write(::getpid());
    }
    check(ncclBroadcast(large.as(), large.as(), count, ncclInt, 0, rank.comm, rank.stream));
    if (process == 1) ::raise(SIGSTOP);
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_EQ(log.reports(), 1) << text;
  EXPECT_THAT(text, HasSubstr(": no answer from rank 1, for which the others may wait\n"));
  EXPECT_THAT(text,
              ContainsRegex("[1-9][0-9]* bytes from rank 0 to rank 1 do not leave over [a-z]+"));
  EXPECT_THAT(text, ContainsRegex("rank 2 has no data from rank 1 over [a-z]+"));
}

// Rank 2 waits for the connections of the others and is stopped; then they make the call as well.
TEST(RemoteHang, SaysThatRanksStillConnect) {
  const Log log;
  const Pipe pipe, toHelper, stopped;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) {
      const auto victim = toHelper.read<pid_t>();
      std::this_thread::sleep_for(milliseconds(1000));  // it is in its call
      ::kill(victim, SIGSTOP);
      for (const int rank : {0, 1}) stopped.write(rank);
      return continueAfterReport(log, victim);
    }
    onHost(process == 0 ? 0 : 1);
    const Rank rank(log, pipe, process, 3);
    if (process == 2) {
      toHelper.write(::getpid());
    } else {
      stopped.read<int>();
    }
    check(rank.sum(kManyInts));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("still connecting or held up before the launch: ranks 0-2\n"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"not_connected\""));
}

// Rank 1 waits for a message before the call on its stream.
TEST(RemoteHang, SaysThatOtherWorkIsBeforeTheCall) {
  const Log log;
  const Pipe pipe, second;
  expectAllPass(runChildren(2, [&](int process) {
    onHost(process);
    const Rank rank(log, pipe, process, 2);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    callAfterOtherWork(log, rank, second);
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("waiting outside the library: the kernel has not begun on rank 1"));
  EXPECT_THAT(text,
              ContainsRegex("its process waits in Recv #2 from rank 0 \\(count 4, int32\\) of "
                            "communicator side"));
}

// What the ranks of host 1 call, unlike those of host 0.
struct Variant {
  const char* name;
  void (*call)(const Rank& rank, bool isFirstHost);
  std::vector<std::string> texts;
};

class RemoteMismatches : public testing::TestWithParam<Variant> {};

TEST_P(RemoteMismatches, AreNamedOnAllRanks) {
  const Variant& variant = GetParam();
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(4, [&](int process) {
    onHost(process / 2);
    const Rank rank(log, pipe, process, 4, "30");
    for (int i = 0; i < 3; i++) check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    variant.call(rank, process < 2);
    milliseconds after{};
    const ncclResult_t state = rank.waitForError(after);
    EXPECT_LT(after, milliseconds(scaled(2000, 20'000)));
    EXPECT_TRUE(state == ncclInvalidUsage || state == ncclRemoteError) << state;
    for (const std::string& text : variant.texts) {
      EXPECT_THAT(ncclGetLastError(rank.comm), HasSubstr(text));
    }
    EXPECT_OK(unisonoHostStreamSynchronize(rank.stream));
    EXPECT_OK(ncclCommDestroy(rank.comm));
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Calls, RemoteMismatches,
    testing::Values(Variant{"Count",
                            [](const Rank& rank, bool isFirst) {
                              static_cast<void>(rank.sum(isFirst ? 64 : 128));
                            },
                            {"Collective call 4 differs between ranks",
                             "rank 2 called AllReduce(count 128, int32, sum)",
                             "rank 0 called AllReduce(count 64, int32, sum)"}},
                    Variant{"Operator",
                            [](const Rank& rank, bool isFirst) {
                              static_cast<void>(rank.sum(64, isFirst ? ncclSum : ncclMin));
                            },
                            {"rank 2 called AllReduce(count 64, int32, min)",
                             "rank 0 called AllReduce(count 64, int32, sum)"}},
                    Variant{"Message",
                            [](const Rank& rank, bool) {
                              if (rank.number == 1) {
                                static_cast<void>(ncclSend(rank.buffer.as(), 64, ncclInt, 2,
                                                           rank.comm, rank.stream));
                              } else if (rank.number == 2) {
                                static_cast<void>(ncclRecv(rank.buffer.as(), 32, ncclInt, 1,
                                                           rank.comm, rank.stream));
                              }
                            },
                            {"Rank 1 sends message 1 to rank 2 with 256 bytes",
                             "rank 2 receives 128 bytes"}}),
    [](const auto& instance) { return std::string(instance.param.name); });

// Calls that fit, with thousands of them between two looks, and ranks that are late.
TEST(RemoteMatches, AreNoMismatch) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(4, [&](int process) {
    onHost(process / 2);
    const Rank rank(log, pipe, process, 4, "30");
    for (int round = 0; round < 4; round++) {
      for (size_t i = 0; i < scaled(100, 20); i++) check(rank.sum(1 + i));
      if (process == round) std::this_thread::sleep_for(milliseconds(700));
      const int to = (process + 1) % 4, from = (process + 3) % 4;
      check(ncclGroupStart());
      check(ncclSend(rank.buffer.as(), kFewInts, ncclInt, to, rank.comm, rank.stream));
      check(ncclRecv(rank.buffer.as<int>() + kFewInts, kFewInts, ncclInt, from, rank.comm,
                     rank.stream));
      check(ncclGroupEnd());
    }
    check(unisonoHostStreamSynchronize(rank.stream));
    std::this_thread::sleep_for(milliseconds(1500));  // the last calls are compared as well
    ncclResult_t state = ncclInternalError;
    check(ncclCommGetAsyncError(rank.comm, &state));
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(rank.comm);
    rank.finish();
  }));
  EXPECT_EQ(log.reports(), 0) << log.text();
}

}  // namespace
}  // namespace unisono::system_test
