// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <thread>

#include "hang_testing.h"
#include "mappings.h"

// Ranks in processes of their own that never finish a call: what the report says, once for all of
// them. And calls that do not fit together.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

TEST(HangReport, NamesTheRankThatHasNotArrived) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int process) {
    if (process == 1) ::setenv("NCCL_IGNORE_CPU_AFFINITY", "1", 1);
    const Rank rank(log, pipe, process, 3);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    if (process == 2) {
      EXPECT_TRUE(log.waitForReport());
    }
    check(rank.sum(kFewInts, ncclMax));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_TRUE(log.hasReport()) << text;
  EXPECT_THAT(text, ContainsRegex("No progress for [0-9]+\\.[0-9] s: not arrived: rank 2\n"));
  EXPECT_THAT(text, HasSubstr("call:         AllReduce #2 (count 64, int32, max) of rank 0, "
                              "communicator job of 3 ranks\n"));
  EXPECT_THAT(text,
              AllOf(HasSubstr("not arrived: rank 2\n"), HasSubstr("waiting:      ranks 0, 1\n"),
                    HasSubstr("finished:     none\n"), HasSubstr("0 -> 2, 1 -> 2\n")));
  EXPECT_THAT(text,
              ContainsRegex("rank 2 \\(process [0-9]+, device 2\\) has finished AllReduce #1"));
  EXPECT_THAT(text, ContainsRegex("next: +Look at what process [0-9]+ does instead"));
  EXPECT_THAT(text, HasSubstr("differs:      NCCL_IGNORE_CPU_AFFINITY is 1 on rank 1, its default "
                              "on ranks 0, 2\n"));
  EXPECT_THAT(text, HasSubstr("\"settings\":[\"NCCL_IGNORE_CPU_AFFINITY is 1 on rank 1, its "
                              "default on ranks 0, 2\"]"));
  EXPECT_THAT(text, HasSubstr("{\"unisono_hang\":{\"verdict\":\"not_arrived\""));
  EXPECT_THAT(text, HasSubstr("\"not_arrived\":[2],\"waiting\":[0,1],\"finished\":[]"));
}

// A rank that has never made a call: the others wait on the CPU, for its connections.
TEST(HangReport, NamesTheRankThatHasMadeNoCall) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int process) {
    const Rank rank(log, pipe, process, 3);
    if (process == 0) {
      EXPECT_TRUE(log.waitForReport());
    }
    check(rank.sum(kManyInts));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_TRUE(log.hasReport()) << text;
  EXPECT_THAT(text, HasSubstr("not arrived: rank 0\n"));
  EXPECT_THAT(text, HasSubstr("has made no call"));
}

