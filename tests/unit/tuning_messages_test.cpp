// SPDX-License-Identifier: Apache-2.0
#include "tuning/messages.h"

#include <gtest/gtest.h>

#include "tuning_testing.h"

// What messages are predicted to take, and up to which size a path is the faster one.
namespace unisono::tuning {
namespace {

using Kind = MessageLink::Kind;

constexpr uint64_t kKilo = 1 << 10, kMega = 1 << 20;

MessageTable tableOf(const std::string& lines) {
  return parseMeasurements(lines, "file").messages;
}

MessageLink nvlink(double gigabytes = 370) {
  return {
      .kind = Kind::gpuMemory, .gigabytes = gigabytes, .rankGigabytes = gigabytes, .nvlink = true};
}

MessageLoad loadOf(MessageOperation operation, int ranks, uint64_t bytes, int nodes = 1) {
  return {.operation = operation, .ranks = ranks, .nodes = nodes, .bytes = bytes};
}
MessageLoad exchange(uint64_t bytes, int ranks = 2) {
  return loadOf(MessageOperation::sendReceive, ranks, bytes);
}

double timeOf(const MessageLink& link, MessagePath path, const MessageLoad& load) {
  return messageTime({}, link, path, load).us;
}

TEST(MessageCost, InsideANodeTheTimesWereMeasured) {
  const MessageTime small = messageTime({}, nvlink(), MessagePath::directLl, exchange(4 * kKilo));
  EXPECT_DOUBLE_EQ(small.us, 2.12);
  EXPECT_TRUE(small.measured);
  EXPECT_DOUBLE_EQ(timeOf(nvlink(), MessagePath::directLl128, exchange(kMega)), 6.33);
  EXPECT_DOUBLE_EQ(timeOf(nvlink(), MessagePath::fifoSimple, exchange(16 * kMega)), 56.13);
  // A block of each rank: 1 MiB in all.
  const MessageLoad blocks = loadOf(MessageOperation::allToAll, 2, 512 * kKilo);
  EXPECT_DOUBLE_EQ(timeOf(nvlink(), MessagePath::directLl128, blocks), 4.4);
  EXPECT_EQ(timeOf(nvlink(), MessagePath::copyEngines, blocks), 0) << "never measured";
  // Where some ranks are joined by a network, also the others send small messages over FIFOs.
  EXPECT_DOUBLE_EQ(timeOf(nvlink(), MessagePath::fifoLl, exchange(kKilo)), 3.645);
  EXPECT_EQ(timeOf(nvlink(), MessagePath::directLl, exchange(0)), 0);
  EXPECT_EQ(timeOf(nvlink(), MessagePath::directLl, exchange(8, 1)), 0);
}

// The paths are tried in the order of their built-in times.
TEST(MessageCost, EachPathIsTheFastestWhereItIsTaken) {
  for (const uint64_t bytes : {kKilo, 64 * kKilo, 128 * kKilo}) {
    const double lines = timeOf(nvlink(), MessagePath::directLl, exchange(bytes));
    EXPECT_LT(lines, timeOf(nvlink(), MessagePath::directLl128, exchange(bytes)));
  }
  for (const uint64_t bytes : {512 * kKilo, kMega, 8 * kMega}) {
    const double wide = timeOf(nvlink(), MessagePath::directLl128, exchange(bytes));
    EXPECT_LT(wide, timeOf(nvlink(), MessagePath::fifoSimple, exchange(bytes)));
  }
}

TEST(MessageCost, OtherRanksAndOperationsHaveTheSameTrafficAsWhatWasMeasured) {
  // A gather of 8 ranks moves 7 blocks to the root, as that of 2 ranks moves 1 of seven times the
  // size.
  const double eight =
      timeOf(nvlink(), MessagePath::directLl128, loadOf(MessageOperation::gather, 8, 256 * kKilo));
  const double two = timeOf(nvlink(), MessagePath::directLl128,
                            loadOf(MessageOperation::gather, 2, 7 * 256 * kKilo));
  EXPECT_NEAR(eight, two + 6 * 0.17, 1e-9);
  // Over FIFOs only sends and receives were measured.
  EXPECT_NEAR(
      timeOf(nvlink(), MessagePath::fifoSimple, loadOf(MessageOperation::allToAll, 5, 16 * kMega)),
      timeOf(nvlink(), MessagePath::fifoSimple, exchange(64 * kMega)) + 3 * 0.17, 1e-9);
  // A rank that sends to the next one does not depend on how many do.
  EXPECT_EQ(timeOf(nvlink(), MessagePath::directLl, exchange(kKilo, 8)),
            timeOf(nvlink(), MessagePath::directLl, exchange(kKilo, 2)));
}

TEST(MessageCost, SlowerLinksTakeLonger) {
  const MessageLoad load = exchange(64 * kMega);
  const double usual = timeOf(nvlink(), MessagePath::fifoSimple, load);
  EXPECT_EQ(timeOf(nvlink(400), MessagePath::fifoSimple, load), usual)
      << "faster ones are not credited";
  const double bytes = 64.0 * kMega;
  EXPECT_NEAR(timeOf(nvlink(90), MessagePath::fifoSimple, load) - usual,
              bytes / 1000 * (1.0 / 90 - 1.0 / 360), 1e-6);
  MessageLink pci{.kind = Kind::gpuMemory, .gigabytes = 24, .rankGigabytes = 24};
  const double slow = timeOf(pci, MessagePath::fifoSimple, load);
  EXPECT_GT(slow, bytes / 24 / 1000);
  // Lines have twice the bytes of their data.
  const double pciLines = timeOf(pci, MessagePath::directLl, exchange(256 * kKilo));
  EXPECT_NEAR(pciLines - timeOf(nvlink(), MessagePath::directLl, exchange(256 * kKilo)),
              1 + 2 * 256.0 * kKilo / 1000 / 24, 1e-6);
  // Links of their own to each peer carry several messages at once.
  MessageLink mesh = nvlink(25);
  mesh.rankGigabytes = 75;
  const MessageLoad toThree = loadOf(MessageOperation::allToAll, 4, 64 * kMega);
  EXPECT_LT(timeOf(mesh, MessagePath::fifoSimple, toThree),
            0.5 * timeOf(nvlink(25), MessagePath::fifoSimple, toThree));
}

// As docs/results/2026-11-23-clusters.md measured them, within a third.
TEST(MessageCost, HostMemoryAndSocketsFollowTheMeasurements) {
  struct Case {
    MessagePath path;
    uint64_t bytes;
    int channels;
    double hostUs, socketUs;
  };
  constexpr MessagePath kLl = MessagePath::fifoLl, kSimple = MessagePath::fifoSimple;
  for (const Case& of :
       {Case{kLl, 64, 1, 7.86, 19.8}, Case{kLl, 512, 1, 7.97, 20.9}, Case{kLl, 4096, 1, 11, 32.4},
        Case{kSimple, 64, 1, 11.8, 26}, Case{kSimple, 4096, 1, 12.2, 24.8},
        Case{kSimple, 32 * kKilo, 1, 15, 36.9}, Case{kSimple, 256 * kKilo, 4, 24.5, 126},
        Case{kSimple, 2 * kMega, 16, 97, 953}, Case{kSimple, 16 * kMega, 16, 563, 9109},
        Case{kSimple, 128 * kMega, 16, 3683, 58390}}) {
    MessageLoad load = exchange(of.bytes);
    load.channels = of.channels;
    const MessageLink host{.kind = Kind::hostMemory, .gigabytes = 36, .rankGigabytes = 36};
    EXPECT_NEAR(timeOf(host, of.path, load) / of.hostUs, 1, 0.34) << of.bytes;
    MessageLink sockets{.kind = Kind::network, .sockets = true};
    EXPECT_NEAR(timeOf(sockets, of.path, load) / of.socketUs, 1, 0.34) << of.bytes;
    EXPECT_FALSE(messageTime({}, host, of.path, load).measured);
  }
}

TEST(MessageCost, NetworksHaveALatencyAndTheBandwidthOfTheirPorts) {
  MessageLink port{.kind = Kind::network, .gigabytes = 48, .rankGigabytes = 48};
  const auto at = [&](MessagePath path, uint64_t bytes) {
    return timeOf(port, path, loadOf(MessageOperation::sendReceive, 16, bytes, 2));
  };
  const double first = at(MessagePath::fifoSimple, kMega);
  EXPECT_NEAR(at(MessagePath::fifoSimple, 2 * kMega) - first, 1.0 * kMega / 48 / 1000, 1e-6);
  EXPECT_LT(at(MessagePath::fifoLl, 64), at(MessagePath::fifoSimple, 64));
  EXPECT_EQ(at(MessagePath::directLl, 64), 0) << "only inside a node";
  port.networkUs = 5;
  EXPECT_NEAR(at(MessagePath::fifoSimple, kMega) - first, 10, 1e-9) << "and flushes";
  // Every rank sends to the 8 of the other node, the root of a gather receives from them.
  const auto eight = [&](MessageOperation operation) {
    return timeOf(port, MessagePath::fifoSimple, loadOf(operation, 16, kMega, 2));
  };
  EXPECT_EQ(eight(MessageOperation::gather), at(MessagePath::fifoSimple, 8 * kMega));
  port.rankGigabytes = 12;  // shared by 4 ranks
  EXPECT_NEAR(
      eight(MessageOperation::allToAll),
      at(MessagePath::fifoSimple, kMega) + 8.0 * kMega / 12 / 1000 - 1.0 * kMega / 12 / 1000, 1e-6);
  MessageLink unknown{.kind = Kind::network};
  EXPECT_EQ(timeOf(unknown, MessagePath::fifoSimple, exchange(kMega)), 0);
}

TEST(MessageCost, FewChannelsLimitTheBandwidth) {
  const MessageLink host{.kind = Kind::hostMemory, .gigabytes = 50, .rankGigabytes = 50};
  MessageLoad load = exchange(64 * kMega);
  const double one = timeOf(host, MessagePath::fifoSimple, load);
  load.channels = 2;
  const double two = timeOf(host, MessagePath::fifoSimple, load);
  EXPECT_NEAR(one / two, 2, 0.01);
  load.channels = 16;
  EXPECT_GT(timeOf(host, MessagePath::fifoSimple, load), 64.0 * kMega / 50 / 1000);
}

TEST(MessageCost, WhatTheUserMeasuredComesFirst) {
  const MessageTable table = tableOf(
      "SendReceive Direct LL 1 2 1024 9\n"
      "Gather FIFO Simple 2 16 1048576 77");
  const auto at = [&](const MessageLink& link, MessagePath path, const MessageLoad& load) {
    return messageTime(table, link, path, load);
  };
  EXPECT_DOUBLE_EQ(at(nvlink(90), MessagePath::directLl, exchange(kKilo)).us, 9)
      << "on these links";
  EXPECT_DOUBLE_EQ(at(nvlink(), MessagePath::directLl, loadOf(MessageOperation::gather, 3, 512)).us,
                   9.17)
      << "derived from what was measured here";
  EXPECT_DOUBLE_EQ(at(nvlink(), MessagePath::directLl128, exchange(kMega)).us, 6.33);
  const MessageLink port{.kind = Kind::network, .gigabytes = 48, .rankGigabytes = 48};
  const MessageLoad gather = loadOf(MessageOperation::gather, 16, 64 * kKilo, 2);
  EXPECT_DOUBLE_EQ(at(port, MessagePath::fifoSimple, gather).us, 77);
  EXPECT_TRUE(at(port, MessagePath::fifoSimple, gather).measured);
  const MessageLoad more = loadOf(MessageOperation::gather, 24, 64 * kKilo, 3);
  EXPECT_FALSE(at(port, MessagePath::fifoSimple, more).measured) << "three nodes";
}

TEST(MessageCost, TheBorderIsWhereTheNextPathGetsFaster) {
  const auto border = [](const std::string& lines, int nodes = 1, int ranks = 2) {
    return borderOf(tableOf(lines), MessagePath::directLl, MessagePath::directLl128, nodes, ranks);
  };
  const std::string lines =
      "SendReceive Direct LL 1 2 1024 2\nSendReceive Direct LL 1 2 4096 3\n"
      "SendReceive Direct LL 1 2 16384 9\n";
  const auto crossing = border(lines +
                               "SendReceive Direct LL128 1 2 1024 4\n"
                               "SendReceive Direct LL128 1 2 16384 8");
  ASSERT_TRUE(crossing.has_value());
  EXPECT_EQ(crossing->bytes, 4096u);
  EXPECT_FALSE(crossing->open);
  // Always faster, up to what both have.
  const auto always = border(lines +
                             "SendReceive Direct LL128 1 2 2048 4\n"
                             "SendReceive Direct LL128 1 2 8192 40");
  ASSERT_TRUE(always.has_value());
  EXPECT_EQ(always->bytes, 8192u);
  EXPECT_TRUE(always->open);
  // Never faster: nothing is known of smaller sizes.
  const auto never = border(lines +
                            "SendReceive Direct LL128 1 2 2048 1\n"
                            "SendReceive Direct LL128 1 2 8192 1.5");
  ASSERT_TRUE(never.has_value());
  EXPECT_EQ(never->bytes, 2047u);
  EXPECT_FALSE(never->open);
  EXPECT_FALSE(border(lines).has_value());
  EXPECT_FALSE(border(lines + "SendReceive Direct LL128 1 4 1024 4").has_value());
  EXPECT_FALSE(border(lines + "SendReceive Direct LL128 1 2 32768 4").has_value());
  EXPECT_FALSE(border(lines + "AllToAll Direct LL128 1 2 1024 4").has_value());
}

}  // namespace
}  // namespace unisono::tuning
