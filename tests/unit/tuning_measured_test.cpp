// SPDX-License-Identifier: Apache-2.0
#include "tuning/measured.h"

#include <iterator>
#include <set>

#include "tuning_testing.h"

namespace unisono::tuning {
namespace {

using testing::expectRefused;

std::vector<MeasuredPoint> directOf(const MeasuredTable& table, int ranks, int nodes = 1) {
  return pointsFor(table, Operation::allReduce, Algorithm::direct, Protocol::ll, nodes, ranks);
}

TEST(Measured, ParsesLinesInAnyOrder) {
  const MeasuredTable table = parseMeasurements(
                                  "# a comment\n\n"
                                  "AllReduce Direct LL 1 2 4096 4.5 # the end\n"
                                  "allreduce direct ll 1 2 1024 2.5\r\n"
                                  "\tBroadcast\tRing Simple 2 16 1024 1e2",
                                  "file")
                                  .collectives;
  ASSERT_EQ(table.size(), 2u);
  const auto points = directOf(table, 2);
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[0].bytes, 1024u);
  EXPECT_EQ(points[1].timeUs, 4.5);
  EXPECT_EQ(table[1].nodes, 2);
  EXPECT_EQ(table[1].ranks, 16);
  EXPECT_EQ(table[1].points[0].timeUs, 100);
}

TEST(Measured, MessagesHavePaths) {
  const Measurements file = parseMeasurements(
      "SendReceive Direct LL 1 2 2048 3.5\n"
      "sendreceive direct ll 1 2 1024 2.5\n"
      "AllReduce Direct LL 1 2 1024 4\n"
      "AllToAll FIFO Simple 2 16 1048576 90",
      "file");
  EXPECT_EQ(file.collectives.size(), 1u);
  ASSERT_EQ(file.messages.size(), 2u);
  EXPECT_EQ(file.messages[0].operation, MessageOperation::sendReceive);
  EXPECT_EQ(file.messages[0].path, MessagePath::directLl);
  ASSERT_EQ(file.messages[0].points.size(), 2u);
  EXPECT_EQ(file.messages[0].points[0].timeUs, 2.5);
  EXPECT_EQ(file.messages[1].operation, MessageOperation::allToAll);
  EXPECT_EQ(file.messages[1].path, MessagePath::fifoSimple);
  EXPECT_EQ(file.messages[1].nodes, 2);
  EXPECT_EQ(file.messages[1].ranks, 16);
}

// Ranks compare it, so that every difference counts.
TEST(Measured, TheHashFollowsEveryWord) {
  const auto hash = [](const char* text) { return hashOf(parseMeasurements(text, "file")); };
  std::set<uint64_t> hashes;
  const char* const files[] = {"",
                               "AllReduce Ring LL 1 2 1024 3",
                               "Reduce Ring LL 1 2 1024 3",
                               "AllReduce Direct LL 1 2 1024 3",
                               "AllReduce Ring Simple 1 2 1024 3",
                               "AllReduce Ring LL 2 2 1024 3",
                               "AllReduce Ring LL 1 4 1024 3",
                               "AllReduce Ring LL 1 2 1025 3",
                               "AllReduce Ring LL 1 2 1024 3.0001",
                               "SendReceive Direct LL 1 2 1024 3",
                               "Gather Direct LL 1 2 1024 3",
                               "SendReceive FIFO LL 1 2 1024 3",
                               "SendReceive Direct LL 1 2 1024 3.0001"};
  for (const char* file : files) hashes.insert(hash(file));
  EXPECT_EQ(hashes.size(), std::size(files));
  EXPECT_EQ(hash("# mine\nAllReduce ring ll 1 2 1024 3"), hash("AllReduce Ring LL 1 2 1024 3.0"));
}

TEST(Measured, NoSizeTakesLongerThanALargerOne) {
  std::vector<MeasuredPoint> points = {{1, 5}, {2, 3}, {4, 9}, {8, 4}, {16, 7}};
  limitToLargerSizes(points);
  const double expected[] = {3, 3, 4, 4, 7};
  for (size_t i = 0; i < points.size(); i++) EXPECT_EQ(points[i].timeUs, expected[i]) << i;
}

TEST(Measured, RefusesWhatIsNotALine) {
  struct Case {
    const char* text;
    const char* part;
  };
  const Case cases[] = {
      {"AllReduce Direct LL 1 2 1024", "has 6 words instead of 7"},
      {"\nAllToOne Direct LL 1 2 1024 2", "file:2: \"AllToOne\""},
      {"AllToOne Direct LL 1 2 1024 2", "Reduce, SendReceive, AllToAll, Gather"},
      {"AllToAll FIFO LL128 1 2 1024 2", "\"FIFO LL128\" is not a path"},
      {"AllToAll Ring LL 1 2 1024 2", "Use one of Direct LL, Direct LL128, FIFO LL, FIFO Simple"},
      {"Gather FIFO LL 1 2 1 2\ngather fifo ll 1 2 1 3", "file:2 repeats"},
      {"AllReduce Fast LL 1 2 1024 2", "Use one of Tree, Ring"},
      {"AllReduce Direct LL2 1 2 1024 2", "Use one of LL, LL128, Simple"},
      {"AllReduce Direct LL 0 2 1024 2", "from 1 to"},
      {"AllReduce Direct LL 1 1 1024 2", "from 2 to"},
      {"AllReduce Direct LL 1 2 1K 2", "\"1K\" is not a number"},
      {"AllReduce Direct LL 1 2 -1 2", "\"-1\" is not a number"},
      {"AllReduce Direct LL 1 2 1 0", "not a time"},
      {"AllReduce Direct LL 1 2 1 nan", "not a time"},
      {"AllReduce Direct LL 1 2 1 inf", "not a time"},
      {"AllReduce Direct LL 1 2 1 2\nAllReduce Direct LL 1 2 1 3", "repeats"}};
  for (const Case& wrong : cases) {
    expectRefused([&] { parseMeasurements(wrong.text, "file"); }, wrong.text, wrong.part);
  }
}

TEST(Measured, TimesAreLinearBetweenPoints) {
  const std::vector<MeasuredPoint> points = {{1000, 2}, {2000, 4}, {10'000, 8}};
  EXPECT_DOUBLE_EQ(measuredTime(points, 0), 2);
  EXPECT_DOUBLE_EQ(measuredTime(points, 1000), 2);
  EXPECT_DOUBLE_EQ(measuredTime(points, 1500), 3);
  EXPECT_DOUBLE_EQ(measuredTime(points, 6000), 6);
  EXPECT_DOUBLE_EQ(measuredTime(points, 10'000), 8);
  EXPECT_DOUBLE_EQ(measuredTime(points, 20'000), 13) << "on the line through the last two";
  EXPECT_DOUBLE_EQ(measuredTime({{1000, 4}}, 3000), 12) << "at the bandwidth of the only one";
  EXPECT_DOUBLE_EQ(measuredTime({{500, 5}, {1000, 4}}, 2000), 5) << "not free";
}

TEST(Measured, DirectAlgorithmsAreInterpolatedBetweenRanks) {
  const MeasuredTable& table = builtinMeasurements();
  const auto two = directOf(table, 2), three = directOf(table, 3), four = directOf(table, 4),
             eight = directOf(table, 8);
  ASSERT_EQ(three.size(), four.size());
  ASSERT_EQ(eight.size(), four.size());
  for (size_t i = 0; i < three.size(); i++) {
    EXPECT_DOUBLE_EQ(three[i].timeUs, (two[i].timeUs + four[i].timeUs) / 2);
    EXPECT_EQ(eight[i].bytes, four[i].bytes * 3 / 7) << "as much on each link";
    EXPECT_NEAR(eight[i].timeUs, four[i].timeUs + 4 * 0.17, 1e-9);
  }
  EXPECT_TRUE(directOf(table, 16, 2).empty()) << "nothing was measured on two nodes";
  // Rings are not all alike: other numbers of ranks say nothing.
  const MeasuredTable rings =
      parseMeasurements("AllReduce Ring LL 1 2 1024 3\nAllReduce Ring LL 1 4 1024 5", "file")
          .collectives;
  EXPECT_TRUE(pointsFor(rings, Operation::allReduce, Algorithm::ring, Protocol::ll, 1, 3).empty());
}

// What one number of ranks tells of others: the same traffic takes as long, and each rank a little.
TEST(Measured, OneDirectCurveIsScaledByTraffic) {
  const MeasuredTable table = parseMeasurements(
                                  "AllGather Direct LL 1 2 1024 3\nAllGather Direct LL 1 2 4096 4\n"
                                  "Broadcast Direct LL 1 2 1024 3\nBroadcast Direct LL 1 2 4096 4",
                                  "file")
                                  .collectives;
  const auto points = [&](Operation operation, int ranks) {
    return pointsFor(table, operation, Algorithm::direct, Protocol::ll, 1, ranks);
  };
  for (const Operation operation : {Operation::allGather, Operation::broadcast}) {
    const auto two = points(operation, 2), eight = points(operation, 8);
    ASSERT_EQ(two.size(), eight.size());
    for (size_t i = 0; i < two.size(); i++) {
      EXPECT_NEAR(
          static_cast<double>(eight[i].bytes) * linkTraffic(operation, Algorithm::direct, 8),
          static_cast<double>(two[i].bytes) * linkTraffic(operation, Algorithm::direct, 2), 8);
      EXPECT_NEAR(eight[i].timeUs, two[i].timeUs + 6 * 0.17, 1e-9);
    }
  }
}

// More ranks of a node have other traffic and more hops.
TEST(Measured, FifosAreScaledByTrafficAndHops) {
  struct Case {
    Operation operation;
    Algorithm algorithm;
    double traffic;  // of 8 ranks, as a multiple of that of 4
    int hops;        // more than with 4 ranks
  };
  for (const Case& of : {Case{Operation::allReduce, Algorithm::ring, 7.0 / 6, 8},
                         Case{Operation::allReduce, Algorithm::tree, 7.0 / 6, 8},
                         Case{Operation::allGather, Algorithm::ring, 7.0 / 6, 4},
                         Case{Operation::broadcast, Algorithm::ring, 1, 4}}) {
    for (const Protocol protocol : {Protocol::ll, Protocol::ll128, Protocol::simple}) {
      const auto four = fifoPoints(of.operation, of.algorithm, protocol, 4);
      const auto eight = fifoPoints(of.operation, of.algorithm, protocol, 8);
      ASSERT_GE(four.size(), 6u);
      ASSERT_EQ(eight.size(), four.size());
      const double hopUs = (eight[0].timeUs - four[0].timeUs) / of.hops;
      EXPECT_GT(hopUs, 1);
      EXPECT_LT(hopUs, 5);
      for (size_t i = 0; i < four.size(); i++) {
        EXPECT_NEAR(static_cast<double>(eight[i].bytes) * of.traffic,
                    static_cast<double>(four[i].bytes), 2);
        EXPECT_NEAR(eight[i].timeUs - four[i].timeUs, of.hops * hopUs, 1e-9);
        EXPECT_GE(four[i].timeUs, four[i > 0 ? i - 1 : 0].timeUs);
      }
    }
  }
  EXPECT_TRUE(fifoPoints(Operation::allGather, Algorithm::tree, Protocol::ll, 2).empty());
  EXPECT_TRUE(fifoPoints(Operation::allReduce, Algorithm::nvls, Protocol::simple, 2).empty());
}

TEST(Measured, AFileReplacesTheCurvesThatItHas) {
  const MeasuredTable file =
      parseMeasurements("AllReduce Direct LL 1 2 1024 9", "file").collectives;
  const MeasuredTable table = replaceCurves(builtinMeasurements(), file);
  EXPECT_EQ(directOf(table, 2).front().timeUs, 9);
  EXPECT_EQ(directOf(table, 4).size(), 1u) << "derived from the file's";
  EXPECT_EQ(replaceCurves(builtinMeasurements(), {}).size(), builtinMeasurements().size());
}

}  // namespace
}  // namespace unisono::tuning