TEST(HangReport, SaysThatTheMissingProcessIsStopped) {
  const Log log;
  const Pipe pipe, process1, ended;
  expectAllPass(runChildren(3, [&](int process) {
    if (process == 2) {  // the one that looks after the others
      const auto victim = process1.read<pid_t>();
      EXPECT_TRUE(log.waitForReport());
      ::kill(victim, SIGCONT);
      return;
    }
    const Rank rank(log, pipe, process, 2);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    if (process == 1) {
      process1.write(::getpid());
      std::this_thread::sleep_for(milliseconds(600));  // its watchdog sees that the call is done
      ::raise(SIGSTOP);
    }
    check(rank.sum(kFewInts));
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("not arrived: rank 1\n"));
  EXPECT_THAT(text, ContainsRegex("its process is stopped"));
  EXPECT_THAT(text, ContainsRegex("next: +Let process [0-9]+ go on \\(kill -CONT [0-9]+\\)"));
}

// Rank 2 waits for the connections of the others and is stopped; then they make the call as well.
TEST(HangReport, SaysThatRanksStillConnect) {
  const Log log;
  const Pipe pipe, toHelper, stopped;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) {
      const auto victim = toHelper.read<pid_t>();
      std::this_thread::sleep_for(
          milliseconds(1000));  // it is in its call, and its table is mapped
      ::kill(victim, SIGSTOP);
      for (const int rank : {0, 1}) stopped.write(rank);
      EXPECT_TRUE(log.waitForReport());
      ::kill(victim, SIGCONT);
      return;
    }
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
  EXPECT_THAT(text, HasSubstr("not arrived:  none\n"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"not_connected\""));
  EXPECT_THAT(text, ContainsRegex("next: +Let process [0-9]+ go on"));
}

// A page of a buffer whose next access stops the thread that makes it, as a device does that does
// not answer, until it is opened. One at a time.
class ClosedPage {
 public:
  explicit ClosedPage(std::byte* address) : page_(address) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(page_) % kBytes, 0u);
    isOpen = false;
    isAccessed = false;
    struct sigaction action {};
    action.sa_handler = [](int) {
      isAccessed = true;
      const timespec nap{0, 1'000'000};
      while (!isOpen.load()) ::nanosleep(&nap, nullptr);
    };
    ::sigaction(SIGSEGV, &action, &before_);
    EXPECT_EQ(::mprotect(page_, kBytes, PROT_NONE), 0);
  }
  ~ClosedPage() { ::sigaction(SIGSEGV, &before_, nullptr); }
  ClosedPage(const ClosedPage&) = delete;
  ClosedPage& operator=(const ClosedPage&) = delete;
  // Returns when a thread is stopped.
  void awaitAccess() const {
    while (!isAccessed.load()) std::this_thread::sleep_for(milliseconds(1));
  }
  void open() {
    EXPECT_EQ(::mprotect(page_, kBytes, PROT_READ | PROT_WRITE), 0);
    isOpen = true;
  }

 private:
  static constexpr size_t kBytes = 4096;
  static inline std::atomic<bool> isOpen{true}, isAccessed{false};
  std::byte* page_;
  struct sigaction before_ {};
};

class KernelsOf : public testing::TestWithParam<const char*> {};

