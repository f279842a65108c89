// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/work.h"
#include "support/fake_net.h"
#include "support/seed.h"
#include "transport/net/fifo_memory.h"
#include "transport/net/line_slot.h"
#include "transport/net/plugin_stream.h"
#include "transport/net/proxy.h"
#include "transport/net/socket_stream.h"
#include "transport/transports.h"

namespace unisono::transport {
namespace {

using namespace std::chrono_literals;

// One end of a FIFO, as kernels see it.
class End {
 public:
  static constexpr uint32_t kSlots = 4, kSlotBytes = 5000;

  explicit End(uint32_t slotBytes = kSlotBytes) : slotBytes_(slotBytes) {}
  StreamMemory memory() { return {tail_, &head_, slots_.data(), kSlots, slotBytes_}; }
  uint64_t tail() { return std::atomic_ref(tail_[0]).load(std::memory_order_acquire); }
  uint64_t head() { return std::atomic_ref(head_).load(std::memory_order_acquire); }

  // What the sender's kernel does; returns false if there is no room.
  bool put(const std::vector<std::byte>& data) {
    if (head() + kSlots <= step_) return false;
    std::copy(data.begin(), data.end(), slot());
    std::atomic_ref(tail_[device::kReportsWord + step_ % kSlots]).store(data.size());
    std::atomic_ref(tail_[0]).store(++step_, std::memory_order_release);
    return true;
  }
  // What the receiver's kernel does with a slot whose size it knows.
  bool take(std::vector<std::byte>& data) {
    if (tail() <= step_) return false;
    std::copy_n(slot(), data.size(), data.begin());
    std::atomic_ref(head_).store(++step_, std::memory_order_release);
    return true;
  }

 private:
  std::byte* slot() { return slots_.data() + step_ % kSlots * slotBytes_; }

  const uint32_t slotBytes_;
  uint64_t tail_[device::kReportsWord + kSlots] = {};
  uint64_t head_ = 0;
  std::vector<std::byte> slots_ = std::vector<std::byte>(size_t{kSlots} * slotBytes_);
  uint64_t step_ = 0;  // of the kernel
};

// One end of a FIFO of protocol LL, as kernels see it.
class LineEnd {
 public:
  static constexpr uint32_t kSlots = 4, kLines = 40;

  StreamMemory memory() {
    return {report_,
            &head_,
            reinterpret_cast<std::byte*>(words_.data()),
            kSlots,
            kLines * kLineBytes,
            false,
            device::Protocol::ll};
  }
  bool hasRoom() const { return head() + kSlots > step_; }
  uint64_t head() const { return std::atomic_ref(const_cast<uint64_t&>(head_)).load(); }
  uint64_t step() const { return step_; }
  const uint64_t* slot(uint64_t step) const { return &words_[step % kSlots * 2 * kLines]; }

  // What the sender's kernel does: report and words, in any order.
  void report(uint32_t bytes) {
    std::atomic_ref(report_[device::kReportsWord + step_ % kSlots])
        .store(device::packLineReport(step_, bytes), std::memory_order_relaxed);
  }
  void store(size_t word, uint32_t data) {
    std::atomic_ref(words_[step_ % kSlots * 2 * kLines + word])
        .store(data | uint64_t{device::lineFlagOf(step_)} << 32, std::memory_order_release);
  }
  // What the receiver's kernel does. Whether a word is there.
  bool load(size_t word, uint32_t& data) {
    const uint64_t value =
        std::atomic_ref(words_[step_ % kSlots * 2 * kLines + word]).load(std::memory_order_acquire);
    data = static_cast<uint32_t>(value);
    return value >> 32 == device::lineFlagOf(step_);
  }
  void giveBack() { std::atomic_ref(head_).store(step_ + 1, std::memory_order_release); }
  void advance() { step_++; }

 private:
  uint64_t report_[device::kReportsWord + kSlots] = {};
  uint64_t head_ = 0;
  std::vector<uint64_t> words_ = std::vector<uint64_t>(size_t{2} * kLines * kSlots);
  uint64_t step_ = 0;  // of the kernel
};

struct Sockets {
  bootstrap::Socket sender, receiver;
};
Sockets connected() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
    throw systemError(errno, "socketpair");
  }
  return {bootstrap::Socket::adopt(UniqueDescriptor(pair[0])),
          bootstrap::Socket::adopt(UniqueDescriptor(pair[1]))};
}

