// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/settings.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/unique_id.h"
#include "memory/arena.h"
#include "memory/mapping_cache.h"
#include "runtime/runtime.h"
#include "transport/block_exchange.h"
#include "transport/net/group_ends.h"
#include "transport/net/message_forwarder.h"
#include "transport/net/network_driver.h"
#include "transport_testing.h"

namespace unisono::transport {
namespace {

using namespace std::chrono_literals;

// Ranks 0 to 2 are on one host, where 1 and 2 forward what 0 sends, and 3 and 4 on another one.
// Messages have two channels: the first one goes through rank 1 and port 2, the second one through
// rank 2 and port 3.
constexpr int kRanks = 5, kSender = 0, kChannels = 2;

// What arrives through the network, by receiver and channel.
struct Air {
  std::mutex mutex;
  std::set<int> accepting;                             // receivers
  std::string fault;                                   // of every attempt to connect
  std::map<int, int> attempts;                         // by receiver
  std::map<std::pair<int, int>, std::string> arrived;  // by receiver and port

  template <typename Use>
  auto locked(Use use) {
    const std::lock_guard lock(mutex);
    return use(*this);
  }
};

class AirStream final : public Stream {
 public:
  AirStream(const StreamMemory& memory, Air& air, std::pair<int, int> to)
      : Stream(memory), air_(air), to_(std::move(to)) {}
  StreamProgress progress() override {
    if (!isFilled(step_)) return {};
    const auto* data = reinterpret_cast<const char*>(memory_.slot(step_));
    air_.locked([&](Air& air) { air.arrived[to_].append(data, filledBytes(step_)); });
    release(step_++);
    return {.moved = true};
  }
  bool isPending() const override { return isBegun(step_); }

 private:
  Air& air_;
  const std::pair<int, int> to_;
};

class AirNetwork final : public Network {
 public:
  explicit AirNetwork(Air& air) : air_(air) {}
  std::vector<std::byte> listen(const NetworkGroup&) override { return {}; }
  std::vector<NetworkConnection> connect(const NetworkGroup&, std::span<const std::byte>) override {
    throw internalError("A forwarder waits for nobody");
  }
  std::vector<NetworkConnection> accept(const NetworkGroup&) override { return {}; }
  bool tryConnect(const NetworkGroup& group, std::span<std::byte> offer,
                  std::vector<NetworkConnection>& connections) override {
    int receiver = -1;
    if (offer.size() != sizeof(receiver))
      throw internalError("{} bytes are no offer", offer.size());
    std::memcpy(&receiver, offer.data(), sizeof(receiver));
    const std::lock_guard lock(air_.mutex);
    air_.attempts[receiver]++;
    if (!air_.fault.empty()) throw Error(ErrorCode::systemError, air_.fault);
    if (!air_.accepting.contains(receiver)) return false;
    for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
      connections.push_back({std::make_unique<AirStream>(group.memory->streamOf(fifo), air_,
                                                         std::pair(receiver, group.ports[fifo])),
                             "through the air", ""});
    }
    return true;
  }

 private:
  Air& air_;
};

class AirDriver final : public NetworkDriver {
 public:
  explicit AirDriver(Air& air) : air_(air) {}
  std::string name() const override { return "Air"; }
  std::unique_ptr<Network> makeNetwork(const TransportContext&) const override {
    return std::make_unique<AirNetwork>(air_);
  }

 private:
  Air& air_;
};

// What a rank has of its communicator.
class Member {
 public:
  Member(Air& air, std::unique_ptr<bootstrap::Bootstrap> made) : bootstrap(std::move(made)) {
    config.rank = bootstrap->rank();
    config.ranks = kRanks;
    config.channelsPerPeer = config.remoteChannelsPerPeer = kChannels;
    config.peerSlots = {kSlotBytes, 0};
    for (int rank = 0; rank < kRanks; rank++) {
      const auto number = static_cast<uint64_t>(rank);
      places.push_back({1, rank, number, rank < 3 ? 1u : 2u});
      if (rank < 3) places.back().messageForwarders = {-1, -1, 1, 2};
      places.back().messagePorts = {2, 3};
    }
    options.network = std::make_shared<AirDriver>(air);
    options.isIdle = [] { return false; };
    options.fail = [this](const Error& error) {
      const std::lock_guard lock(mutex_);
      failure_ = error.what();
    };
    options.hasLeft = [this](int) -> bool { return othersHaveLeft; };
    options.hasEnded = [this](int rank) -> bool { return rank == kSender && senderHasEnded; };
  }