// A rank stops while all are in the middle of a call.
TEST_P(KernelsOf, AreSaidToBeStuck) {
  const Log log;
  const Pipe pipe, toHelper;
  expectAllPass(runChildren(4, [&](int process) {
    if (process == 3) {
      const auto victim = toHelper.read<pid_t>();
      EXPECT_TRUE(log.waitForReport("\"verdict\":\"in_kernel\""));
      ::kill(victim, SIGCONT);
      return;
    }
    ::setenv("NCCL_ALGO", "ring", 1);
    ::setenv("NCCL_PROTO", GetParam(), 1);
    const Rank rank(log, pipe, process, 3);
    const size_t count = size_t{1} << 20;
    DeviceBuffer large(process, count * sizeof(int));
    check(rank.sum(kManyInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    // So that the call is not over when the process stops.
    std::optional<ClosedPage> page;
    if (process == 1) {
      toHelper.write(::getpid());
      page.emplace(large.as() + count * sizeof(int) / 2);
    }
    check(ncclAllReduce(large.as(), large.as(), count, ncclInt, ncclSum, rank.comm, rank.stream));
    if (process == 1) {
      page->awaitAccess();
      ::raise(SIGSTOP);
      page->open();
    }
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, ContainsRegex("stuck in the kernel: rank [02] waits for "));
  EXPECT_THAT(text, ContainsRegex("step [0-9]+ of channel [0-9]+"));
  EXPECT_THAT(text, ContainsRegex("next: +Let process [0-9]+ go on"));
}

INSTANTIATE_TEST_SUITE_P(Protocols, KernelsOf, testing::Values("Simple", "LL", "LL128"),
                         [](const auto& instance) { return std::string(instance.param); });

// What three ranks call, of which rank 1 is stopped in the middle of its own data, and what the
// report says.
struct DirectCall {
  const char* name;
  const char *algorithm, *protocol;
  size_t bytes;
  bool isMessage;    // from rank 1 to rank 0, of the ranks 0 and 1
  bool usesBuffers;  // of the peers, once they are mapped
  const char* where;
};

// How it is called: alone, or in a group whose plan has launches before it or after it.
enum class Form { alone, inGroup, inReplay };
const char* suffixOf(Form form) {
  static constexpr const char* kSuffixes[] = {"", "InAGroup", "InAReplay"};
  return kSuffixes[static_cast<size_t>(form)];
}

class DirectKernelsOf : public testing::TestWithParam<std::tuple<DirectCall, Form>> {};

TEST_P(DirectKernelsOf, AreSaidToBeStuck) {
  const DirectCall& call = std::get<DirectCall>(GetParam());
  const Form form = std::get<Form>(GetParam());
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(3, [&](int process) {
    if (call.algorithm != nullptr) ::setenv("NCCL_ALGO", call.algorithm, 1);
    if (call.protocol != nullptr) ::setenv("NCCL_PROTO", call.protocol, 1);
    const Rank rank(log, pipe, process, 3);
    DeviceBuffer input(process, call.bytes), output(process, call.bytes);
    const auto makeCall = [&] {
      if (!call.isMessage) {
        check(ncclAllReduce(input.as(), output.as(), call.bytes / sizeof(int), ncclInt, ncclSum,
                            rank.comm, rank.stream));
      } else if (process == 1) {
        check(ncclSend(input.as(), call.bytes, ncclInt8, 0, rank.comm, rank.stream));
      } else if (process == 0) {
        check(ncclRecv(output.as(), call.bytes, ncclInt8, 1, rank.comm, rank.stream));
      }
    };
    const auto makeCalls = [&] {
      if (form == Form::alone) return makeCall();
      check(ncclGroupStart());
      check(rank.sum(kFewInts));
      makeCall();
      if (!call.isMessage && process == 0) {
        check(ncclSend(rank.buffer.as(), 8, ncclInt8, 1, rank.comm, rank.stream));
      } else if (!call.isMessage && process == 1) {
        check(ncclRecv(rank.buffer.as(), 8, ncclInt8, 0, rank.comm, rank.stream));
      }
      check(ncclGroupEnd());
    };
    for (int i = 0; i < 3; i++) makeCalls();  // connects and maps buffers
    rank.synchronize();
    std::optional<Graph> graph;
    if (form == Form::inReplay) graph.emplace(rank.stream, makeCalls);
    const auto run = [&] { graph ? graph->launch() : makeCalls(); };
    run();
    rank.synchronize();
    // The input and the output of each rank.
    if (call.usesBuffers) {
      EXPECT_TRUE(waitForMappings(call.bytes, 6));
    }
    std::optional<ClosedPage> page;
    if (process == 1) page.emplace(input.as() + call.bytes / 2);
    run();
    EXPECT_TRUE(log.waitForReport());
    if (page) page->open();
    rank.finish();
  }));
  const std::string text = log.text();
  EXPECT_TRUE(log.hasReport()) << text;
  EXPECT_THAT(text, ContainsRegex("stuck in the kernel: rank [02] waits for "));
  EXPECT_THAT(text, ContainsRegex(call.where));
  EXPECT_THAT(text, ContainsRegex("who for whom:.*0 -> 1"));
  EXPECT_THAT(text, Not(HasSubstr("1 -> ")));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"in_kernel\""));
  EXPECT_THAT(text, HasSubstr(form == Form::inReplay ? "\"replay\":2," : "\"replay\":null,"));
}

INSTANTIATE_TEST_SUITE_P(
    Variants, DirectKernelsOf,
    testing::Combine(
        testing::Values(
            DirectCall{"OneShotOverLL", "direct", "LL", 32 << 10, false, false,
                       "waits for line [0-9]+ of (4096|4128) from rank 1"},
            DirectCall{"OneShotOverLL128", "direct", "LL128", 512 << 10, false, false,
                       "waits for step [0-9]+ of [0-9]+ of block [0-9]+ from rank 1"},
            DirectCall{"TwoShot", "twoshot", "LL128", 512 << 10, false, false,
                       "waits for step [0-9]+ of [0-9]+ of block [0-9]+ from rank 1"},
            DirectCall{
                "InBuffers", "twoshot", "LL128", 4 << 20, false, true,
                "waits for rank 1 to (offer|be done with) its buffers .zero copy: nothing counts"},
            DirectCall{"MessageOverLL", nullptr, nullptr, 32 << 10, true, false,
                       "rank 0 waits for line [0-9]+ of 4096 from rank 1"},
            DirectCall{"MessageOverLL128", nullptr, nullptr, 512 << 10, true, false,
                       "rank 0 waits for step [0-9]+ of block [0-9]+ from rank 1"}),
        testing::Values(Form::alone, Form::inGroup, Form::inReplay)),
    [](const auto& instance) {
      return std::string(std::get<DirectCall>(instance.param).name) +
             suffixOf(std::get<Form>(instance.param));
    });

// Rank 1 has put work of its own before the call: a wait for an event that is recorded later.
TEST(HangReport, SaysThatOtherWorkIsBeforeTheCall) {
  const Log log;
  const Pipe pipe, second;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    callAfterOtherWork(log, rank, second);
  }));
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("waiting outside the library: the kernel has not begun on rank 1"));
  EXPECT_THAT(text, HasSubstr("\"verdict\":\"outside\""));
  EXPECT_THAT(text,
              ContainsRegex("its process waits in Recv #2 from rank 0 \\(count 4, int32\\) of "
                            "communicator side"));
}

