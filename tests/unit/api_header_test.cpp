// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstring>

extern "C" {
extern const ncclConfig_t cConfig;
extern const ncclSimInfo_t cSimInfo;
ncclComm_t noCommunicator(void);
}

namespace {

TEST(ApiHeader, ConfigInitializerLeavesEverythingUnset) {
  const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(config.size, 80u);
  EXPECT_EQ(config.magic, 0xcafebeefu);
  EXPECT_EQ(config.version, 22809u);
  const int unset = -2147483647 - 1;
  EXPECT_EQ(config.blocking, unset);
  EXPECT_EQ(config.cgaClusterSize, unset);
  EXPECT_EQ(config.minCTAs, unset);
  EXPECT_EQ(config.maxCTAs, unset);
  EXPECT_EQ(config.netName, nullptr);
  EXPECT_EQ(config.splitShare, unset);
  EXPECT_EQ(config.trafficClass, unset);
  EXPECT_EQ(config.commName, nullptr);
  EXPECT_EQ(config.collnetEnable, unset);
  EXPECT_EQ(config.CTAPolicy, unset);
  EXPECT_EQ(config.shrinkShare, unset);
  EXPECT_EQ(config.nvlsCTAs, unset);
  EXPECT_EQ(config.nChannelsPerNetPeer, unset);
  EXPECT_EQ(config.nvlinkCentricSched, unset);
}

TEST(ApiHeader, SimInfoInitializerLeavesTheTimeUnset) {
  const ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  EXPECT_EQ(info.size, 24u);
  EXPECT_EQ(info.magic, 0x74685283u);
  EXPECT_EQ(info.version, 22809u);
  EXPECT_EQ(info.estimatedTime, -1.0f);
  EXPECT_EQ(NCCL_UNDEF_FLOAT, -1.0f);
}

TEST(ApiHeader, CMakesTheSameOfTheInitializersAsCxx) {
  const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // It has no padding: the fields fill its 80 bytes.
  EXPECT_EQ(std::memcmp(&cConfig, &config, sizeof config), 0);
  const ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  EXPECT_EQ(cSimInfo.size, info.size);
  EXPECT_EQ(cSimInfo.magic, info.magic);
  EXPECT_EQ(cSimInfo.version, info.version);
  EXPECT_EQ(cSimInfo.estimatedTime, info.estimatedTime);
  EXPECT_EQ(noCommunicator(), nullptr);
}

TEST(ApiHeader, SuffixIsEmpty) {
  EXPECT_STREQ(NCCL_SUFFIX, "");
}

}  // namespace
