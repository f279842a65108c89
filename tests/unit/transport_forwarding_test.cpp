// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "support/seed.h"
#include "transport/net/forwarding.h"
#include "transport/net/group_ends.h"
#include "transport_testing.h"

namespace unisono::transport {
namespace {

using namespace std::chrono_literals;

// A connection that takes slots as long as it is not held up, and fails when it is told to.
struct Wire {
  std::atomic<bool> holds{false}, fails{false};
  std::atomic<uint64_t> sent{0};
};
class WireStream final : public Stream {
 public:
  WireStream(const StreamMemory& memory, Wire& wire) : Stream(memory), wire_(wire) {}
  StreamProgress progress() override {
    if (wire_.fails) failure_ = "was told to";
    // A slot that is filled after the wire was held up does not leave.
    if (!failure_.empty() || !isFilled(step_) || wire_.holds) return {};
    wire_.sent++;  // before the test can see that the slot has left
    release(step_++);
    return {.moved = true};
  }
  bool isPending() const override { return failure_.empty() && isBegun(step_); }

 private:
  Wire& wire_;
};

// A rank that forwards for one that sends, over a FIFO of Simple and one of LL.
class Pair {
 public:
  explicit Pair(int device, const Proxy::Client& functions = {{}, [](const Error&) {}, {}})
      : proxy_(Proxy::ofDevice(device)), forwarder_(std::make_shared<Forwarder>(proxy_)) {
    const std::vector<FifoMemory::Shape> shapes = {{kSlotBytes, device::Protocol::simple, false},
                                                   {kSlotBytes, device::Protocol::ll, false}};
    auto memory = std::make_unique<FifoMemory>(runtime::Runtime::get(), shapes, kSlots, 0, nullptr,
                                               FifoMemory::User::otherRank);
    for (const memory::Block& block : memory->blocks()) blocks_.push_back(block.address);
    const FifoMemory& owned = *memory;
    const uint64_t client =
        forwarder_->add(std::move(memory), functions, [this]() -> bool { return senderHasEnded; });
    for (size_t fifo = 0; fifo < 2; fifo++) {
      proxy_.addStream(client, std::make_unique<WireStream>(owned.streamOf(fifo), wire),
                       {1, {5}, "to 192.0.2.1:80 over eth7 for rank 0 (PXN)"});
    }
    sends.add(blocks_, {device::Protocol::simple, device::Protocol::ll}, kSlots);
  }

  // What the kernel of the sender does for a message without data.
  void put() {
    const device::Fifo fifo = FifoMemory::makeFifo(blocks_, 0);
    std::atomic_ref(fifo.tail[device::kReportsWord + steps_ % kSlots]).store(0);
    std::atomic_ref(*fifo.tail).store(++steps_, std::memory_order_release);
  }
  void putLines() {
    const device::Fifo fifo = FifoMemory::makeFifo(blocks_, 1);
    std::atomic_ref(fifo.tail[device::kReportsWord + lineSteps_ % kSlots])
        .store(device::packLineReport(lineSteps_, 0), std::memory_order_release);
    lineSteps_++;
  }
  uint64_t messages() const { return steps_ + lineSteps_; }
  Forwarder& forwarder() { return *forwarder_; }
  // Whether all that was put leaves soon.
  bool leaves() const {
    return isSoon([this] { return sends.isDrained(); });
  }
  bool isOverSoon() {
    return isSoon([this] { return forwarder_->isOver(); });
  }
  void becomeIdle() {
    EXPECT_TRUE(sends.noteIdle([] { return true; }));
  }

  Wire wire;
  ForwardedSends sends;
  std::atomic<bool> senderHasEnded{false};  // its process

 private:
  template <typename IsTrue>
  static bool isSoon(IsTrue isTrue) {
    for (const auto begin = std::chrono::steady_clock::now(); !isTrue();) {
      if (std::chrono::steady_clock::now() - begin > 5s) return false;
      std::this_thread::yield();
    }
    return true;
  }

