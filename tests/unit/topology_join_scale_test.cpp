// SPDX-License-Identifier: Apache-2.0
// How time and memory of joining grow with the number of ranks. Prints the curve.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <limits>

#include "topology/join.h"
#include "topology/presets.h"

namespace unisono::topology {
namespace {

constexpr int kGpus = 8;

// The most memory that this process has ever held, in MB. Grows with each step of the curve.
double peakMegabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;
}

class JoinScale : public ::testing::Test {
 protected:
  JoinScale() {
    const Machine machine =
        trimMachine(buildTopology(describeMachine(preset("dgx-h100"))), {}, -1, 0);
    const GraphSet graphs = searchGraphs(machine, {});
    std::vector<std::vector<int>> ranksOf(machine.topology.nodes.size());
    for (const int gpu : machine.topology.of(NodeType::gpu)) {
      ranksOf[static_cast<size_t>(gpu)] = {machine.topology.node(gpu).gpu.rank};
    }
    for (int rank = 0; rank < kGpus; rank++) oneNode_.push_back(placeOf(graphs, ranksOf, rank, 0));
  }

  std::vector<RankPlace> placesOf(int ranks) const {
    std::vector<RankPlace> places(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; rank++) {
      RankPlace& place = places[static_cast<size_t>(rank)];
      place = oneNode_[static_cast<size_t>(rank % kGpus)];
      place.node = static_cast<uint64_t>(rank / kGpus) * 0x9e3779b97f4a7c15u;
    }
    return places;
  }

 private:
  std::vector<RankPlace> oneNode_;
};

// Processor time, which other programs on the machine hardly lengthen, of the fastest of several
// runs.
double secondsToJoin(const std::vector<RankPlace>& places) {
  double best = std::numeric_limits<double>::max();
  for (int round = 0; round < 5; round++) {
    const std::clock_t begin = std::clock();
    const Joined joined = join(places, {});
    EXPECT_NE(hashOf(joined).rings, 0u);
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return best;
}

// Four times the ranks take 4 times as long, or 16 times if any part is quadratic.
TEST_F(JoinScale, TimeIsLinearInTheNumberOfRanks) {
  constexpr int kRanks = 16384;
  const double few = secondsToJoin(placesOf(kRanks));
  const double many = secondsToJoin(placesOf(4 * kRanks));
  std::printf("%d ranks: %.1f ms, four times as many: %.1f ms\n", kRanks, 1e3 * few, 1e3 * many);
  EXPECT_LT(many, 9 * few);
}

TEST_F(JoinScale, PrintsTheCurve) {
  std::printf(
      "| ranks | nodes | channels | received, MB | join, ms | hash, ms | "
      "own place in all channels, ms | peak of the process, MB "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (int ranks = kGpus; ranks <= 65536; ranks *= 2) {
    const std::vector<RankPlace> places = placesOf(ranks);
    // Processor time, which other programs on the machine do not lengthen.
    const std::clock_t begin = std::clock();
    const Joined joined = join(places, {});
    const std::clock_t afterJoin = std::clock();
    const JoinedHash hash = hashOf(joined);
    const std::clock_t afterHash = std::clock();
    size_t neighbours = 0;
    for (int c = 0; c < joined.channels(); c++) {
      neighbours += static_cast<size_t>(joined.ringNext(c, ranks - 1));
      neighbours += joined.treePlace(c, ranks - 1).down.size();
    }
    const std::clock_t end = std::clock();
    const auto milliseconds = [](std::clock_t from, std::clock_t to) {
      return 1e3 * static_cast<double>(to - from) / CLOCKS_PER_SEC;
    };
    const double megabytes = peakMegabytes();
    std::printf("| %d | %d | %d | %.2f | %.2f | %.2f | %.3f | %.2f |\n", ranks, joined.nodes(),
                joined.channels(), static_cast<double>(ranks * sizeof(RankPlace)) / 1e6,
                milliseconds(begin, afterJoin), milliseconds(afterJoin, afterHash),
                milliseconds(afterHash, end), megabytes);
    EXPECT_NE(hash.rings, 0u);
    EXPECT_GT(neighbours, 0u);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    if (ranks == 4096) {
      EXPECT_LT(megabytes, 200);
    }
#endif
  }
}

}  // namespace
}  // namespace unisono::topology
