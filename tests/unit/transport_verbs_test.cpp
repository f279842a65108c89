// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/work.h"
#include "support/fake_verbs.h"
#include "support/seed.h"
#include "transport/net/verbs_driver.h"
#include "transport/net/verbs_stream.h"

namespace unisono::transport {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

Gid gidOf(const char* address, int roceVersion) {
  Gid gid{.roceVersion = roceVersion};
  const std::string text =
      std::strchr(address, ':') != nullptr ? address : "::ffff:" + std::string(address);
  EXPECT_EQ(::inet_pton(AF_INET6, text.c_str(), gid.bytes.data()), 1) << text;
  return gid;
}

std::string digitsOf(const Gid& gid) {
  std::string digits;
  for (const uint8_t byte : gid.bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

// As a RoCE adapter has them: each address once for each version.
const std::vector<Gid> kGids = {gidOf("fe80::1", 1),     gidOf("fe80::1", 2),
                                gidOf("192.0.2.7", 1),   gidOf("192.0.2.7", 2),
                                gidOf("2001:db8::7", 2), gidOf("198.51.100.7", 2),
                                gidOf("2001:db9::7", 1)};

// The adapters of all tests.
class Adapters final : public ::testing::Environment {
 public:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / fmt::format("unisono_verbs_{}", ::getpid());
    std::string gids;
    for (const Gid& gid : kGids) gids += (gids.empty() ? "" : ",") + digitsOf(gid);
    ::setenv("FAKE_VERBS_SYSFS", folder_.c_str(), 1);
    ::setenv("FAKE_VERBS", ("a0 ib ib-down;a1 ib;b0 eth=" + gids + " eth;c0 ib-down").c_str(), 1);
    ::setenv("FAKE_VERBS_DELAY", "200", 1);
    ::setenv("FAKE_VERBS_LATE", "1", 1);
    // a0 and a1 are two functions of one card.
    for (const char* function : {"0", "1"}) {
      const fs::path device = folder_ / "devices" / ("0000:0a:00." + std::string(function));
      const fs::path adapter = folder_ / ("a" + std::string(function));
      fs::create_directories(device);
      fs::create_directories(adapter);
      fs::create_directory_symlink(device, adapter / "device");
    }
    const fs::path types = folder_ / "b0/ports/1/gid_attrs/types";
    fs::create_directories(types);
    for (size_t i = 0; i < kGids.size(); i++) {
      std::ofstream(types / fmt::to_string(i))
          << (kGids[i].roceVersion == 2 ? "RoCE v2\n" : "IB/RoCE v1\n");
    }
    testing::loadFakeVerbs();
  }
  void TearDown() override {
    EXPECT_EQ(testing::fakeVerbsCounter("fakeVerbsOpen"), 0) << "all that was made is destroyed";
    fs::remove_all(folder_);
  }
  const fs::path& folder() const { return folder_; }

 private:
  fs::path folder_;
};
Adapters& adapters() {
  static auto* const added =
      static_cast<Adapters*>(::testing::AddGlobalTestEnvironment(new Adapters));
  return *added;
}
[[maybe_unused]] Adapters& registered = adapters();

const VerbsLibrary& library() {
  std::string problem;
  const VerbsLibrary* loaded = VerbsLibrary::get(problem);
  EXPECT_NE(loaded, nullptr) << problem;
  return *loaded;
}

std::string found(const char* filter) {
  std::string problem, names;
  for (const VerbsPort& port : findVerbsPorts(library(), PortFilter(filter), problem)) {
    names += (names.empty() ? "" : " ") + port.name();
  }
  return names.empty() ? problem : names;
}

TEST(VerbsPorts, AreTheActiveOnesThatTheUserAllows) {
  EXPECT_EQ(found(""), "a0:1 a1:1 b0:1 b0:2");
  EXPECT_EQ(found("a"), "a0:1 a1:1");
  EXPECT_EQ(found("=a"), "NCCL_IB_HCA allows no active port");
  EXPECT_EQ(found("=a1,b0:2"), "a1:1 b0:2");
  EXPECT_EQ(found("b:1,a1"), "a1:1 b0:1");
  EXPECT_EQ(found("^a"), "b0:1 b0:2");
  EXPECT_EQ(found("^=a,b0:1"), "a0:1 a1:1 b0:2");
  EXPECT_EQ(found("a0:2,c0"), "NCCL_IB_HCA allows no active port");
}

TEST(VerbsPorts, HaveFactsForTheTopology) {
  std::string problem;
  const std::vector<VerbsPort> ports = findVerbsPorts(library(), PortFilter(""), problem);
  ASSERT_EQ(ports.size(), 4u);
  EXPECT_EQ(ports[0].facts.name, "a0");
  const std::string first = fs::canonical(adapters().folder() / "devices/0000:0a:00.0").string();
  EXPECT_EQ(ports[0].facts.pciPath, first);
  EXPECT_EQ(ports[1].facts.pciPath, first) << "the functions of a card share its link";
  EXPECT_EQ(ports[2].facts.pciPath, "");
  EXPECT_EQ(ports[0].facts.number, 1);
  EXPECT_EQ(ports[1].facts.number, 2);
  EXPECT_EQ(ports[3].facts.number, 2);
  EXPECT_EQ(ports[0].facts.megabits, 400'000);
  EXPECT_EQ(ports[0].facts.guid, 0x77u);
  EXPECT_FALSE(ports[1].isEthernet());
  EXPECT_TRUE(ports[2].isEthernet());
}

TEST(VerbsDriver, IsUnavailableForAReason) {
  Settings settings;
  std::string problem;
  settings.netPlugin = "none";
  if (!fs::exists("/sys/class/infiniband")) {
    EXPECT_EQ(openVerbs(settings, false, -1, problem), nullptr);
    EXPECT_EQ(problem, "there is no adapter");
  }
  const auto driver = openVerbs(settings, true, -1, problem);
  ASSERT_NE(driver, nullptr);
  EXPECT_EQ(driver->name(), "IB");
  EXPECT_EQ(driver->ports()->size(), 4u);
  settings.ibAdapters = "none";
  EXPECT_EQ(openVerbs(settings, true, -1, problem), nullptr);
  EXPECT_EQ(problem, "NCCL_IB_HCA allows no active port");
  settings.ibDisable = true;
  try {
    openNetwork(settings, "ib", {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    EXPECT_NE(std::string(error.what()).find("NCCL_IB_DISABLE is set"), std::string::npos);
  }
  EXPECT_EQ(openNetwork(settings, "", {})->name(), "Socket");
}

TEST(Gids, AreChosenByFamilyRangeAndVersion) {
  const auto choose = [](const char* family, const char* range, int version) {
    return chooseGid(kGids, parseGidRules(family, range, version));
  };
  EXPECT_EQ(choose("", "", 2), 3u) << "the default is IPv4 and version 2";
  EXPECT_EQ(choose("AF_INET", "", 1), 2u);
  EXPECT_EQ(choose("AF_INET6", "", 2), 4u) << "not the link-local one";
  EXPECT_EQ(choose("AF_INET6", "", 1), 6u);
  EXPECT_EQ(choose("", "198.51.100.0/24", 2), 5u);
  EXPECT_EQ(choose("", "198.51.100.0/24", 1), 5u) << "no other version is in the range";
  EXPECT_EQ(choose("AF_INET6", "2001:db9::/32", 1), 6u);
  EXPECT_EQ(choose("AF_INET6", "2001:db8::/31", 2), 4u);
  EXPECT_EQ(choose("", "203.0.113.0/24", 2), 0u) << "none is in the range";
  for (const char* wrong : {"198.51.100.0", "198.51.100.0/33", "198.51.100.0/-1", "x/8", "2001::/8",
                            "198.51.100.0/8x", "/8", "1.2.3.4/"}) {
    EXPECT_EQ(choose("", wrong, 2), 3u) << wrong << " is ignored";
  }
  EXPECT_EQ(chooseGid({}, {}), 0u);
}

TEST(Gids, AreReadWithTheirVersions) {
  std::string problem;
  const std::vector<VerbsPort> ports = findVerbsPorts(library(), PortFilter("b0:1"), problem);
  ASSERT_EQ(ports.size(), 1u);
  const std::vector<Gid> gids = readGids(ports.front());
  ASSERT_EQ(gids.size(), kGids.size());
  for (size_t i = 0; i < gids.size(); i++) {
    EXPECT_EQ(gids[i].bytes, kGids[i].bytes);
    EXPECT_EQ(gids[i].roceVersion, kGids[i].roceVersion);
  }
}

TEST(VerbsEndpoints, AreRefusedUnlessTheyAreIntact) {
  const StreamMemory memory{nullptr, nullptr, nullptr, 4, 5000};
  std::vector<VerbsEndpoint> sent(2);
  for (size_t fifo = 0; fifo < 2; fifo++) {
    sent[fifo].group = 7;
    sent[fifo].fifo = fifo;
    sent[fifo].slots = 4;
    sent[fifo].slotBytes = 5000;
    sent[fifo].queuePairs = 1;
    sent[fifo].numbers[0] = 99;
    sent[fifo].seal();
  }
  std::vector<std::byte> message = pack(sent);
  EXPECT_EQ(unpack(message, 1).size(), 0u);
  EXPECT_EQ(unpack(std::span(message).subspan(1), 2).size(), 0u);
  const auto isIntact = [&](uint64_t group, size_t fifo) {
    return unpack(message, 2)[fifo].isFor(group, fifo, memory);
  };
  EXPECT_TRUE(isIntact(7, 0) && isIntact(7, 1));
  EXPECT_FALSE(isIntact(6, 0)) << "another group";
  EXPECT_FALSE(sent[1].isFor(7, 0, memory)) << "another FIFO";
  for (size_t i = 0; i < sizeof(VerbsEndpoint); i++) {
    message[i] ^= std::byte{1};
    EXPECT_FALSE(isIntact(7, 0)) << "byte " << i;
    message[i] ^= std::byte{1};
  }
  for (const uint32_t pairs : {0u, uint32_t{kMaxQueuePairs} + 1}) {
    sent[0].queuePairs = pairs;
    sent[0].seal();
    EXPECT_FALSE(sent[0].isFor(7, 0, memory));
  }
}

VerbsPort portOf(const char* filter) {
  std::string problem;
  std::vector<VerbsPort> ports = findVerbsPorts(library(), PortFilter(filter), problem);
  EXPECT_EQ(ports.size(), 1u) << problem;
  return ports.front();
}

template <typename Done>
void await(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!done()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
}

// Two connections that may write a region of 64 bytes of each other.
struct Connected {
  explicit Connected(const VerbsOptions& options = {})
      : port(portOf("a0:1")), a(port, options, {1, 4, 4}), b(port, options, {1, 4, 4}) {
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    from = &a.registerMemory(words, 64, access);
    to = &b.registerMemory(words + 8, 64, access);
  }
  void connect() {
    a.connect(b.endpoint());
    b.connect(a.endpoint());
  }
  // Writes from a to b.
  bool write(uint64_t offset, uint32_t bytes) {
    part = {reinterpret_cast<uintptr_t>(words), bytes, from->lkey};
    ibv_send_wr request{};
    request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    request.send_flags = IBV_SEND_SIGNALED;
    request.imm_data = htonl(17);
    request.sg_list = &part;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = reinterpret_cast<uintptr_t>(words + 8) + offset;
    request.wr.rdma.rkey = to->rkey;
    return a.post(0, request);
  }

  uint64_t words[16] = {1, 2, 3, 4, 5, 6, 7, 8};
  ibv_sge part{};
  const VerbsPort port;
  VerbsConnection a, b;
  ibv_mr *from, *to;
};

TEST(VerbsConnections, WaitForAReceiveThatIsNotPosted) {
  Connected pair;
  pair.connect();
  ASSERT_TRUE(pair.write(8, 16));
  std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(pair.a.poll().empty());
  EXPECT_TRUE(pair.b.poll().empty());
  ibv_recv_wr receive{};
  receive.wr_id = 9;
  ASSERT_TRUE(pair.b.post(0, receive));
  await([&] {
    for (const ibv_wc& completion : pair.b.poll()) {
      EXPECT_EQ(completion.wr_id, 9u);
      EXPECT_EQ(ntohl(completion.imm_data), 17u);
      return true;
    }
    return false;
  });
  EXPECT_EQ(pair.words[9], 1u);
  EXPECT_EQ(pair.words[10], 2u);
  EXPECT_EQ(pair.words[8] + pair.words[11], 0u);
  await([&] { return !pair.a.poll().empty(); });
}

TEST(VerbsConnections, FailWhereTheyWriteOutsideOfARegion) {
  Connected pair;
  pair.connect();
  ASSERT_TRUE(pair.write(56, 16));
  await([&] { return static_cast<void>(pair.a.poll()), !pair.a.failure().empty(); });
  for (const char* part : {"remote access error (status 10, vendor error 0x88)", "port a0:1"}) {
    EXPECT_NE(pair.a.failure().find(part), std::string::npos) << pair.a.failure();
  }
  // The adapter of the other end tells it.
  await([&] { return !pair.b.failure().empty(); });
  EXPECT_NE(pair.b.failure().find("local access violation"), std::string::npos);
  EXPECT_EQ(pair.words[15], 0u);
}

TEST(VerbsConnections, FailWhereNothingAnswers) {
  VerbsOptions options;
  options.timeout = 10;  // 4 ms
  options.retries = 1;
  Connected pair(options);
  VerbsEndpoint other = pair.b.endpoint();
  other.numbers[0] ^= 1;
  pair.a.connect(other);
  ASSERT_TRUE(pair.write(0, 8));
  await([&] { return static_cast<void>(pair.a.poll()), !pair.a.failure().empty(); });
  EXPECT_NE(pair.a.failure().find("transport retry counter exceeded"), std::string::npos)
      << pair.a.failure();
}

TEST(VerbsConnections, NameTheFunctionThatFails) {
  const VerbsPort port = portOf("a0:1");
  VerbsOptions options;
  options.keyIndex = 5;
  try {
    const VerbsConnection connection(port, options, {1, 1, 1});
    FAIL() << "there is no such key";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::systemError);
    for (const char* part : {"ibv_modify_qp failed on port a0:1", "Invalid argument"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

// One end of a FIFO, as kernels see it.
struct End {
  static constexpr uint32_t kSlots = 4, kSlotBytes = 5000;

  StreamMemory memory() { return {tail, &head, slots.data(), kSlots, kSlotBytes}; }
  std::byte* slot() { return slots.data() + step % kSlots * kSlotBytes; }

  uint64_t tail[device::kReportsWord + kSlots] = {};
  uint64_t head = 0;
  std::vector<std::byte> slots = std::vector<std::byte>(size_t{kSlots} * kSlotBytes);
  uint64_t step = 0;  // of the kernel
};

struct StreamCase {
  const char* port;
  size_t queuePairs;
  bool splitsData;
  uint64_t threshold;
  bool flushes = false;  // as in memory of a GPU, where data are only after a flush
};

class VerbsStreams : public ::testing::TestWithParam<StreamCase> {};

// The queue pairs run ahead of each other (FAKE_VERBS_DELAY).
TEST_P(VerbsStreams, MoveSlotsOfAnySize) {
  std::mt19937 random(test::seed());
  testing::fakeVerbsCounter("fakeVerbsLargest", true);
  VerbsOptions options;
  options.queuePairs = GetParam().queuePairs;
  options.splitsData = GetParam().splitsData;
  options.adaptiveRouting = GetParam().threshold > 0;
  options.adaptiveRoutingThreshold = GetParam().threshold;
  const VerbsPort port = portOf(GetParam().port);
  End from, to;
  VerbsRegion slots{nullptr, nullptr};
  if (GetParam().flushes) {
    slots = {library().registerMemory(port.device->domain(), to.slots.data(), to.slots.size(),
                                      VerbsReceiveStream::accessOf(options, true)),
             library().dereg_mr};
  }
  VerbsReceiveStream receive(port, options, to.memory(), std::move(slots), GetParam().flushes);
  VerbsSendStream send(port, options, receive.endpoint().queuePairs, from.memory());
  send.connect(receive.endpoint());
  receive.connect(send.endpoint());
  std::vector<std::vector<std::byte>> sent;
  constexpr size_t kCount = 150;
  for (size_t taken = 0; taken < kCount && send.failure().empty() && receive.failure().empty();) {
    if (std::atomic_ref(from.head).load() + End::kSlots > from.step && sent.size() < kCount) {
      std::vector<std::byte> data(random() % 4 == 0 ? 0 : random() % (End::kSlotBytes + 1));
      for (std::byte& byte : data) byte = static_cast<std::byte>(random());
      std::copy(data.begin(), data.end(), from.slot());
      std::atomic_ref(from.tail[device::kReportsWord + from.step % End::kSlots]).store(data.size());
      std::atomic_ref(from.tail[0]).store(++from.step, std::memory_order_release);
      sent.push_back(std::move(data));
    }
    if (random() % 2 == 0) send.progress();
    if (random() % 2 == 0) receive.progress();
    if (std::atomic_ref(to.tail[0]).load(std::memory_order_acquire) <= to.step) {
      std::this_thread::yield();
      continue;
    }
    const std::vector<std::byte> got(to.slot(), to.slot() + sent[taken].size());
    ASSERT_EQ(got, sent[taken]) << "slot " << taken;
    std::atomic_ref(to.head).store(++to.step, std::memory_order_release);
    taken++;
  }
  EXPECT_EQ(send.failure() + receive.failure(), "");
  await([&] { return static_cast<void>(send.progress()), !send.isPending(); });
  // With adaptive routing large data go before the immediate data.
  const int largest = testing::fakeVerbsCounter("fakeVerbsLargest");
  if (GetParam().threshold > 0) {
    EXPECT_LE(largest, static_cast<int>(GetParam().threshold));
  } else {
    EXPECT_GT(largest, 1000);
  }
}
INSTANTIATE_TEST_SUITE_P(
    All, VerbsStreams,
    ::testing::Values(StreamCase{"a0:1", 1, false, 0}, StreamCase{"a1:1", 1, false, 1000},
                      StreamCase{"b0:1", 4, false, 0}, StreamCase{"b0:1", 4, true, 0},
                      StreamCase{"a0:1", 3, true, 500}, StreamCase{"a0:1", 1, false, 0, true},
                      StreamCase{"b0:1", 4, true, 0, true},
                      StreamCase{"a1:1", 3, false, 500, true}));

}  // namespace
}  // namespace unisono::transport
