// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "base/error.h"
#include "coordinator.h"

namespace unisono::bench {
namespace {

using testing::HasSubstr;

TEST(Coordinator, ExchangesBetweenThreads) {
  constexpr int kWorkers = 4;
  Coordinator coordinator(kWorkers, 30);
  std::vector<double> sums(kWorkers);
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < kWorkers; worker++) {
      threads.emplace_back([&, worker] {
        for (int round = 0; round < 100; round++) {
          Contribution mine;
          mine.seconds = worker + round;
          for (const Contribution& each : coordinator.exchange(worker, mine)) {
            sums[static_cast<size_t>(worker)] += each.seconds;
          }
        }
      });
    }
  }
  for (double sum : sums) EXPECT_EQ(sum, 4 * 4950 + 600);
}

TEST(Coordinator, ExchangesBetweenProcesses) {
  Coordinator coordinator(3, 30);
  runInProcesses(3, coordinator, 5, [&](int process) {
    Contribution mine;
    mine.wrong = static_cast<uint64_t>(process) + 1;
    uint64_t sum = 0;
    for (const Contribution& each : coordinator.exchange(process, mine)) sum += each.wrong;
    coordinator.addWrong(sum);
    return 0;
  });
  EXPECT_FALSE(coordinator.aborted());
  EXPECT_EQ(coordinator.totalWrong(), 18u);
}

TEST(Coordinator, AnEndedProcessEndsTheWaitOfTheOthers) {
  Coordinator coordinator(2, 30);
  runInProcesses(2, coordinator, 5, [&](int process) {
    if (process == 1) ::raise(SIGKILL);
    try {
      coordinator.barrier();
    } catch (const Aborted&) {
      return 0;
    }
    return 9;
  });
  EXPECT_TRUE(coordinator.aborted());
  EXPECT_THAT(coordinator.errorText(), HasSubstr("process 1 was ended by signal 9"));
}

TEST(Coordinator, EndsProcessesThatDoNotEndThemselves) {
  Coordinator coordinator(2, 30);
  runInProcesses(2, coordinator, 0.1, [&](int process) {
    if (process == 1) {
      coordinator.abort(3, "gave up");
      return 3;
    }
    for (;;) ::pause();
  });
  EXPECT_EQ(coordinator.errorText(), "gave up");
  EXPECT_EQ(coordinator.errorStatus(), 3);
}

TEST(Coordinator, KeepsTheFirstError) {
  Coordinator coordinator(1, 30);
  coordinator.abort(3, "first");
  coordinator.abort(2, "second");
  EXPECT_EQ(coordinator.errorText(), "first");
  EXPECT_THROW(coordinator.barrier(), Aborted);
}

TEST(Coordinator, ABarrierDoesNotWaitForEver) {
  Coordinator coordinator(2, 0.05);
  EXPECT_THROW(coordinator.barrier(), Error);
}

TEST(CallInProcess, HandsBackTextAndErrors) {
  EXPECT_EQ(callInProcess([] { return std::string(100000, 'x'); }), std::string(100000, 'x'));
  EXPECT_EQ(callInProcess([] { return std::string(); }), "");
  try {
    callInProcess([]() -> std::string { throw invalidUsage("no such thing"); });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no such thing"));
  }
  try {
    callInProcess([]() -> std::string {
      ::raise(SIGKILL);
      return "";
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("signal 9"));
  }
}

}  // namespace
}  // namespace unisono::bench
