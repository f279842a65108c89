// SPDX-License-Identifier: Apache-2.0
#include "comm/launch_notes.h"

#include <gtest/gtest.h>

// What is kept of launches for reports of hangs.
namespace unisono::comm {
namespace {

TEST(LaunchNumbers, GrowAndTellThePlanAndItsEnd) {
  uint64_t before = 0;
  for (uint64_t plan = 1; plan <= 3; plan++) {
    for (uint64_t following : {uint64_t{1} << 20, kPlanLaunches - 1, uint64_t{2}, uint64_t{1}}) {
      const uint64_t number = launchNumber(plan, following);
      EXPECT_GE(number, before) << plan << ", " << following;
      EXPECT_EQ(planOf(number), plan);
      EXPECT_FALSE(isLastOfPlan(number));
      before = number;
    }
    EXPECT_GT(launchNumber(plan, 0), before);
    EXPECT_EQ(planOf(launchNumber(plan, 0)), plan);
    EXPECT_TRUE(isLastOfPlan(launchNumber(plan, 0)));
    before = launchNumber(plan, 0);
  }
}

TEST(LaunchNotes, AreKeptForEachLaunchOfAPlan) {
  constexpr uint64_t kPlans = 40, kLaunches = 3, kKept = 64;
  LaunchNotes notes;
  EXPECT_FALSE(notes.find(0));
  for (uint64_t plan = 1; plan <= kPlans; plan++) {
    for (uint64_t i = 0; i < kLaunches; i++) {
      plan::Launch launch;
      if (i == 0) {
        launch = plan::BarrierLaunch{};
      } else {
        plan::WideLaunch wide{};
        wide.blocks = static_cast<int>(i);
        wide.arguments.passLines = static_cast<uint32_t>(plan);
        launch = wide;
      }
      notes.add(launchNumber(plan, kLaunches - 1 - i), launch);
    }
  }
  for (uint64_t all = 0; all < kPlans * kLaunches; all++) {
    const uint64_t plan = 1 + all / kLaunches, i = all % kLaunches;
    const auto note = notes.find(launchNumber(plan, kLaunches - 1 - i));
    ASSERT_EQ(note.has_value(), all + kKept >= kPlans * kLaunches) << all;
    if (!note) continue;
    EXPECT_EQ(note->number, launchNumber(plan, kLaunches - 1 - i));
    EXPECT_EQ(note->kind, i == 0 ? LaunchNote::Kind::other : LaunchNote::Kind::wide);
    if (i == 0) continue;
    EXPECT_EQ(note->blocks, static_cast<int>(i));
    EXPECT_EQ(note->passLines, plan);
  }
}

}  // namespace
}  // namespace unisono::comm