// With lanes.
std::pair<StreamSockets, StreamSockets> connected(const LaneCounts& lanes) {
  Sockets first = connected();
  StreamSockets sender{std::move(first.sender), {}, lanes.threads};
  StreamSockets receiver{std::move(first.receiver), {}, lanes.threads};
  for (uint32_t i = 0; i < lanes.sockets; i++) {
    Sockets lane = connected();
    sender.lanes.push_back(std::move(lane.sender));
    receiver.lanes.push_back(std::move(lane.receiver));
  }
  return {std::move(sender), std::move(receiver)};
}

constexpr uint32_t kLargeSlot = 3 * SocketLanes::kMinPieceBytes + 1000;

std::vector<std::byte> dataOf(std::mt19937& random) {
  std::vector<std::byte> data(random() % 4 == 0 ? 0 : random() % (End::kSlotBytes + 1));
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

TEST(Streams, MoveSlotsOfAnySize) {
  std::mt19937 random(test::seed());
  End from, to;
  Sockets sockets = connected();
  SendStream send({std::move(sockets.sender)}, from.memory());
  ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
  std::vector<std::vector<std::byte>> sent;
  for (size_t taken = 0; taken < 1000;) {
    auto data = dataOf(random);
    if (from.put(data)) sent.push_back(std::move(data));
    if (random() % 2 == 0) send.progress();
    if (random() % 2 == 0) receive.progress();
    if (taken == sent.size()) continue;
    std::vector<std::byte> got(sent[taken].size());
    if (!to.take(got)) continue;
    ASSERT_EQ(got, sent[taken]) << "slot " << taken;
    taken++;
  }
  EXPECT_EQ(send.failure() + receive.failure(), "");
}

// The kernel reports a slot and stores its lines in any order; nothing is sent before all are
// there, and every line has arrived once the kernel of the receiver sees its flag.
TEST(Streams, MoveLines) {
  std::mt19937 random(test::seed());
  LineEnd from, to;
  Sockets sockets = connected();
  SendStream send({std::move(sockets.sender)}, from.memory());
  ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
  const auto progress = [&] {
    for (int i = 0; i < 2; i++) send.progress(), receive.progress();
  };
  std::vector<std::vector<uint32_t>> sent;
  for (size_t taken = 0; taken < 500;) {
    if (from.hasRoom() && random() % 2 == 0) {
      const uint32_t bytes = random() % 4 == 0 ? 0 : random() % (8 * LineEnd::kLines + 1);
      std::vector<uint32_t> data(device::occupiedBytesOf(device::Protocol::ll, bytes) /
                                 kLineDataBytes);
      std::vector<size_t> order(data.size() + 1);  // the last one is the report
      for (size_t i = 0; i < order.size(); i++) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      for (const size_t word : order) {
        if (random() % 20 == 0) progress();
        if (word == data.size()) {
          from.report(bytes);
        } else {
          from.store(word, data[word] = random());
        }
        if (word != order.back()) {
          EXPECT_LE(from.head(), from.step());
        }
      }
      sent.push_back(std::move(data));
      from.advance();
    }
    if (random() % 2 == 0) progress();
    if (taken == sent.size()) continue;
    bool here = true;
    for (size_t word = 0; here && word < sent[taken].size(); word++) {
      uint32_t data = 0;
      here = to.load(word, data);
      ASSERT_TRUE(!here || data == sent[taken][word]) << "word " << word << " of slot " << taken;
    }
    if (!here) continue;
    to.giveBack();
    to.advance();
    taken++;
  }
  EXPECT_EQ(send.failure() + receive.failure(), "");
}

TEST(Streams, SendNoLinesBeforeAllAreThere) {
  LineEnd from, to;
  Sockets sockets = connected();
  SendStream send({std::move(sockets.sender)}, from.memory());
  ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
  from.report(17);  // 3 lines
  uint32_t data = 0;
  for (const size_t word : {5, 0, 3, 1, 2, 4}) {
    for (int i = 0; i < 3; i++) send.progress(), receive.progress();
    EXPECT_TRUE(send.isPending());
    EXPECT_FALSE(to.load(0, data) || to.load(5, data));
    from.store(word, static_cast<uint32_t>(word));
  }
  for (int i = 0; i < 3; i++) send.progress(), receive.progress();
  EXPECT_FALSE(send.isPending());
  for (size_t word = 0; word < 6; word++) {
    EXPECT_TRUE(to.load(word, data));
    EXPECT_EQ(data, word);
  }
  // The first steps of a period clear the sender's slots.
  EXPECT_EQ(from.slot(0)[0] | from.slot(0)[5], 0u);
}

// Flags repeat after 2^31 steps.
TEST(Lines, HoldDataOfOneStep) {
  std::mt19937_64 random(test::seed());
  std::vector<uint64_t> slot(20);
  auto* const bytes = reinterpret_cast<std::byte*>(slot.data());
  std::vector<std::byte> data(72), got(72);
  for (const uint64_t step : {uint64_t{0}, uint64_t{5}, (uint64_t{1} << 31) - 1, uint64_t{1} << 31,
                              (uint64_t{1} << 32) - 1, uint64_t{1} << 32, random() >> 3}) {
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    packLines(data, bytes, step);
    EXPECT_EQ(countOpenLines(bytes, step, 9), 0u);
    EXPECT_EQ(countOpenLines(bytes, step, 10), 10u) << "of which the last was not made";
    for (const uint64_t other : {step + 1, step - 1, step + 4, step + (uint64_t{1} << 30)}) {
      EXPECT_EQ(countOpenLines(bytes, other, 9), 9u) << step << " and " << other;
      EXPECT_FALSE(device::isLineReportOf(device::packLineReport(step, 72), other));
    }
    EXPECT_TRUE(device::isLineReportOf(device::packLineReport(step, 72), step));
    unpackLines(bytes, got);
    EXPECT_EQ(got, data);
    slot[2 * (step % 9)] ^= uint64_t{1} << 32;  // one flag
    EXPECT_EQ(countOpenLines(bytes, step, 9), step % 9 + 1);
    clearLines(bytes, 160);
    EXPECT_EQ(countOpenLines(bytes, step, 9), 9u);
  }
}

// Slots that lanes carry are passed on in order, between small ones that they do not carry.
TEST(Streams, MoveLargeSlotsOverSeveralSockets) {
  std::mt19937 random(test::seed());
  for (const LaneCounts lanes : {LaneCounts{1, 1}, LaneCounts{2, 4}, LaneCounts{3, 3}}) {
    End from(kLargeSlot), to(kLargeSlot);
    auto [sender, receiver] = connected(lanes);
    SendStream send(std::move(sender), from.memory());
    ReceiveStream receive(std::move(receiver), to.memory());
    send.setWake([] {});
    receive.setWake([] {});
    std::vector<std::vector<std::byte>> sent;
    for (size_t taken = 0; taken < 60;) {
      std::vector<std::byte> data(random() % 3 == 0 ? 10 : random() % (kLargeSlot + 1));
      const uint32_t word = random();
      for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<std::byte>(word * i >> 7);
      if (from.put(data)) sent.push_back(std::move(data));
      if (random() % 2 == 0) send.progress();
      if (random() % 2 == 0) receive.progress();
      if (taken == sent.size()) continue;
      std::vector<std::byte> got(sent[taken].size());
      if (!to.take(got)) continue;
      ASSERT_TRUE(got == sent[taken]) << "slot " << taken << " of " << got.size() << " bytes";
      taken++;
    }
    EXPECT_EQ(send.failure() + receive.failure(), "");
  }
}

// Helper threads that wait for a socket end at once when the stream is destroyed.
TEST(Streams, EndWhileTheirSocketsAreFull) {
  End from(kLargeSlot), to(kLargeSlot);
  auto [sender, receiver] = connected({2, 2});
  {
    SendStream send(std::move(sender), from.memory());
    send.setWake([] {});
    while (from.put(std::vector<std::byte>(kLargeSlot))) {
    }
    for (int i = 0; i < 100; i++) send.progress();
    EXPECT_TRUE(send.isPending());
    EXPECT_EQ(send.failure(), "");
  }
  // Its pieces are missing, which is a failure and not an end.
  ReceiveStream receive(std::move(receiver), to.memory());
  receive.setWake([] {});
  while (receive.failure().empty()) receive.progress();
  EXPECT_LT(to.tail(), End::kSlots);
}

TEST(Streams, TellThatALaneHasFailed) {
  End from(kLargeSlot), to(kLargeSlot);
  auto [sender, receiver] = connected({2, 2});
  receiver.lanes[1].close();
  SendStream send(std::move(sender), from.memory());
  send.setWake([] {});
  while (send.failure().empty()) {
    from.put(std::vector<std::byte>(kLargeSlot));
    send.progress();
  }
  EXPECT_FALSE(send.isPending());
}

TEST(Lanes, AreAsManyAsTheSettingsAndTheCloudSay) {
  const auto counts = [](int64_t threads, int64_t sockets, std::string_view vendor) {
    const LaneCounts lanes = chooseLanes(threads, sockets, vendor);
    return std::pair(lanes.threads, lanes.sockets);
  };
  using Pair = std::pair<uint32_t, uint32_t>;
  EXPECT_EQ(counts(-2, -2, ""), Pair(0, 0));
  EXPECT_EQ(counts(-2, 4, "0x15b3"), Pair(0, 0));
  EXPECT_EQ(counts(3, -2, ""), Pair(3, 3));
  EXPECT_EQ(counts(0, 8, "0x1d0f"), Pair(0, 0));
  EXPECT_EQ(counts(-2, -2, "0x1d0f"), Pair(2, 16));
  EXPECT_EQ(counts(-2, -2, "0x1ae0"), Pair(4, 4));
  EXPECT_EQ(counts(-2, 2, "0x1ae0"), Pair(4, 8));
  EXPECT_EQ(counts(16, 16, ""), Pair(16, 64));
  EXPECT_EQ(counts(99, 1, ""), Pair(16, 16));
}

// The slots of the receiver are in memory of a GPU, as far as the plug-in knows.
TEST(PluginStreams, FlushWhatArrivesInMemoryOfAGpu) {
  std::mt19937 random(test::seed());
  ::setenv("FAKE_NET_POINTERS", "3", 1);
  ::setenv("FAKE_NET_LATE", "1", 1);
  const auto net = plugin::Net::open(testing::fakeNetPath(11), "", {77, -1});
  ASSERT_NE(net, nullptr);
  const plugin::NetFunctions& functions = net->functions();
  plugin::NetHandle handle;
  void *listener = nullptr, *sender = nullptr, *receiver = nullptr, *region = nullptr;
  ASSERT_EQ(functions.listen(net->context(), 0, handle, &listener), plugin::kSuccess);
  while (sender == nullptr || receiver == nullptr) {
    if (sender == nullptr) functions.connect(net->context(), -1, 0, handle, &sender);
    if (receiver == nullptr) functions.accept(listener, &receiver);
  }
  functions.closeListener(listener);
  End from, to;
  const StreamMemory slots = to.memory();
  ASSERT_EQ(functions.registerMemory(receiver, slots.slots, size_t{End::kSlots} * End::kSlotBytes,
                                     plugin::kDeviceMemory, &region),
            plugin::kSuccess);
  {
    PluginSendStream send(net, sender, from.memory());
    PluginReceiveStream receive(net, receiver, true, slots, region);
    for (int i = 0; i < 100; i++) {
      std::vector<std::byte> sent(1 + random() % End::kSlotBytes);
      for (std::byte& byte : sent) byte = static_cast<std::byte>(random());
      ASSERT_TRUE(from.put(sent));
      std::vector<std::byte> got(sent.size());
      while (!to.take(got) && send.failure().empty() && receive.failure().empty()) {
        send.progress();
        receive.progress();
      }
      ASSERT_EQ(got, sent) << "slot " << i << send.failure() << receive.failure();
      while (send.isPending()) send.progress();
    }
  }
  ::unsetenv("FAKE_NET_POINTERS");
  ::unsetenv("FAKE_NET_LATE");
}

TEST(Streams, StopWhenTheReceiverHasNoRoom) {
  End from, to;
  Sockets sockets = connected();
  SendStream send({std::move(sockets.sender)}, from.memory());
  ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
  for (uint32_t i = 0; i < End::kSlots; i++) ASSERT_TRUE(from.put({}));
  for (int i = 0; i < 10; i++) send.progress(), receive.progress();
  EXPECT_EQ(to.tail(), End::kSlots);
  EXPECT_FALSE(send.isPending());
  ASSERT_TRUE(from.put({std::byte{7}}));
  EXPECT_TRUE(send.isPending());
  for (int i = 0; i < 10; i++) send.progress(), receive.progress();
  EXPECT_FALSE(send.isPending());
  EXPECT_EQ(to.tail(), End::kSlots) << "the slot is in use";
  std::vector<std::byte> none, one(1);
  ASSERT_TRUE(to.take(none));
  for (int i = 0; i < 10; i++) receive.progress();
  for (uint32_t i = 1; i < End::kSlots; i++) ASSERT_TRUE(to.take(none));
  ASSERT_TRUE(to.take(one));
  EXPECT_EQ(one.front(), std::byte{7});
}

TEST(Streams, TellAnEndFromAFailure) {
  End from, to;
  {
    Sockets sockets = connected();
    ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
    { const SendStream ends({std::move(sockets.sender)}, from.memory()); }
    for (int i = 0; i < 3; i++) EXPECT_FALSE(receive.progress().waitsForSocket);
    EXPECT_EQ(receive.failure(), "");
  }
  {
    Sockets sockets = connected();
    ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
    sockets.sender.close();
    receive.progress();
    EXPECT_EQ(receive.failure(), "the peer closed it");
  }
  {
    Sockets sockets = connected();
    SendStream send({std::move(sockets.sender)}, from.memory());
    sockets.receiver.close();
    EXPECT_EQ(send.failure(), "");
    ASSERT_TRUE(from.put({}));
    send.progress();
    EXPECT_NE(send.failure(), "");
  }
  for (const SlotHeader& wrong : {SlotHeader{1, 0}, SlotHeader{0, End::kSlotBytes + 1}}) {
    Sockets sockets = connected();
    ReceiveStream receive({std::move(sockets.receiver)}, to.memory());
    sockets.sender.write(std::as_bytes(std::span(&wrong, 1)));
    receive.progress();
    EXPECT_NE(receive.failure(), "");
    EXPECT_EQ(to.tail(), 0u);
  }
}

// The thread sleeps while its client is idle, and moves data again once it is woken.
TEST(Proxies, MoveDataWhileTheirClientsAreBusy) {
  End from, to;
  Sockets sockets = connected();
  std::atomic<bool> idle = true;
  Proxy& proxy = Proxy::ofDevice(0);
  const uint64_t client = proxy.add({[&] { return idle.load(); }, [](const Error&) {}});
  proxy.addStream(
      client, std::make_unique<SendStream>(StreamSockets{std::move(sockets.sender)}, from.memory()),
      {0, {1}, "to b"});
  proxy.addStream(
      client,
      std::make_unique<ReceiveStream>(StreamSockets{std::move(sockets.receiver)}, to.memory()),
      {0, {1}, "to a"});
  for (int i = 0; i < 20; i++) {
    std::this_thread::sleep_for(i % 4 * 1ms);
    idle = false;
    std::vector<std::byte> data(100, static_cast<std::byte>(i)), got(100);
    ASSERT_TRUE(from.put(data));
    proxy.wake();
    while (!to.take(got)) std::this_thread::yield();
    EXPECT_EQ(got, data);
    while (!proxy.isDrained(client)) std::this_thread::yield();
    idle = true;
  }
  proxy.remove(client);
}

// While data of another connection move all the time.
TEST(Proxies, MoveDataOfConnectionsThatWereQuiet) {
  End fromEnds[2], toEnds[2];
  Proxy& proxy = Proxy::ofDevice(3);
  const uint64_t client = proxy.add({[] { return false; }, [](const Error&) {}});
  for (int i = 0; i < 2; i++) {
    Sockets sockets = connected();
    proxy.addStream(client,
                    std::make_unique<SendStream>(StreamSockets{std::move(sockets.sender)},
                                                 fromEnds[i].memory()),
                    {0, {1}, "to b"});
    proxy.addStream(client,
                    std::make_unique<ReceiveStream>(StreamSockets{std::move(sockets.receiver)},
                                                    toEnds[i].memory()),
                    {0, {1}, "to a"});
  }
  const auto move = [&](int i, uint8_t value) {
    const std::vector<std::byte> data(100, static_cast<std::byte>(value));
    std::vector<std::byte> got(100);
    ASSERT_TRUE(fromEnds[i].put(data));
    while (!toEnds[i].take(got)) std::this_thread::yield();
    EXPECT_EQ(got, data);
  };
  for (int round = 0; round < 5; round++) {
    for (int i = 0; i < 300; i++) move(0, static_cast<uint8_t>(i));
    move(1, static_cast<uint8_t>(round));
  }
  proxy.remove(client);
}

// The cores of the threads called `wanted`, as the system words them, by their numbers. Numbers say
// nothing about the order of starts: the system begins with low ones again after the highest.
std::map<int, std::string> coresOf(const std::string& wanted) {
  std::map<int, std::string> cores;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string line, name;
    while (std::getline(status, line)) {
      if (line.starts_with("Name:\t")) name = line.substr(6);
      if (name == wanted && line.starts_with("Cpus_allowed_list:\t")) {
        cores[std::stoi(task.path().filename())] = line.substr(19);
      }
    }
  }
  return cores;
}