// Each receives before it sends.
TEST(HangReport, ShowsTheCycleOfMessages) {
  const Log log;
  const Pipe pipe;
  const std::vector<int> results = runChildren(3, [&](int process) {
    const Rank rank(log, pipe, process, 3);
    check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    std::thread breaker([&] {
      EXPECT_TRUE(log.waitForReport());
      rank.abandon();
    });
    const int from = (process + 1) % 3;
    static_cast<void>(ncclRecv(rank.buffer.as(), kFewInts, ncclInt, from, rank.comm, rank.stream));
    breaker.join();
  });
  expectAllPass(results);
  const std::string text = log.text();
  EXPECT_TRUE(log.hasReport()) << text;
  EXPECT_THAT(text, HasSubstr("not arrived: rank 1\n"));
  EXPECT_THAT(text, HasSubstr("Recv #1 from rank 1 (count 64, int32) of rank 0"));
  EXPECT_THAT(text, HasSubstr("cycle:        ranks 0 -> 1 -> 2\n"));
  EXPECT_THAT(text, HasSubstr("Put sends and receives that wait for each other into one group"));
}

// A slow rank is not a hang while it comes in time, and 0 turns reports off.
TEST(HangReport, IsNotMadeBeforeItsTime) {
  for (const char* seconds : {"30", "0"}) {
    const Log log;
    const Pipe pipe;
    expectAllPass(runChildren(2, [&](int process) {
      const Rank rank(log, pipe, process, 2, seconds);
      check(rank.sum(kFewInts));
      if (process == 1) std::this_thread::sleep_for(milliseconds(2500));
      check(rank.sum(kFewInts));
      rank.finish();
    }));
    EXPECT_EQ(log.reports(), 0) << log.text();
  }
}

// What a rank calls, and what the error says of it.
struct Variant {
  const char* name;
  ncclResult_t (*first)(const Rank&);
  ncclResult_t (*second)(const Rank&);
  std::vector<std::string> texts;
};

class Mismatches : public testing::TestWithParam<Variant> {};

// Both ranks hear of both calls, whether the calls hang or not.
TEST_P(Mismatches, AreNamedOnAllRanks) {
  const Variant& variant = GetParam();
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2, "30");
    for (int i = 0; i < 3; i++) check(rank.sum(kFewInts));
    check(unisonoHostStreamSynchronize(rank.stream));
    const auto start = Clock::now();
    const ncclResult_t result = process == 0 ? variant.first(rank) : variant.second(rank);
    ncclResult_t state = result;
    while (state == ncclSuccess && Clock::now() - start < kPatience) {
      std::this_thread::sleep_for(milliseconds(1));
      check(ncclCommGetAsyncError(rank.comm, &state));
    }
    EXPECT_TRUE(state == ncclInvalidUsage || state == ncclRemoteError) << state;
    for (const std::string& text : variant.texts) {
      EXPECT_THAT(ncclGetLastError(rank.comm), HasSubstr(text));
    }
    EXPECT_OK(unisonoHostStreamSynchronize(rank.stream));
    EXPECT_EQ(rank.sum(kFewInts), state);
    EXPECT_OK(ncclCommDestroy(rank.comm));
  }));
}