  // Begins to forward.
  void forward() {
    Proxy& proxy = Proxy::ofDevice(config.rank);
    forwarder = std::make_shared<Forwarder>(proxy);
    messages = std::make_unique<MessageForwarder>(context, proxy, *forwarder);
  }
  ConnectionGroup groupOf(int receiver, int through) const {
    for (ConnectionGroup& group : groupsForMessages(config, places, kSender, receiver)) {
      if (group.forwarder == through) return group;
    }
    throw internalError("Rank {} forwards nothing to rank {}", through, receiver);
  }
  // Of a receiver: tells a forwarder where it listens.
  void tell(int through, uint32_t slots = kSlots) {
    const int rank = config.rank;
    const ConnectionGroup group = groupOf(rank, through);
    const auto memory = memoryOf(context, group);
    TransportContext other{context.runtime, context.bootstrap, context.arena,
                           context.blocks,  context.config,    slots,
                           context.places,  context.links,     context.options};
    MessageForwarder::tell(
        context, group,
        packOffer(other, endsOf(context, group, *memory), std::as_bytes(std::span(&rank, 1))));
  }
  // Of the sender: what it sends through a forwarder, once that is connected.
  void borrow(int receiver, int through) {
    const ConnectionGroup group = groupOf(receiver, through);
    fifos[{receiver, through}] =
        MessageForwarder::borrow(context, group, group.channels.size() + 1);
  }
  void put(int receiver, int through, const std::string& text) {
    const std::vector<std::byte*>& lent = fifos.at({receiver, through});
    const device::Fifo fifo = FifoMemory::makeFifo(lent, 0);
    std::memcpy(fifo.slots, text.data(), text.size());
    std::atomic_ref(fifo.tail[device::kReportsWord]).store(text.size());
    std::atomic_ref(*fifo.tail).store(1, std::memory_order_release);
    sends.add(lent, {device::Protocol::simple}, kSlots);
    sends.noteLaunch();
  }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  std::unique_ptr<bootstrap::Bootstrap> bootstrap;
  plan::CommConfig config{};
  std::vector<PeerPlace> places;
  const PeerLinks links;
  TransportOptions options;
  memory::Arena arena{runtime::Runtime::get(), 0, 1 << 16};
  memory::MappingCache mappings{runtime::Runtime::get(), 0};
  const TransportContext context{
      runtime::Runtime::get(), *bootstrap, arena, blocks, config, kSlots, places, links, options};
  BlockExchange blocks{*bootstrap, mappings, context};
  std::atomic<bool> othersHaveLeft{false}, senderHasEnded{false};
  ForwardedSends sends;
  std::map<std::pair<int, int>, std::vector<std::byte*>> fifos;  // by receiver and forwarder
  std::shared_ptr<Forwarder> forwarder;
  std::unique_ptr<MessageForwarder> messages;