TEST(Proxies, StayOnTheCoresThatTheyAreGiven) {
  cpu_set_t own, after;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  if (!CPU_ISSET(0, &own)) GTEST_SKIP() << "this process may not use core 0";
  const auto coresOfNew = [](int device, const char* wanted) {
    const auto before = coresOf("unisono-proxy");
    Proxy::ofDevice(device, wanted, false);
    auto now = before;
    while (now.size() == before.size()) now = coresOf("unisono-proxy");  // a thread names itself
    std::erase_if(now, [&](const auto& thread) { return before.contains(thread.first); });
    return now.begin()->second;
  };
  EXPECT_EQ(coresOfNew(1, "1"), "0");
  EXPECT_EQ(coresOfNew(2, "") == "0", CPU_COUNT(&own) == 1);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&own, &after)) << "only the proxy moves";
}

TEST(Lanes, KeepTheirThreadsOnTheCoresThatTheyAreGiven) {
  cpu_set_t own, after;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  if (!CPU_ISSET(0, &own)) GTEST_SKIP() << "this process may not use core 0";
  End from(kLargeSlot);
  auto [sender, receiver] = connected({2, 2});
  sender.cores = "1";
  const SendStream stream(std::move(sender), from.memory());
  std::map<int, std::string> threads;
  while (threads.size() < 2) threads = coresOf("unisono-socket");  // a thread names itself
  for (const auto& [thread, cores] : threads) EXPECT_EQ(cores, "0");
  ASSERT_EQ(::sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&own, &after)) << "only the threads move";
}

