// SPDX-License-Identifier: Apache-2.0
#include "comm/device_clock.h"

#include <gtest/gtest.h>

#include "runtime_host_testing.h"

namespace unisono::comm {
namespace {

// Times of the device, in nanoseconds.
constexpr uint64_t kBegan = 5'000'000'000, kEnded = kBegan + 2'000;

struct DeviceClockTest : ::testing::Test {
  runtime::host::HostRuntime runtime{runtime::host::hostSettings()};
  DeviceClock clock{runtime, 0};
  const int64_t began = clock.steadyOf(kBegan).value();
};

TEST_F(DeviceClockTest, KeepsWhatFits) {
  clock.fit(kBegan, kEnded, began, began + 2'000);
  EXPECT_EQ(clock.steadyOf(kBegan), began);
  clock.fit(kBegan, kEnded, 0, began + 1'000'000);
  EXPECT_EQ(clock.steadyOf(kBegan), began);
}

TEST_F(DeviceClockTest, MovesTimesThatAreTooEarlyOrTooLate) {
  clock.fit(kBegan, kEnded, began + 300, began + 10'000);
  EXPECT_EQ(clock.steadyOf(kBegan), began + 300);
  clock.fit(kBegan, kEnded, 0, began - 5'000);
  EXPECT_EQ(clock.steadyOf(kEnded), began - 5'000);
}

TEST_F(DeviceClockTest, NeverMovesTimesBehindTheLatest) {
  clock.fit(kBegan, kEnded, began, began + 1'000);  // which is less than it took
  EXPECT_EQ(clock.steadyOf(kEnded), began + 1'000);
}

}  // namespace
}  // namespace unisono::comm