INSTANTIATE_TEST_SUITE_P(
    Calls, Mismatches,
    testing::Values(
        Variant{"Count",
                [](const Rank& r) { return r.sum(64); },
                [](const Rank& r) { return r.sum(128); },
                {"Collective call 4 differs between ranks",
                 "rank 0 called AllReduce(count 64, int32, sum)",
                 "rank 1 called AllReduce(count 128, int32, sum)"}},
        Variant{"Operator",
                [](const Rank& r) { return r.sum(64); },
                [](const Rank& r) { return r.sum(64, ncclMax); },
                {"rank 0 called AllReduce(count 64, int32, sum)",
                 "rank 1 called AllReduce(count 64, int32, max)"}},
        Variant{"Type",
                [](const Rank& r) { return r.sum(64); },
                [](const Rank& r) { return r.sum(64, ncclSum, ncclFloat); },
                {"rank 0 called AllReduce(count 64, int32, sum)",
                 "rank 1 called AllReduce(count 64, float32, sum)"}},
        Variant{"Root",
                [](const Rank& r) {
                  return ncclBcast(r.buffer.as(), 64, ncclInt, 0, r.comm, r.stream);
                },
                [](const Rank& r) {
                  return ncclBcast(r.buffer.as(), 64, ncclInt, 1, r.comm, r.stream);
                },
                {"rank 0 called Broadcast(count 64, int32, root 0)",
                 "rank 1 called Broadcast(count 64, int32, root 1)"}},
        Variant{"Call",
                [](const Rank& r) { return r.sum(64); },
                [](const Rank& r) {
                  return ncclAllGather(r.buffer.as(), r.buffer.as(), 64, ncclInt, r.comm, r.stream);
                },
                {"rank 0 called AllReduce(count 64, int32, sum)",
                 "rank 1 called AllGather(count 64, int32)"}},
        Variant{
            "Message",
            [](const Rank& r) { return ncclSend(r.buffer.as(), 64, ncclInt, 1, r.comm, r.stream); },
            [](const Rank& r) { return ncclRecv(r.buffer.as(), 32, ncclInt, 0, r.comm, r.stream); },
            {"Rank 0 sends message 1 to rank 1 with 256 bytes", "rank 1 receives 128 bytes"}}),
    [](const auto& instance) { return std::string(instance.param.name); });

// What NCCL lets work: types of equal size in copies, unsigned sums of signed numbers.
// What has no elements does nothing, so that a rank may leave it out.
TEST(MatchingCalls, MayLeaveOutCallsOfNothing) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2, "30");
    if (process == 0) {
      check(rank.sum(0));
      check(ncclSend(rank.buffer.as(), 0, ncclInt, 1, rank.comm, rank.stream));
    }
    for (const size_t count : {64, 128, 64}) {
      check(rank.sum(count));
      check(process == 0 ? ncclSend(rank.buffer.as(), count, ncclInt, 1, rank.comm, rank.stream)
                         : ncclRecv(rank.buffer.as(), count, ncclInt, 0, rank.comm, rank.stream));
      check(unisonoHostStreamSynchronize(rank.stream));
    }
    std::this_thread::sleep_for(milliseconds(1500));  // the watchdogs compare within a second
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(rank.comm, &state));
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(rank.comm);
    rank.finish();
  }));
}

TEST(MatchingCalls, MayDifferInTypesThatDoNotMatter) {
  const Log log;
  const Pipe pipe;
  expectAllPass(runChildren(2, [&](int process) {
    const Rank rank(log, pipe, process, 2);
    check(rank.sum(kFewInts, ncclSum, process == 0 ? ncclInt32 : ncclUint32));
    const ncclDataType_t type = process == 0 ? ncclInt32 : ncclFloat32;
    check(ncclBcast(rank.buffer.as(), 64, type, 0, rank.comm, rank.stream));
    check(ncclBcast(rank.buffer.as(), process == 0 ? 64 : 256, process == 0 ? ncclInt32 : ncclInt8,
                    1, rank.comm, rank.stream));
    check(unisonoHostStreamSynchronize(rank.stream));
    std::this_thread::sleep_for(milliseconds(700));  // the watchdog looks twice
    ncclResult_t state = ncclInternalError;
    check(ncclCommGetAsyncError(rank.comm, &state));
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(rank.comm);
    rank.finish();
  }));
}

}  // namespace
}  // namespace unisono::system_test