 private:
  std::mutex mutex_;
  std::string failure_;
};

class MessageForwarders : public ::testing::Test {
 protected:
  MessageForwarders() {
    Settings settings;
    settings.socketInterface = "lo";
    settings.socketFamily = "AF_INET";
    const bootstrap::UniqueId id = bootstrap::createUniqueId(settings);
    std::vector<std::thread> threads;
    std::array<std::unique_ptr<bootstrap::Bootstrap>, kRanks> ends;
    for (int rank = 0; rank < kRanks; rank++) {
      threads.emplace_back([&, rank] {
        auto& end = ends[static_cast<size_t>(rank)];
        end = bootstrap::Bootstrap::connect(id, rank, kRanks, settings);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& end : ends) members_.push_back(std::make_unique<Member>(air_, std::move(end)));
    for (const int rank : {1, 2}) member(rank).forward();
  }
  ~MessageForwarders() override {
    member(kSender).sends.end(ForwardingPage::byAbort);
    for (const auto& member : members_) {
      member->messages.reset();
      member->forwarder.reset();
    }
  }

  Member& member(int rank) { return *members_[static_cast<size_t>(rank)]; }
  Member& sender() { return member(kSender); }
  void ask(int receiver, int forwarder) {
    MessageForwarder::ask(sender().context, sender().groupOf(receiver, forwarder));
  }
  void accept(int receiver) {
    air_.locked([&](Air& air) { air.accepting.insert(receiver); });
  }
  int attempts(int receiver) {
    return air_.locked([&](Air& air) { return air.attempts[receiver]; });
  }
  template <typename IsTrue>
  static void waitUntil(const char* what, IsTrue isTrue) {
    for (const auto begin = std::chrono::steady_clock::now(); !isTrue();) {
      if (std::chrono::steady_clock::now() - begin > 20s) throw std::runtime_error(what);
      std::this_thread::sleep_for(1ms);
    }
  }
  void awaitConnection(int receiver, int forwarder) {
    auto borrowed = std::async(std::launch::async, [&] { sender().borrow(receiver, forwarder); });
    if (borrowed.wait_for(10s) != std::future_status::ready) {
      member(forwarder).bootstrap->fail("The sender waits for ever");
    }
    borrowed.get();
  }
  // Sends something over a connection.
  void expectToSend(int receiver, int forwarder) {
    const std::string text = fmt::format("to rank {} through rank {}", receiver, forwarder);
    sender().put(receiver, forwarder, text);
    const auto arrived = [&] {
      return air_.locked([&](Air& air) { return air.arrived[{receiver, forwarder + 1}]; });
    };
    waitUntil("nothing arrives", [&] { return !arrived().empty(); });
    EXPECT_EQ(arrived(), text);
  }
  void expectConnected(int receiver, int forwarder) {
    awaitConnection(receiver, forwarder);
    expectToSend(receiver, forwarder);
  }
  // Waits until the proxy of a rank has done all that it was woken for.
  static void waitUntilAsleep(int rank) {
    const auto sleeps = std::make_shared<std::atomic<int>>(0);
    Proxy& proxy = Proxy::ofDevice(rank);
    const uint64_t client = proxy.add({[] { return true; },
                                       [](const Error&) {},
                                       {},
                                       [sleeps](ProxyActivity activity) {
                                         if (activity == ProxyActivity::sleeps) ++*sleeps;
                                       }});
    const int before = *sleeps;
    proxy.wake();
    waitUntil("the proxy stays awake", [&] { return *sleeps > before; });
    proxy.remove(client);
  }

  Air air_;
  std::vector<std::unique_ptr<Member>> members_;
};

// Sender and receiver call in any order, and a receiver that does not accept holds up no other one.
TEST_F(MessageForwarders, ConnectWhatBothEndsHaveAskedFor) {
  accept(4);
  member(3).tell(1);
  ask(3, 1);  // rank 3 does not accept yet
  waitUntil("no attempt", [&] { return attempts(3) > 0; });
  ask(4, 1);
  member(4).tell(1);
  expectConnected(4, 1);
  ask(4, 2);
  member(4).tell(2);
  expectConnected(4, 2);
  accept(3);
  expectConnected(3, 1);
  const int before = attempts(3);
  member(3).tell(2);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(attempts(3), before) << "for a sender that has not asked";
  ask(3, 2);
  expectConnected(3, 2);
  for (const auto& each : members_) EXPECT_EQ(each->failure(), "");
}

// No launch follows that would tell the other forwarder.
TEST_F(MessageForwarders, AreWokenForASenderWhoseKernelsRunAlready) {
  accept(4);
  member(4).tell(1);
  ask(4, 1);
  expectConnected(4, 1);
  ask(4, 2);
  member(4).tell(2);
  awaitConnection(4, 2);
  waitUntilAsleep(2);
  expectToSend(4, 2);
}

TEST_F(MessageForwarders, EndWithTheProcessOfTheSender) {
  accept(3);
  ask(3, 1);
  member(3).tell(1);
  expectConnected(3, 1);
  const auto forwarder = member(1).forwarder;
  member(1).messages->close();
  forwarder->leaveCommunicator();
  EXPECT_FALSE(forwarder->isOver());
  member(1).senderHasEnded = true;
  waitUntil("it waits for the sender", [&] { return forwarder->isOver(); });
}

// While a receiver does not accept. What comes later is not for them.
TEST_F(MessageForwarders, CloseWithoutWaiting) {
  ask(3, 1);
  member(3).tell(1);
  waitUntil("no attempt", [&] { return attempts(3) > 0; });
  auto closed = std::async(std::launch::async, [&] { member(1).messages->close(); });
  EXPECT_EQ(closed.wait_for(10s), std::future_status::ready);
  accept(3);
  closed.get();
  const int before = attempts(3);
  ask(4, 1);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(attempts(3), before);
  EXPECT_EQ(member(1).failure(), "");
}

TEST_F(MessageForwarders, ReportWhyTheyDoNotConnect) {
  const auto expectFailure = [&](int forwarder, const std::vector<std::string>& parts) {
    waitUntil("no failure", [&] { return !member(forwarder).failure().empty(); });
    for (const std::string& part : parts) {
      EXPECT_NE(member(forwarder).failure().find(part), std::string::npos)
          << member(forwarder).failure();
    }
  };
  air_.locked([](Air& air) { air.fault = "there is no air"; });
  ask(3, 1);
  member(3).tell(1);
  expectFailure(1, {"there is no air"});
  // Both must use the same slots.
  ask(3, 2);
  member(3).tell(2, 2 * kSlots);
  expectFailure(2, {"Ranks 2 and 3 differ", "over Air with 4 slots, and over Air with 8"});
}

TEST_F(MessageForwarders, ServeTheTwoEndsOnly) {
  accept(3);
  member(3).tell(1);
  // Rank 4 speaks for the sender.
  MessageForwarder::ask(member(4).context, sender().groupOf(3, 1));
  waitUntil("no failure", [&] { return !member(1).failure().empty(); });
  EXPECT_NE(member(1).failure().find("Rank 4 asks for messages"), std::string::npos)
      << member(1).failure();
  EXPECT_EQ(attempts(3), 0);
}

TEST_F(MessageForwarders, ThatHaveLeftAreNamed) {
  member(1).messages->close();
  member(1).bootstrap.reset();
  sender().othersHaveLeft = true;
  try {
    ask(3, 1);
    sender().borrow(3, 1);
    ADD_FAILURE() << "it has left";
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const char* part : {"Rank 1 forwards messages of rank 0 to rank 3 (PXN)", "has left"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace unisono::transport
