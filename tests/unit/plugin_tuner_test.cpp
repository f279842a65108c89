// SPDX-License-Identifier: Apache-2.0
#include "plugin/tuner.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

// The plug-ins are the fake one of plugin_fake_tuner.c, one library for each version.
namespace unisono::plugin {
namespace {

using tuning::Algorithm;
using tuning::Protocol;

constexpr size_t kRing = static_cast<size_t>(Algorithm::ring);
constexpr size_t kSimple = static_cast<size_t>(Protocol::simple);
constexpr TunedCommunicator kCommunicator{77, 8, 2, 3, 5};

std::string pathOf(int version) {
  return std::string(UNISONO_FAKE_TUNERS) + "/libnccl-tuner-fake" + std::to_string(version) + ".so";
}

// The number that the plug-in counts.
int counter(int version, const char* name) {
  void* library = ::dlopen(pathOf(version).c_str(), RTLD_NOW | RTLD_LOCAL);
  const int value = *static_cast<int*>(::dlsym(library, name));
  ::dlclose(library);
  return value;
}

tuning::TimeTable timesOfRings() {
  tuning::TimeTable times;
  for (auto& row : times) row.fill(tuning::kExcluded);
  times[kRing] = {5, 6, 7};
  return times;
}

class Tuner : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { ::unsetenv("FAKE_TUNER"); }
  void TearDown() override { ::unsetenv("FAKE_TUNER"); }
  // Keeps the library loaded, so that its counters can be read.
  std::shared_ptr<const TunerLibrary> library_ = TunerLibrary::open(pathOf(GetParam()));
  tuning::CostConstants constants_ = tuning::defaultConstants();
};

TEST_P(Tuner, ChangesTimesChannelsAndConstants) {
  const int version = GetParam();
  ASSERT_NE(library_, nullptr);
  EXPECT_EQ(library_->name(), "Fake (v" + std::to_string(version) + ")");
  auto plugin = TunerPlugin::create(library_, kCommunicator, constants_);
  ASSERT_NE(plugin, nullptr);
  EXPECT_EQ(counter(version, "fakeTunerOpen"), 1);
  EXPECT_EQ(counter(version, "fakeTunerRanks"), 8);
  EXPECT_EQ(counter(version, "fakeTunerNodes"), 2);
  EXPECT_EQ(constants_.baseLatency[kRing][kSimple], version >= 5 ? 5000 : 8.4);
  auto times = timesOfRings();
  EXPECT_EQ(plugin->advise({tuning::Operation::allGather, 12345}, times), 2);
  EXPECT_EQ(times[kRing][kSimple], 0);
  EXPECT_EQ(times[kRing][0], 5);
  EXPECT_EQ(times[0][0], tuning::kExcluded);
  EXPECT_EQ(counter(version, "fakeTunerOperation"), 2) << "ncclFuncAllGather";
  tuning::Choice choice;
  choice.chunkBytes = 1000;
  EXPECT_EQ(plugin->adviseChunk({}, choice), version == 6 ? 500u : 1000u);
  choice.algorithm = Algorithm::direct;
  EXPECT_EQ(plugin->adviseChunk({}, choice), 1000u) << "it knows nothing of ours";
  plugin.reset();
  EXPECT_EQ(counter(version, "fakeTunerOpen"), 0);
}

TEST_P(Tuner, NonsenseIsIgnoredWithOneWarning) {
  for (const char* mode : {"nan", "negative", "excluded", "channels"}) {
    SCOPED_TRACE(mode);
    // Version 2 answers with two numbers, not with times.
    const bool timesMatter = std::string(mode) != "channels" && std::string(mode) != "excluded";
    if (GetParam() == 2 && timesMatter) continue;
    ::unsetenv("FAKE_TUNER");
    auto plugin = TunerPlugin::create(library_, kCommunicator, constants_);
    ASSERT_NE(plugin, nullptr);
    ::setenv("FAKE_TUNER", mode, 1);
    auto times = timesOfRings();
    EXPECT_EQ(plugin->advise({}, times), 0);
    EXPECT_EQ(times, timesOfRings());
    // Not asked again.
    ::unsetenv("FAKE_TUNER");
    EXPECT_EQ(plugin->advise({}, times), 0);
    EXPECT_EQ(times, timesOfRings());
  }
}

TEST_P(Tuner, AnErrorLeavesTheCallToTheLibrary) {
  auto plugin = TunerPlugin::create(library_, kCommunicator, constants_);
  ASSERT_NE(plugin, nullptr);
  ::setenv("FAKE_TUNER", "call fails", 1);
  auto times = timesOfRings();
  EXPECT_EQ(plugin->advise({}, times), 0);
  EXPECT_EQ(times, timesOfRings());
  ::unsetenv("FAKE_TUNER");
  EXPECT_EQ(plugin->advise({}, times), 2) << "and it is asked again";
}

TEST_P(Tuner, OneThatRefusesIsIgnored) {
  ::setenv("FAKE_TUNER", "init fails", 1);
  EXPECT_EQ(TunerPlugin::create(library_, kCommunicator, constants_), nullptr);
  EXPECT_EQ(counter(GetParam(), "fakeTunerOpen"), 0) << "finalize does not follow a failed init";
  EXPECT_EQ(constants_, tuning::defaultConstants());
  if (GetParam() < 5) return;
  ::setenv("FAKE_TUNER", "constants", 1);
  EXPECT_EQ(TunerPlugin::create(library_, kCommunicator, constants_), nullptr);
  EXPECT_EQ(counter(GetParam(), "fakeTunerOpen"), 0);
  EXPECT_EQ(constants_, tuning::defaultConstants());
}

INSTANTIATE_TEST_SUITE_P(Versions, Tuner, ::testing::Values(2, 3, 4, 5, 6));

TEST(TunerLibrary, IsFoundByPathAndByWord) {
  EXPECT_EQ(TunerLibrary::open("none"), nullptr);
  EXPECT_EQ(TunerLibrary::open("/nowhere/libnccl-tuner-x.so"), nullptr);
  EXPECT_EQ(TunerLibrary::open("no-such-word"), nullptr);
  EXPECT_EQ(TunerLibrary::open(""), nullptr) << "there is no libnccl-tuner.so here";
  EXPECT_EQ(TunerLibrary::open("STATIC_PLUGIN"), nullptr) << "this program has no plug-in";
  EXPECT_EQ(TunerLibrary::open("libm.so.6"), nullptr) << "a library, but no plug-in";
  // A word stands for libnccl-tuner-WORD.so on the library path, which the test's environment sets.
  ASSERT_NE(TunerLibrary::open("fake4"), nullptr);
  EXPECT_EQ(TunerLibrary::open("fake4")->name(), "Fake (v4)");
}

}  // namespace
}  // namespace unisono::plugin
