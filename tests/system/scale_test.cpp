// SPDX-License-Identifier: Apache-2.0
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective_case.h"

// Many ranks in one process: 8 simulated nodes of 8 ranks, or UNISONO_TEST_NODES of them. Prints
// what they take (docs/results/2026-11-22-scale.md has 512 ranks). With UNISONO_TEST_INIT they make
// no calls.
namespace unisono::system_test {
namespace {

constexpr int kRanksPerNode = 8;

int nodesFromEnvironment() {
  const char* nodes = std::getenv("UNISONO_TEST_NODES");
  return nodes == nullptr ? scaled(8, 2) : std::atoi(nodes);
}

// In MiB: of the process now, or at most so far, as `field` of /proc/self/status says.
double memoryOf(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

// Of this process, on all CPUs.
double cpuSeconds() {
  timespec time = {};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Stopwatch {
 public:
  explicit Stopwatch(std::string what) : what_(std::move(what)) {}
  ~Stopwatch() {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
    std::printf(
        "%-24s %8.3f s, %8.3f s of CPUs; then %5.0f MiB, %4d threads and %5d descriptors; peak "
        "%5.0f MiB\n",
        what_.c_str(), seconds.count(), cpuSeconds() - startOfCpus_, memoryOf("VmRSS"),
        runningThreads(), openDescriptors(), memoryOf("VmHWM"));
    std::fflush(stdout);
  }

 private:
  const std::string what_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const double startOfCpus_ = cpuSeconds();
};

class Scale : public ::testing::TestWithParam<const char*> {};

TEST_P(Scale, AllReduceIsRight) {
  const int nodes = nodesFromEnvironment();
  const Setting algorithm("NCCL_ALGO", GetParam()), protocol("NCCL_PROTO", "Simple");
  std::unique_ptr<Ranks> ranks;
  {
    const Stopwatch watch("init of " + std::to_string(nodes * kRanksPerNode) + " ranks");
    ranks = std::make_unique<Ranks>(nodes, kRanksPerNode);
  }
  // Where the ranks of a color follow each other, they are connected already.
  for (const bool everySecond : {false, true}) {
    const int size = ranks->size();
    std::vector<ncclComm_t> halves(static_cast<size_t>(size));
    {
      const Stopwatch watch(everySecond ? "split, every second rank" : "split in the middle");
      ranks->inGroup([&](int rank) {
        check(ncclCommSplit(ranks->comm(rank), everySecond ? rank % 2 : rank / (size / 2), -rank,
                            &halves[static_cast<size_t>(rank)], nullptr));
      });
    }
    for (int rank = 0; rank < size; rank++) {
      int number = -1, count = 0;
      ASSERT_OK(ncclCommUserRank(halves[static_cast<size_t>(rank)], &number));
      ASSERT_OK(ncclCommCount(halves[static_cast<size_t>(rank)], &count));
      EXPECT_EQ(number, everySecond ? (size - 1 - rank) / 2 : (size - 1 - rank) % (size / 2))
          << "in the order of the keys";
      EXPECT_EQ(count, size / 2);
    }
    const Stopwatch watch("destroy the halves");
    for (ncclComm_t half : halves) ASSERT_OK(ncclCommDestroy(half));
  }
  // The first call connects.
  for (const size_t count : {1, 1000, 100'000}) {
    if (std::getenv("UNISONO_TEST_INIT") != nullptr) break;
    Case call;
    call.count = count;
    const Stopwatch watch(std::string(GetParam()) + ", " + std::to_string(count) + " elements");
    ASSERT_NO_THROW(runCase(*ranks, call));
  }
  const Stopwatch watch("destroy");
  ranks.reset();
}

INSTANTIATE_TEST_SUITE_P(Algorithms, Scale, ::testing::Values("Ring", "Tree"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace unisono::system_test