  Proxy& proxy_;
  std::vector<std::byte*> blocks_;
  uint64_t steps_ = 0, lineSteps_ = 0;
  std::shared_ptr<Forwarder> forwarder_;  // ends before what its streams use
};

// Its proxy sleeps without a limit whenever the sender is idle. The kernel may store long after the
// launch, and before it is noted.
TEST(Forwarding, WakesTheForwarder) {
  Pair pair(5);
  for (int i = 0; i < 40; i++) {
    std::this_thread::sleep_for(i % 4 * 1ms);  // the proxy falls asleep, or is about to
    if (i % 3 == 0) i % 2 == 0 ? pair.put() : pair.putLines();
    pair.sends.noteLaunch();
    if (i % 3 == 1) std::this_thread::sleep_for(3ms);
    pair.put();
    if (i % 2 == 0) pair.putLines();
    ASSERT_TRUE(pair.leaves()) << i;
    EXPECT_FALSE(pair.sends.noteIdle([] { return false; }));
    if (i % 4 == 1) std::this_thread::sleep_for(3ms);
    pair.putLines();
    ASSERT_TRUE(pair.leaves()) << i;
    EXPECT_EQ(pair.wire.sent, pair.messages());
    pair.becomeIdle();
  }
  pair.sends.end(ForwardingPage::inOrder);
}

TEST(Forwarding, IsDrainedWhenEverythingHasLeft) {
  for (const bool lines : {true, false}) {
    Pair pair(5);
    EXPECT_TRUE(pair.sends.isDrained());
    pair.wire.holds = true;
    lines ? pair.putLines() : pair.put();
    EXPECT_FALSE(pair.sends.isDrained());
    pair.sends.noteLaunch();
    std::this_thread::sleep_for(2ms);
    EXPECT_FALSE(pair.sends.isDrained());
    pair.wire.holds = false;
    EXPECT_TRUE(pair.leaves());
    pair.sends.end(ForwardingPage::inOrder);
  }
}

// Until the sender has ended, and what it has put has left.
TEST(Forwarding, OutlivesTheCommunicator) {
  Pair pair(5);
  pair.forwarder().leaveCommunicator();
  EXPECT_FALSE(pair.forwarder().isOver());
  std::this_thread::sleep_for(3ms);
  pair.sends.noteLaunch();
  pair.put();
  EXPECT_TRUE(pair.leaves());
  pair.wire.holds = true;
  pair.put();
  pair.becomeIdle();
  EXPECT_FALSE(pair.forwarder().isOver());
  pair.sends.end(ForwardingPage::inOrder);
  EXPECT_FALSE(pair.forwarder().isOver()) << "a slot has not left";
  pair.wire.holds = false;
  EXPECT_TRUE(pair.isOverSoon());
  EXPECT_EQ(pair.wire.sent, 2u);
}

TEST(Forwarding, IsOverWhenTheSenderAborts) {
  Pair pair(5);
  pair.forwarder().leaveCommunicator();
  pair.wire.holds = true;
  pair.put();
  EXPECT_FALSE(pair.forwarder().isOver());
  pair.sends.end(ForwardingPage::byAbort);
  EXPECT_TRUE(pair.forwarder().isOver());
}

// What is left in its FIFOs may have been filled in part.
TEST(Forwarding, IsOverWhenTheProcessOfTheSenderHasEnded) {
  Pair pair(5);
  pair.forwarder().leaveCommunicator();
  pair.wire.holds = true;
  pair.put();
  EXPECT_FALSE(pair.forwarder().isOver());
  pair.senderHasEnded = true;
  EXPECT_TRUE(pair.isOverSoon());
}

// As long as the communicator is there, it learns of failures.
TEST(Forwarding, ReportsFailures) {
  std::atomic<int> failures = 0;
  std::string text;
  const Proxy::Client functions{{},
                                [&](const Error& error) {
                                  text = error.what();
                                  failures++;
                                },
                                {}};
  {
    Pair pair(5, functions);
    pair.sends.noteLaunch();
    pair.wire.fails = true;
    while (failures == 0) std::this_thread::sleep_for(1ms);
    for (const char* part : {"rank 1", "peer 5", "for rank 0 (PXN) failed: was told to"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
  Pair pair(5, functions);
  pair.forwarder().leaveCommunicator();
  pair.sends.noteLaunch();
  pair.wire.fails = true;
  EXPECT_TRUE(pair.isOverSoon());
  EXPECT_EQ(failures, 1);
}

// Both ends and the forwarders find the same groups: each channel once, on the receiver's port
// where somebody sends through it, and else through the sender's own.
TEST(Forwarding, DividesMessagesAlikeOnAllRanks) {
  std::mt19937_64 random(test::seed());
  const auto below = [&](int limit) {
    return static_cast<int>(random() % static_cast<uint64_t>(limit));
  };
  for (int round = 0; round < 50; round++) {
    constexpr int kOfHost = 4, kRanks = 3 * kOfHost;
    std::vector<PeerPlace> places;
    for (int rank = 0; rank < kRanks; rank++) {
      PeerPlace place{1, rank % kOfHost, 0, static_cast<uint64_t>(rank / kOfHost)};
      for (int i = below(4); i > 0; i--) place.messagePorts.push_back(below(6));
      for (int port = below(6); port > 0; port--) {
        const int first = rank / kOfHost * kOfHost;
        place.messageForwarders.push_back(below(3) == 0 ? -1 : first + below(kOfHost));
      }
      places.push_back(std::move(place));
    }
    plan::CommConfig config{};
    config.ranks = kRanks;
    config.channelsPerPeer = config.remoteChannelsPerPeer = 1 << below(4);
    config.peerSlots = {4096, round % 2 == 0 ? 0u : 512u};
    for (int sender = 0; sender < kRanks; sender++) {
      for (int receiver = 0; receiver < kRanks; receiver++) {
        const auto& from = places[static_cast<size_t>(sender)];
        const auto& to = places[static_cast<size_t>(receiver)];
        const auto groupsOf = [&](int rank) {
          config.rank = rank;
          return groupsForMessages(config, places, sender, receiver);
        };
        const auto atSender = groupsOf(sender), atReceiver = groupsOf(receiver);
        std::set<int> channels;
        std::set<uint64_t> tags;
        ASSERT_EQ(atSender.size(), atReceiver.size());
        for (size_t g = 0; g < atSender.size(); g++) {
          const ConnectionGroup &out = atSender[g], &in = atReceiver[g];
          EXPECT_EQ(out.channels, in.channels);
          EXPECT_EQ(out.forwarder, in.forwarder);
          EXPECT_TRUE(tags.insert(groupTag(out, false)).second);
          EXPECT_EQ(groupTag(out, false), groupTag(in, false));
          EXPECT_EQ(out.fifos.size(), round % 2 == 0 ? 1u : 2u);
          const int sends = out.forwarder < 0 ? sender : out.forwarder;
          EXPECT_EQ(out.ports, groupsOf(sends)[g].ports);
          for (size_t i = 0; i < out.channels.size(); i++) {
            const auto channel = static_cast<size_t>(out.channels[i]);
            EXPECT_TRUE(channels.insert(out.channels[i]).second);
            const int port =
                to.messagePorts.empty() ? -1 : to.messagePorts[channel % to.messagePorts.size()];
            EXPECT_EQ(in.ports[i], port);
            const bool isAligned = from.host != to.host && port >= 0 &&
                                   port < static_cast<int>(from.messageForwarders.size()) &&
                                   from.messageForwarders[static_cast<size_t>(port)] >= 0;
            const int through =
                isAligned ? from.messageForwarders[static_cast<size_t>(port)] : sender;
            EXPECT_EQ(sends, through);
            if (isAligned) {
              EXPECT_EQ(out.ports[i], port);
            } else if (!from.messagePorts.empty()) {
              EXPECT_EQ(out.ports[i], from.messagePorts[channel % from.messagePorts.size()]);
            } else {
              EXPECT_EQ(out.ports[i], -1);
            }
          }
        }
        EXPECT_EQ(static_cast<int>(channels.size()), config.channelsPerPeer);
      }
    }
  }
}

}  // namespace
}  // namespace unisono::transport
