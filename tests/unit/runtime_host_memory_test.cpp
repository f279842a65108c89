// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "runtime/descriptor_service.h"
#include "runtime_host_testing.h"
#include "support/seed.h"

namespace unisono::runtime::host {
namespace {

std::string errorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

testing::AssertionResult contains(const std::string& text, const char* part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << '"' << text << "\" does not contain \"" << part << '"';
}

template <typename T>
void put(int channel, const T& value) {
  ASSERT_EQ(::send(channel, &value, sizeof(value), MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(value)));
}
template <typename T>
T take(int channel) {
  T value{};
  if (::recv(channel, &value, sizeof(value), MSG_WAITALL) != sizeof(value)) {
    throw internalError("the other process ended");
  }
  return value;
}

// A process that does `body` with a channel to us, once start() says so. All are made while this
// program has no threads, before main(): ThreadSanitizer allows no others.
class Child {
 public:
  explicit Child(const std::function<int(int)>& body) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) throw systemError(errno, "socketpair");
    process_ = ::fork();
    if (process_ == 0) {
      ::close(pair[0]);
      int status = 3;
      bool started = false;
      try {
        take<char>(pair[1]);
        started = true;
        status = body(pair[1]);
      } catch (const std::exception& error) {
        if (started) std::fprintf(stderr, "child: %s\n", error.what());
      }
      ::_exit(status);
    }
    ::close(pair[1]);
    channel_ = pair[0];
  }
  ~Child() {
    ::close(channel_);
    if (!ended_) wait();
  }
  int channel() const { return channel_; }
  void start() { put(channel_, 's'); }
  int wait() {
    int status = 0;
    ::waitpid(process_, &status, 0);
    ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t process_ = -1;
  int channel_ = -1;
  bool ended_ = false;
};

struct PingPong {
  uint64_t* mine;
  uint64_t* theirs;
  uint64_t first;  // 1 for who starts
};
void pingPong(const void* raw, const HostGroupContext&) {
  const auto& arguments = *static_cast<const PingPong*>(raw);
  std::atomic_ref<uint64_t> mine(*arguments.mine), theirs(*arguments.theirs);
  for (uint64_t i = 1; i <= 200; i++) {
    if (arguments.first != 0) {
      arguments.theirs[1] = i * i;
      theirs.store(i, std::memory_order_release);
    }
    while (mine.load(std::memory_order_acquire) < i) poll({.what = "ball", .wanted = i});
    progress();
    if (arguments.mine[1] != i * i) throw internalError("ball {} came without its data", i);
    if (arguments.first == 0) {
      arguments.theirs[1] = i * i;
      theirs.store(i, std::memory_order_release);
    }
  }
}

// One side of a game between two processes, each with its own memory that the other maps.
int play(int channel, uint64_t first, size_t bytes, size_t offset) {
  HostRuntime runtime(hostSettings());
  auto memory = runtime.allocate(1, bytes);
  auto* mine = static_cast<std::byte*>(memory->address()) + offset;
  put(channel, runtime.exportMemory(mine, 64));
  auto handle = take<MemoryHandle>(channel);
  auto mapped = runtime.importMemory(handle, 0);
  // Mapped once, however often.
  auto again = runtime.importMemory(handle, 1);
  if (again->address() != mapped->address()) return 4;
  again.reset();
  launch(runtime, nullptr, "ping-pong", pingPong,
         PingPong{reinterpret_cast<uint64_t*>(mine), static_cast<uint64_t*>(mapped->address()),
                  first});
  runtime.synchronize(nullptr);
  // Neither leaves before both have finished.
  put(channel, 'x');
  take<char>(channel);
  return 0;
}

constexpr size_t kGameBytes[] = {4096, 8 << 20};  // pooled, and on its own

Child smallGame([](int channel) { return play(channel, 0, kGameBytes[0], 1024); });
Child largeGame([](int channel) { return play(channel, 0, kGameBytes[1], 1024); });

TEST(HostProcessTest, ExchangesDataThroughSharedMemory) {
  size_t game = 0;
  for (Child* child : {&smallGame, &largeGame}) {
    child->start();
    EXPECT_EQ(play(child->channel(), 1, kGameBytes[game++], 0), 0);
    EXPECT_EQ(child->wait(), 0);
  }
}

Settings segmentSettings() {
  Settings settings = hostSettings();
  settings.hostSegmentBytes = 2 << 20;
  return settings;
}

constexpr size_t kRunBytes = (5 << 20) + 100;

// Fills memory of several allocations and sends it, with the bytes that the peer has to write.
Child ownerOfARun([](int channel) {
  HostRuntime runtime(segmentSettings());
  auto memory = runtime.allocateForUser(1, kRunBytes);
  auto* bytes = static_cast<std::byte*>(memory->address());
  for (size_t i = 0; i < kRunBytes; i++) bytes[i] = static_cast<std::byte>(i % 251);
  const Allocation run = runtime.findRun(bytes + 1000, kRunBytes - 1000);
  runtime.retainRun(run);
  const std::vector<MemoryHandle> handles = runtime.exportRun(run);
  put(channel, handles.size());
  for (const MemoryHandle& handle : handles) put(channel, handle);
  take<char>(channel);
  for (size_t i = 0; i < kRunBytes; i++) {
    if (bytes[i] != static_cast<std::byte>(i % 241)) return 5;
  }
  return 0;
});

TEST(HostProcessTest, AdjacentAllocationsAreMappedAtConsecutiveAddresses) {
  ownerOfARun.start();
  const int channel = ownerOfARun.channel();
  std::vector<MemoryHandle> handles(take<size_t>(channel));
  ASSERT_EQ(handles.size(), 3u);
  for (MemoryHandle& handle : handles) handle = take<MemoryHandle>(channel);
  HostRuntime runtime(hostSettings());
  {
    const auto mapped = runtime.importRun(handles, 0);
    auto* bytes = static_cast<std::byte*>(mapped->address());
    size_t wrong = 0;
    for (size_t i = 0; i < kRunBytes; i++) {
      wrong += bytes[i] == static_cast<std::byte>(i % 251) ? 0 : 1;
      bytes[i] = static_cast<std::byte>(i % 241);
    }
    EXPECT_EQ(wrong, 0u);
  }
  const std::vector<MemoryHandle> holed{handles[0], handles[2]};
  EXPECT_TRUE(contains(errorOf([&] { runtime.importRun(holed, 0); }), "does not continue"));
  put(channel, 'x');
  EXPECT_EQ(ownerOfARun.wait(), 0);
}

TEST(HostMemoryTest, ARunIsTheAllocationsThatHoldARange) {
  HostRuntime runtime(segmentSettings());
  auto memory = runtime.allocateForUser(0, kRunBytes);
  auto* bytes = static_cast<std::byte*>(memory->address());
  const Allocation first = runtime.findAllocation(bytes);
  EXPECT_EQ(first.bytes, size_t{2} << 20);
  EXPECT_EQ(runtime.findRun(bytes, first.bytes), first);
  const Allocation two = runtime.findRun(bytes + first.bytes - 1, 2);
  EXPECT_EQ(two.base, first.base);
  EXPECT_EQ(two.bytes, 2 * first.bytes);
  EXPECT_NE(two.serial, first.serial);
  EXPECT_EQ(runtime.findRun(bytes, kRunBytes).bytes, kRunBytes);
  EXPECT_EQ(runtime.findRun(bytes, kRunBytes + 1), Allocation());
  // In the same process the same addresses.
  EXPECT_TRUE(contains(errorOf([&] { runtime.exportRun(two); }), "retained"));
  runtime.retainRun(two);
  const auto mapped = runtime.importRun(runtime.exportRun(two), 1);
  EXPECT_EQ(mapped->address(), bytes);
  const Allocation whole = runtime.findRun(bytes, kRunBytes);
  memory.reset();
  EXPECT_EQ(runtime.findRun(bytes, kRunBytes), Allocation());
  EXPECT_TRUE(contains(errorOf([&] { runtime.exportRun(whole); }), "freed"));
}

Child shortLived([](int channel) {
  HostRuntime runtime(hostSettings());
  auto memory = runtime.allocate(0, 100);
  put(channel, runtime.exportMemory(memory->address(), 100));
  return 0;
});

TEST(HostProcessTest, MemoryOfAnEndedProcessCannotBeMapped) {
  shortLived.start();
  auto handle = take<MemoryHandle>(shortLived.channel());
  EXPECT_EQ(shortLived.wait(), 0);
  HostRuntime runtime(hostSettings());
  EXPECT_TRUE(contains(errorOf([&] { runtime.importMemory(handle, 0); }), "has ended"));
}

Child exporter([](int channel) {
  HostRuntime runtime(hostSettings());
  auto kept = runtime.allocate(0, 2 << 20);
  auto freed = runtime.allocate(0, 2 << 20);
  put(channel, runtime.exportMemory(kept->address(), 100));
  put(channel, runtime.exportMemory(freed->address(), 100));
  freed.reset();
  put(channel, 'f');
  take<char>(channel);
  return 0;
});

TEST(HostProcessTest, FreedMemoryAndForgedHandlesCannotBeMapped) {
  exporter.start();
  auto kept = take<MemoryHandle>(exporter.channel());
  auto freed = take<MemoryHandle>(exporter.channel());
  take<char>(exporter.channel());
  HostRuntime runtime(hostSettings());
  EXPECT_TRUE(contains(errorOf([&] { runtime.importMemory(freed, 0); }), "no longer offered"));

  auto errorOfForged = [&](const std::function<void(MemoryHandle&)>& forge) {
    MemoryHandle handle = kept;
    forge(handle);
    return errorOf([&] { runtime.importMemory(handle, 0); });
  };
  EXPECT_TRUE(contains(errorOfForged([](MemoryHandle& handle) {
                         handle.payload[sizeof(DescriptorTicket) - 1] ^= std::byte{1};  // token
                       }),
                       "never was"));
  auto outside = [](MemoryHandle& handle) { handle.bytes = handle.baseBytes + 1; };
  EXPECT_TRUE(contains(errorOfForged(outside), "outside"));
  auto before = [](MemoryHandle& handle) { handle.address = handle.base - 8; };
  EXPECT_TRUE(contains(errorOfForged(before), "outside"));
  auto larger = [](MemoryHandle& handle) { handle.baseBytes *= 2; };
  EXPECT_TRUE(contains(errorOfForged(larger), "does not hold"));
  auto otherKind = [](MemoryHandle& handle) { handle.kind = MemoryHandle::Kind::legacyIpc; };
  EXPECT_TRUE(contains(errorOfForged(otherKind), "kind"));

  EXPECT_EQ(errorOf([&] { runtime.importMemory(kept, 0); }), "");
  put(exporter.channel(), 'e');
  EXPECT_EQ(exporter.wait(), 0);
}

// A child of a process that used the devices has no engine: it is told so and does not hang.
int forkLate() {
  HostRuntime runtime(hostSettings());
  auto memory = runtime.allocate(0, 8);
  runtime.fillAsync(memory->address(), std::byte{1}, 8, nullptr);
  runtime.synchronize(nullptr);
  pid_t child = ::fork();
  if (child == 0) {
    char target;
    std::string error = errorOf([&] { runtime.fillAsync(&target, std::byte{1}, 1, nullptr); });
    ::_exit(error.find("forked after") != std::string::npos ? 0 : 5);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}
Child lateForker([](int) { return forkLate(); });

TEST(HostProcessTest, AForkedChildIsToldThatItHasNoDevices) {
  lateForker.start();
  EXPECT_EQ(lateForker.wait(), 0);
}

TEST(HostMemoryTest, IsZeroFilledAlignedAndKnown) {
  HostRuntime runtime(hostSettings());
  std::mt19937 random(test::seed());
  std::vector<std::shared_ptr<DeviceMemory>> kept;
  for (int i = 0; i < 600; i++) {
    size_t bytes = i % 50 == 0 ? 3u << 20 : random() % 20000;
    int device = static_cast<int>(random() % 8);
    auto memory = runtime.allocate(device, bytes);
    auto* data = static_cast<unsigned char*>(memory->address());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 512, 0u);
    EXPECT_EQ(std::count(data, data + bytes, 0), static_cast<ptrdiff_t>(bytes));
    std::memset(data, 0xee, bytes);
    EXPECT_EQ(runtime.inspect(data).kind, PointerInfo::Kind::device);
    EXPECT_EQ(runtime.inspect(data + (bytes > 0 ? bytes - 1 : 0)).device, device);
    kept.push_back(std::move(memory));
    if (random() % 2 == 0) {
      std::swap(kept[random() % kept.size()], kept.back());
      kept.pop_back();
    }
  }
  int local = 0;
  EXPECT_EQ(runtime.inspect(&local).kind, PointerInfo::Kind::host);
  EXPECT_EQ(runtime.inspect(nullptr).kind, PointerInfo::Kind::host);
  auto pinned = runtime.allocatePinned(64);
  EXPECT_EQ(pinned->hostAddress(), pinned->deviceAddress());
  EXPECT_EQ(runtime.inspect(pinned->hostAddress()).kind, PointerInfo::Kind::host);
}

TEST(HostMemoryTest, MemoryOfTheHostIsSharedLikeThatOfADevice) {
  HostRuntime runtime(hostSettings());
  const auto memory = runtime.allocateShared(0, 5000);
  const auto* bytes = static_cast<const char*>(memory->address());
  EXPECT_EQ(std::count(bytes, bytes + 5000, 0), 5000);
  EXPECT_EQ(runtime.inspect(bytes + 4999).kind, PointerInfo::Kind::pinned);
  const MemoryHandle handle = runtime.exportMemory(bytes + 1000, 4000);
  EXPECT_EQ(handle.kind, MemoryHandle::Kind::hostMemory);
  EXPECT_EQ(runtime.importMemory(handle, 1)->address(), bytes + 1000);
  EXPECT_TRUE(contains(errorOf([&] { runtime.exportMemory(bytes, 5001); }), "5000"));
}

TEST(HostMemoryTest, SmallAllocationsNeedFewDescriptors) {
  HostRuntime runtime(hostSettings());
  int before = ::dup(0);
  ::close(before);
  std::vector<std::shared_ptr<DeviceMemory>> kept;
  for (int i = 0; i < 5000; i++) kept.push_back(runtime.allocate(0, 1000));
  int after = ::dup(0);
  ::close(after);
  EXPECT_LT(after - before, 10);
}

TEST(HostMemoryTest, SparsePagesCostNothing) {
  HostRuntime runtime(hostSettings());
  // ThreadSanitizer leaves little more than half a terabyte where mmap() begins at random.
  auto memory = runtime.allocate(0, size_t{1} << 38);
  static_cast<char*>(memory->address())[size_t{1} << 37] = 1;
  EXPECT_EQ(static_cast<char*>(memory->address())[(size_t{1} << 37) + 1], 0);
}

TEST(HostMemoryTest, ExportChecksTheRange) {
  HostRuntime runtime(hostSettings());
  auto memory = runtime.allocate(3, 1000);
  auto* start = static_cast<std::byte*>(memory->address());
  MemoryHandle handle = runtime.exportMemory(start + 10, 990);
  EXPECT_EQ(handle.device, 3);
  EXPECT_THROW(runtime.exportMemory(start + 10, 991), Error);
  EXPECT_THROW(runtime.exportMemory(start + 1000, 0), Error);
  int local = 0;
  EXPECT_THROW(runtime.exportMemory(&local, 4), Error);
  // In the exporter's own process the same address.
  EXPECT_EQ(runtime.importMemory(handle, 0)->address(), start + 10);
  memory.reset();
  EXPECT_TRUE(contains(errorOf([&] { runtime.importMemory(handle, 0); }), "freed"));
}

UniqueDescriptor callService(const DescriptorTicket& ticket) {
  UniqueDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, ticket.service.data(), ticket.service.size());
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                       std::strlen(ticket.service.data()));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  return socket;
}

