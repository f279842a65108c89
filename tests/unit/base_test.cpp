// SPDX-License-Identifier: Apache-2.0
// The small helpers of src/base.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "base/cpu_affinity.h"
#include "base/error.h"
#include "base/fnv.h"
#include "base/math.h"
#include "base/result.h"
#include "base/stage_times.h"
#include "base/system.h"
#include "base/thread.h"
#include "support/no_new_threads.h"

namespace unisono {
namespace {

constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

sigset_t currentMask() {
  sigset_t mask;
  ::sigemptyset(&mask);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return mask;
}

// The signals that `mask` blocks; SIGKILL, SIGSTOP and those that glibc uses cannot be blocked.
std::array<bool, 32> blockedBy(const sigset_t& mask) {
  std::array<bool, 32> blocked{};
  for (int signal = 1; signal < 32; signal++) {
    blocked[static_cast<size_t>(signal)] = ::sigismember(&mask, signal) == 1;
  }
  return blocked;
}

// Blocks SIGUSR1 alone, so that a mask that is not restored differs from both extremes.
class StartThread : public testing::Test {
 protected:
  void SetUp() override {
    sigset_t mask;
    ::sigemptyset(&mask);
    ::sigaddset(&mask, SIGUSR1);
    ::pthread_sigmask(SIG_SETMASK, &mask, &before_);
    mask_ = blockedBy(mask);
  }
  void TearDown() override { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  sigset_t before_;
  std::array<bool, 32> mask_;
};

TEST_F(StartThread, BlocksSignalsInTheThreadAlone) {
  sigset_t inside;
  std::string name(16, '\0');
  std::thread thread = startThread("unisono-test", [&] {
    inside = currentMask();
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  });
  EXPECT_EQ(blockedBy(currentMask()), mask_);
  thread.join();
  EXPECT_EQ(blockedBy(currentMask()), mask_);
  EXPECT_STREQ(name.c_str(), "unisono-test");
  for (int signal : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM, SIGPIPE}) {
    EXPECT_EQ(::sigismember(&inside, signal), 1) << ::strsignal(signal);
  }
  for (int signal : kFaults) EXPECT_EQ(::sigismember(&inside, signal), 0) << ::strsignal(signal);
}

TEST_F(StartThread, RestoresTheMaskWhenTheThreadIsRefused) {
  test::NoNewThreads refused;
  try {
    startThread("unisono-test", [] {}).join();
    ADD_FAILURE() << "a thread started";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::systemError);
    EXPECT_NE(std::string(error.what()).find("unisono-test"), std::string::npos) << error.what();
  }
  EXPECT_EQ(blockedBy(currentMask()), mask_);
}

TEST(Math, RoundsUp) {
  static_assert(ceilDivide(0, 4) == 0);
  static_assert(ceilDivide(1, 4) == 1);
  static_assert(ceilDivide(4, 4) == 1);
  static_assert(ceilDivide(5, 4) == 2);
  static_assert(roundUp<uint64_t>(0, 16) == 0);
  static_assert(roundUp<uint64_t>(1, 16) == 16);
  static_assert(roundUp<uint64_t>(16, 16) == 16);
  static_assert(roundUp<uint64_t>(17, 12) == 24);
}

// The first numbers of the authors' reference implementation with state 1234567.
TEST(Math, SplitMix64IsTheReference) {
  uint64_t state = 1234567;
  for (uint64_t expected : {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                            4593380528125082431u, 16408922859458223821u}) {
    EXPECT_EQ(splitMix64(state), expected);
  }
}

TEST(Math, AtomicMaxNeverLowers) {
  std::atomic<uint64_t> value{5};
  atomicMax(value, uint64_t{3});
  EXPECT_EQ(value, 5u);
  atomicMax(value, uint64_t{9});
  EXPECT_EQ(value, 9u);
}

uint64_t fnvOf(auto value) {
  Fnv hash;
  hash.add(value);
  return hash.value();
}

// The values of the authors' test suite.
TEST(Fnv, IsFnv1a) {
  EXPECT_EQ(fnvOf(std::string_view("")), 0xcbf29ce484222325u);
  EXPECT_EQ(fnvOf(std::string_view("a")), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(fnvOf(std::string_view("foobar")), 0x85944171f73967e8u);
  EXPECT_EQ(fnvOf(uint64_t{0x0807060504030201}), fnvOf(std::string_view("\1\2\3\4\5\6\7\10")));
}

// A hash that took a word at once would keep differences of its high bits there.
TEST(Fnv, EveryBitOfAWordReachesTheLowBits) {
  const auto low = [](uint64_t value) { return static_cast<uint16_t>(fnvOf(value)); };
  for (int bit = 0; bit < 64; bit++) EXPECT_NE(low(uint64_t{1} << bit), low(0)) << bit;
}

std::string keptText;
bool keptAsLogged = false;
void keepText(const char* text, bool isLogged) noexcept {
  keptAsLogged = isLogged;
  keptText = text;
}

TEST(Guarded, TurnsExceptionsIntoResults) {
  EXPECT_EQ(guarded(keepText, [] {}), ncclSuccess);
  EXPECT_EQ(guarded(keepText, [] { return ncclInProgress; }), ncclInProgress);
  EXPECT_EQ(keptText, "");
  EXPECT_EQ(guarded(keepText, [] { throw invalidUsage("wrong {}", 1); }), ncclInvalidUsage);
  EXPECT_EQ(keptText, "wrong 1");
  EXPECT_FALSE(keptAsLogged);
  EXPECT_EQ(guarded(keepText,
                    [] {
                      Error error = invalidUsage("told before");
                      error.setLogged();
                      throw error;
                    }),
            ncclInvalidUsage);
  EXPECT_TRUE(keptAsLogged);
  EXPECT_EQ(guarded(keepText, [] { throw Error(ErrorCode::timeout, "late"); }), ncclRemoteError);
  EXPECT_EQ(guarded(keepText, [] { throw std::bad_alloc(); }), ncclSystemError);
  EXPECT_EQ(keptText, "Out of host memory");
  EXPECT_EQ(guarded(keepText, [] { throw std::out_of_range("index"); }), ncclInternalError);
  EXPECT_EQ(keptText, "index");
}

std::string maskOf(const cpu_set_t& cores) {
  std::string text;
  for (int word = CPU_SETSIZE / 32 - 1; word >= 0; word--) {
    uint32_t bits = 0;
    for (int bit = 0; bit < 32; bit++) {
      if (CPU_ISSET(static_cast<size_t>(word * 32 + bit), &cores)) bits |= uint32_t{1} << bit;
    }
    text += fmt::format("{}{:08x}", text.empty() ? "" : ",", bits);
  }
  return text;
}

cpu_set_t coresOfThisThread() {
  cpu_set_t cores;
  EXPECT_EQ(::sched_getaffinity(0, sizeof cores, &cores), 0);
  return cores;
}

TEST(ScopedCpuAffinity, RestrictsTheThreadAndThoseItStarts) {
  const cpu_set_t before = coresOfThisThread();
  cpu_set_t one;
  CPU_ZERO(&one);
  for (size_t core = 0; CPU_COUNT(&one) == 0; core++) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  for (const bool ignoreOwn : {false, true}) {
    const ScopedCpuAffinity scope(maskOf(one), ignoreOwn);
    const cpu_set_t inside = coresOfThisThread();
    EXPECT_TRUE(CPU_EQUAL(&inside, &one));
    std::thread([&] {
      const cpu_set_t inherited = coresOfThisThread();
      EXPECT_TRUE(CPU_EQUAL(&inherited, &one));
    }).join();
  }
  const cpu_set_t after = coresOfThisThread();
  EXPECT_TRUE(CPU_EQUAL(&after, &before));
}

TEST(ScopedCpuAffinity, ChangesNothingWithoutACore) {
  const cpu_set_t before = coresOfThisThread();
  cpu_set_t others;
  CPU_ZERO(&others);
  for (size_t core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &before)) CPU_SET(core, &others);
  }
  for (const std::string& mask : {std::string(), std::string("00000000"), maskOf(others)}) {
    const ScopedCpuAffinity scope(mask, false);
    const cpu_set_t inside = coresOfThisThread();
    EXPECT_TRUE(CPU_EQUAL(&inside, &before)) << mask;
  }
}