TEST(FifoMemories, CountWhatTheyHaveOnTheDevice) {
  const auto total = std::make_shared<std::atomic<uint64_t>>(100);
  const std::atomic<uint64_t>& bytes = *total;
  const FifoMemory::Shape onDevice{4096, device::Protocol::simple, true};
  {
    FifoMemory memory(runtime::Runtime::get(), {onDevice, {4096}, onDevice}, 8, 0, total);
    EXPECT_GE(bytes, 100u + 2 * 8 * 4096);
    memory.moveToHost(0);
    EXPECT_GE(bytes, 100u + 2 * 8 * 4096) << "the memory of both is one";
    memory.moveToHost(2);
    EXPECT_EQ(bytes, 100u);
    const FifoMemory second(runtime::Runtime::get(), {onDevice}, 8, 0, total);
    EXPECT_GT(bytes, 100u);
  }
  EXPECT_EQ(bytes, 100u);
  {
    const FifoMemory forwarded(runtime::Runtime::get(), {onDevice}, 8, 0, total,
                               FifoMemory::User::otherRank);
    EXPECT_GE(bytes, 100u + 8 * 4096);
  }
  EXPECT_EQ(bytes, 100u);
}

// As an abort does. Helper threads are in the middle of pieces.
TEST(Proxies, RemoveClientsWhoseDataMove) {
  for (int i = 0; i < 5; i++) {
    End from(kLargeSlot), to(kLargeSlot);
    auto [sender, receiver] = connected({2, 4});
    Proxy& proxy = Proxy::ofDevice(0);
    const Proxy::Client busy{[] { return false; }, [](const Error&) {}};
    const uint64_t sends = proxy.add(busy), receives = proxy.add(busy);
    proxy.addStream(sends, std::make_unique<SendStream>(std::move(sender), from.memory()),
                    {0, {1}, "to b"});
    proxy.addStream(receives, std::make_unique<ReceiveStream>(std::move(receiver), to.memory()),
                    {0, {1}, "to a"});
    const std::vector<std::byte> data(kLargeSlot);
    std::vector<std::byte> got(1);
    for (int taken = 0; taken < 20;) {
      from.put(data);
      taken += to.take(got) ? 1 : 0;
    }
    from.put(data);
    proxy.remove(i % 2 == 0 ? sends : receives);
    proxy.remove(i % 2 == 0 ? receives : sends);
    const uint64_t head = from.head(), tail = to.tail();
    from.put(data);
    std::this_thread::sleep_for(2ms);
    EXPECT_EQ(from.head(), head);
    EXPECT_EQ(to.tail(), tail);
  }
}

