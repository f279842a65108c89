// SPDX-License-Identifier: Apache-2.0
#include "plugin/net.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/unique_descriptor.h"
#include "plugin/tuner.h"
#include "support/fake_net.h"

// The plug-ins are the fake one of system/fake_net.c, one library for each version.
namespace unisono::plugin {
namespace {

// Opens a plug-in and collects the warnings.
std::shared_ptr<const Net> open(const std::string& plugins, const std::string& name = "",
                                std::string* warnings = nullptr) {
  return Net::open(plugins, name, {77, 5}, [&](const std::string& text) {
    if (warnings != nullptr) *warnings += text + "\n";
  });
}

class NetVersions : public ::testing::TestWithParam<int> {};

TEST_P(NetVersions, DescribePortsAndMoveMessages) {
  const int version = GetParam();
  ::setenv("FAKE_NET_POINTERS", "7", 1);
  ::setenv("FAKE_NET_LATE", "1", 1);
  auto net = open(testing::fakeNetPath(version));
  ASSERT_NE(net, nullptr);
  EXPECT_EQ(net->name(), "Fake" + std::to_string(version) + " (v" + std::to_string(version) + ")");
  ASSERT_EQ(net->ports().size(), 2u);
  const NetPort& port = net->ports()[0];
  EXPECT_EQ(port.name, "fake0");
  EXPECT_EQ(port.pciPath, "/sys/devices/pci0000:00/0000:0a:00.0");
  EXPECT_EQ(net->ports()[1].pciPath, "");
  EXPECT_EQ(port.guid, 70u);
  EXPECT_TRUE(port.reachesGpus && port.takesDmaBufs);
  EXPECT_EQ(port.forcesFlush, version >= 9);
  EXPECT_EQ(port.megabits, 100'000);
  EXPECT_EQ(port.number, 1);
  EXPECT_EQ(port.latency, 2.5f);
  EXPECT_EQ(port.connections, 1000);
  EXPECT_EQ(net->ports()[1].receives, 8);
  EXPECT_EQ(port.messageBytes, size_t{1} << 30);

  const NetFunctions& functions = net->functions();
  const auto ok = [](int result) { ASSERT_EQ(result, kSuccess); };
  NetHandle handle;
  void *listener = nullptr, *sender = nullptr, *receiver = nullptr;
  ok(functions.listen(net->context(), 1, handle, &listener));
  while (sender == nullptr || receiver == nullptr) {
    if (sender == nullptr) ok(functions.connect(net->context(), 5, 1, handle, &sender));
    if (receiver == nullptr) ok(functions.accept(listener, &receiver));
  }
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetTrafficClass"), version >= 10 ? 5 : 0);
  ok(functions.closeListener(listener));
  char text[] = "some message";
  // Memory of the GPU, as a DMA-BUF would be mapped: a file.
  constexpr size_t kBytes = 8192, kOffset = 4096;
  const UniqueDescriptor file(::memfd_create("fake GPU", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kOffset + kBytes), 0);
  char* const got = static_cast<char*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), kOffset));
  void *from = nullptr, *to = nullptr, *sends = nullptr, *receives = nullptr;
  ok(functions.registerMemory(sender, text, sizeof(text), kHostMemory, &from));
  ok(functions.registerMemory(receiver, got, kBytes, kDeviceMemory, &to));
  ok(functions.deregisterMemory(receiver, to));
  ok(functions.registerDmaBuf(receiver, got, kBytes, kOffset, file.get(), &to));
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetGpuRegions"), 1);
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetDmaBufs"), 1);
  ok(functions.send(sender, text, sizeof(text), from, nullptr, &sends));
  ok(functions.receive(receiver, got, kBytes, to, nullptr, &receives));
  int done = 0, bytes = 0;
  while (done == 0) ok(functions.test(sends, &done, &bytes));
  EXPECT_EQ(bytes, static_cast<int>(sizeof(text)));
  for (done = 0; done == 0;) ok(functions.test(receives, &done, &bytes));
  EXPECT_EQ(bytes, static_cast<int>(sizeof(text)));
  EXPECT_STREQ(got, "") << "FAKE_NET_LATE";
  void* flush = nullptr;
  ok(functions.flush(receiver, got, bytes, to, &flush));
  ASSERT_NE(flush, nullptr);
  for (done = 0; done == 0;) ok(functions.test(flush, &done, nullptr));
  EXPECT_STREQ(got, text);
  ::munmap(got, kBytes);
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetFlushes"), 1);
  ok(functions.deregisterMemory(sender, from));
  ok(functions.deregisterMemory(receiver, to));
  ok(functions.closeSender(sender));
  ok(functions.closeReceiver(receiver));
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetOpen"), version >= 11 ? 1 : 0);