TEST(DescriptorServiceTest, RefusesStrangersAndServesOnwards) {
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);
  UniqueDescriptor reader(pipes[0]), writer(pipes[1]);
  auto offer = offerDescriptor(writer.get());

  std::vector<UniqueDescriptor> silent;
  for (int i = 0; i < 20; i++) silent.push_back(callService(offer->ticket()));
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{15}, size_t{17}, size_t{100000}}) {
    UniqueDescriptor garbage = callService(offer->ticket());
    std::vector<char> data(bytes, 'g');
    ASSERT_EQ(::send(garbage.get(), data.data(), data.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes));
    char answer;
    EXPECT_EQ(::recv(garbage.get(), &answer, 1, 0), 0) << bytes << " bytes of garbage";
  }
  DescriptorTicket wrong = offer->ticket();
  wrong.token[0] ^= std::byte{1};
  EXPECT_TRUE(contains(errorOf([&] { fetchDescriptor(wrong); }), "no longer offered"));
  wrong = offer->ticket();
  wrong.service[9] = 'x';
  EXPECT_TRUE(contains(errorOf([&] { fetchDescriptor(wrong); }), "has ended"));

  UniqueDescriptor fetched = fetchDescriptor(offer->ticket());
  ASSERT_EQ(::write(fetched.get(), "y", 1), 1);
  char received = 0;
  ASSERT_EQ(::read(reader.get(), &received, 1), 1);
  EXPECT_EQ(received, 'y');

  DescriptorTicket ticket = offer->ticket();
  offer.reset();
  EXPECT_TRUE(contains(errorOf([&] { fetchDescriptor(ticket); }), "no longer offered"));
}

TEST(DescriptorServiceTest, ServesManyThreads) {
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);
  UniqueDescriptor reader(pipes[0]), writer(pipes[1]);
  auto offer = offerDescriptor(writer.get());
  std::atomic<int> fetched{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; t++) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; i++) fetched += fetchDescriptor(offer->ticket()).get() >= 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(fetched, 400);
}

// The weak executor keeps account of one process's memory: another's is refused, not ignored.
TEST(HostMemoryTest, TheWeakExecutorRefusesOtherProcesses) {
  HostRuntime runtime(hostSettings("weak"));
  const auto memory = runtime.allocate(0, 64);
  MemoryHandle handle = runtime.exportMemory(memory->address(), 64);
  EXPECT_EQ(runtime.importMemory(handle, 1)->address(), memory->address());
  handle.process ^= 1;
  try {
    runtime.importMemory(handle, 1);
    ADD_FAILURE() << "mapped memory of another process";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("UNISONO_HOST_EXECUTOR=weak"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace unisono::runtime::host