// A look at all streams of a device takes longer than an abort may.
TEST(Proxies, LetOthersInBetweenStreams) {
  class SlowStream final : public Stream {
   public:
    SlowStream(const StreamMemory& memory, std::atomic<int>& looks)
        : Stream(memory), looks_(looks) {}
    StreamProgress progress() override {
      std::this_thread::sleep_for(1ms);
      looks_++;
      return {.moved = true};
    }

   private:
    std::atomic<int>& looks_;
  };
  constexpr int kStreams = 200;
  End end;
  std::atomic<int> looks = 0;
  Proxy& proxy = Proxy::ofDevice(0);
  const Proxy::Client busy{[] { return false; }, [](const Error&) {}};
  const uint64_t client = proxy.add(busy);
  for (int i = 0; i < kStreams; i++) {
    proxy.addStream(client, std::make_unique<SlowStream>(end.memory(), looks), {0, {1}, "to b"});
  }
  // Others may hold up this thread now and then.
  int fewest = kStreams;
  for (int i = 0; i < 5; i++) {
    const int before = looks;
    while (looks < before + 10) std::this_thread::yield();
    const int begun = looks;
    const uint64_t other = proxy.add(busy);
    fewest = std::min(fewest, looks - begun);
    proxy.remove(other);
  }
  EXPECT_LT(fewest, kStreams / 2);
  proxy.remove(client);
}