  // A second communicator has a context of its own in versions that know contexts.
  const auto other = open(testing::fakeNetPath(version));
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetInits"), version >= 11 ? 2 : 1);
  net.reset();
  EXPECT_EQ(testing::fakeNetCounter(version, "fakeNetOpen"), version >= 11 ? 1 : 0)
      << "finalize was called";
  ::unsetenv("FAKE_NET_POINTERS");
  ::unsetenv("FAKE_NET_LATE");
}

INSTANTIATE_TEST_SUITE_P(All, NetVersions, ::testing::Range(6, 13));

TEST(Nets, AreTakenInTheOrderOfTheList) {
  std::string warnings;
  const auto first = open("no-such-word,libm.so.6,fake8,fake10", "", &warnings);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->name(), "Fake8 (v8)");
  EXPECT_NE(warnings.find("no-such-word"), std::string::npos) << warnings;
  EXPECT_NE(warnings.find("libm.so.6 is ignored: it has none of"), std::string::npos) << warnings;
  const auto named = open("fake8,fake10", "fAKE10");
  ASSERT_NE(named, nullptr);
  EXPECT_EQ(named->name(), "Fake10 (v10)");
}

TEST(Nets, MayBringATuner) {
  const auto with = open("fake9");
  ASSERT_NE(with, nullptr);
  const auto tuner = TunerLibrary::open("");
  ASSERT_NE(tuner, nullptr);
  EXPECT_EQ(tuner->name(), "Fake (v4)");
  EXPECT_EQ(TunerLibrary::open("none"), nullptr);
  const auto without = open("fake8");
  ASSERT_NE(without, nullptr);
  std::string warnings;
  EXPECT_EQ(TunerLibrary::open("", [&](const std::string& text) { warnings += text; }), nullptr);
  EXPECT_EQ(warnings, "") << "net plug-ins need no tuner";
}

TEST(Nets, MayBeNone) {
  for (const char* plugins : {"none", "NONE", "", "no-such-word", "STATIC_PLUGIN"}) {
    EXPECT_EQ(open(plugins), nullptr) << plugins;
  }
  for (const char* own : {"Socket", "socket", "IB"}) EXPECT_EQ(open("fake8", own), nullptr) << own;
}

TEST(Nets, WithANameThatNothingHasAreAnError) {
  try {
    open("fake8", "Fabric7");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    for (const char* part : {"\"Fabric7\"", "Fake8", "Socket"}) {
      EXPECT_NE(std::strstr(error.what(), part), nullptr) << error.what();
    }
  }
}

struct Refusal {
  const char *mode, *text;
  int version;
};
void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.mode;
}

class NetRefusalsDeathTest : public ::testing::TestWithParam<Refusal> {};

// In a process of its own, before the other tests: what has failed once is not tried again.
TEST_P(NetRefusalsDeathTest, AreNamedAndTheNextOneIsTried) {
  const Refusal& refusal = GetParam();
  const auto run = [&] {
    ::setenv("FAKE_NET", refusal.mode, 1);
    std::string warnings;
    const std::string list = "fake" + std::to_string(refusal.version);
    bool good = open(list, "", &warnings) == nullptr;
    good = good && warnings.find("Fake" + std::to_string(refusal.version)) != std::string::npos &&
           warnings.find(refusal.text) != std::string::npos;
    good = good && testing::fakeNetCounter(refusal.version, "fakeNetOpen") == 0;
    ::unsetenv("FAKE_NET");
    std::string again;
    const auto next = open(list + ",fake10", "", &again);
    good = good && next != nullptr && next->name() == "Fake10 (v10)" && again == warnings;
    std::fprintf(stderr, "%s", warnings.c_str());
    std::_Exit(good ? 0 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(
    All, NetRefusalsDeathTest,
    ::testing::Values(Refusal{"init fails", "its init returned 2 (ncclSystemError)", 8},
                      Refusal{"init fails", "its init returned 2 (ncclSystemError)", 11},
                      Refusal{"no devices", "it has no devices", 6},
                      Refusal{"no devices", "it has no devices", 12},
                      Refusal{"properties fail", "its getProperties of device 0 returned", 9},
                      Refusal{"on the device", "needs code on the GPU", 7}));

}  // namespace
}  // namespace unisono::plugin