// A killed process is gone once it is reaped, and already as a zombie.
TEST(Processes, HaveEndedWithAllTheirThreads) {
  EXPECT_FALSE(hasEnded(::getpid()));
  EXPECT_NE(pidNamespace(), 0u);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (;;) ::pause();
  }
  EXPECT_FALSE(hasEnded(child));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(hasEnded(child)) << "a zombie";
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(hasEnded(child));
}

// The first thread of a process may end before the others.
TEST(Processes, HaveNotEndedWhileAThreadRuns) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::thread([] {
      for (;;) ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);
  }
  const auto stateOf = [child] {
    std::ifstream file("/proc/" + std::to_string(child) + "/stat");
    std::string text;
    std::getline(file, text);
    return text.at(text.rfind(')') + 2);
  };
  for (int i = 0; i < 5000 && stateOf() != 'Z'; i++) ::usleep(1000);
  EXPECT_EQ(stateOf(), 'Z');
  EXPECT_FALSE(hasEnded(child));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(hasEnded(child));
}

TEST(StageTimes, AddUpStagesOfTheSameName) {
  using namespace std::chrono_literals;
  const auto begin = StageTimes::Clock::now();
  StageTimes times(begin);
  EXPECT_EQ(times.describe(), "0.0 ms ()");
  times.endAt("first", begin + 20ms);
  EXPECT_EQ(times.describe(), "20.0 ms (first 20.0)");
  times.endAt("second", begin + 23ms);
  times.endAt("first", begin + 24260us);
  EXPECT_EQ(times.describe(), "24.3 ms (first 21.3, second 3.0)");
}

}  // namespace
}  // namespace unisono