// Accepts connections over TCP from this process.
class LoopbackListener {
 public:
  LoopbackListener() {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address_);
    EXPECT_EQ(::bind(socket_.get(), name(), length), 0);
    EXPECT_EQ(::listen(socket_.get(), 100), 0);
    EXPECT_EQ(::getsockname(socket_.get(), name(), &length), 0);
  }
  UniqueDescriptor connect() {
    UniqueDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket.get(), name(), sizeof(address_)), 0);
    return socket;
  }
  UniqueDescriptor accept() {
    return UniqueDescriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

 private:
  sockaddr* name() { return reinterpret_cast<sockaddr*>(&address_); }

  const UniqueDescriptor socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in address_{};
};

tcp_info infoOf(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  EXPECT_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size), 0);
  return info;
}

// Not in the call that takes a message, but before the system does so by itself, after 40 ms.
TEST(ReceiveStreams, AcknowledgeWhenNothingElseHasArrived) {
  LoopbackListener listener;
  UniqueDescriptor socket = listener.connect();
  const int sender = socket.get();
  End from, to;
  SendStream send({bootstrap::Socket::adopt(std::move(socket))}, from.memory());
  ReceiveStream receive({bootstrap::Socket::adopt(listener.accept())}, to.memory());
  int held = 0, prompt = 0;
  for (uint64_t round = 0; round < 20; round++) {
    ASSERT_TRUE(from.put({std::byte{1}}));
    while (to.tail() == round) send.progress(), receive.progress();
    if (infoOf(sender).tcpi_unacked > 0) held++;
    const auto start = std::chrono::steady_clock::now();
    receive.progress();
    while (infoOf(sender).tcpi_unacked > 0) std::this_thread::yield();
    if (std::chrono::steady_clock::now() - start < 20ms) prompt++;
    std::vector<std::byte> got(1);
    ASSERT_TRUE(to.take(got));
  }
  // Other work of the machine may delay the one and the other.
  EXPECT_GT(held, 0);
  EXPECT_GT(prompt, 0);
}

// Whether it is known that the other end is near: the handshake tells, before any data.
TEST(SendStreams, BufferLittleWhereThePeerIsNear) {
  LoopbackListener listener;
  const auto bufferOf = [](int socket) {
    int bytes = 0;
    socklen_t size = sizeof(bytes);
    ::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &size);
    return bytes;
  };
  for (int i = 0; i < 30; i++) {
    UniqueDescriptor owned = listener.connect();
    const int socket = owned.get();
    const tcp_info info = infoOf(socket);
    const int before = bufferOf(socket);
    End end;
    const SendStream stream({bootstrap::Socket::adopt(std::move(owned))}, end.memory());
    if (info.tcpi_rtt <= 30) {
      EXPECT_EQ(bufferOf(socket), 2 * (208 << 10)) << info.tcpi_rtt;
    } else {
      EXPECT_EQ(bufferOf(socket), before) << info.tcpi_rtt;
    }
  }
}

TEST(Proxies, NameTheConnectionThatFails) {
  End to;
  Sockets sockets = connected();
  std::atomic<bool> failed = false;
  std::string text;
  Proxy& proxy = Proxy::ofDevice(0);
  const uint64_t client = proxy.add({[] { return true; },
                                     [&](const Error& error) {
                                       EXPECT_FALSE(failed);
                                       EXPECT_EQ(error.code(), ErrorCode::remoteError);
                                       text = error.what();
                                       failed = true;
                                     }});
  proxy.addStream(
      client,
      std::make_unique<ReceiveStream>(StreamSockets{std::move(sockets.receiver)}, to.memory()),
      {3, {5}, "to 192.0.2.1:80 over eth7"});
  sockets.sender.close();
  while (!failed) std::this_thread::sleep_for(1ms);
  for (const char* part : {"rank 3", "peer 5", "192.0.2.1:80 over eth7", "the peer closed it"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  proxy.remove(client);
}

// Whose machine does not answer: at once, as its process will not tell more.
TEST(Proxies, ReportSilenceAtOnce) {
  class FailedStream final : public Stream {
   public:
    FailedStream(const StreamMemory& memory, bool isSilence) : Stream(memory) {
      failure_ = "failed";
      isSilence_ = isSilence;
    }
    StreamProgress progress() override { return {}; }
  };
  End end;
  Proxy& proxy = Proxy::ofDevice(0);
  for (const bool isSilence : {true, false}) {
    std::atomic<bool> failed = false;
    const uint64_t client = proxy.add({[] { return true; }, [&](const Error&) { failed = true; }});
    const auto begin = std::chrono::steady_clock::now();
    proxy.addStream(client, std::make_unique<FailedStream>(end.memory(), isSilence),
                    {3, {5}, "to 192.0.2.1:80 over eth7"});
    while (!failed) std::this_thread::sleep_for(1ms);
    const auto time = std::chrono::steady_clock::now() - begin;
    if (isSilence) {
      EXPECT_LT(time, 800ms);
    } else {
      EXPECT_GE(time, 1s);
    }
    proxy.remove(client);
  }
}

TEST(Transports, AreChosenInOrderOfPreference) {
  EXPECT_EQ(chooseTransport({true, true, true}), TransportKind::peer);
  EXPECT_EQ(chooseTransport({false, true, true}), TransportKind::hostMemory);
  EXPECT_EQ(chooseTransport({false, false, true}), TransportKind::network);
  EXPECT_EQ(chooseTransport({false, false, false}), std::nullopt);
}

}  // namespace
}  // namespace unisono::transport
