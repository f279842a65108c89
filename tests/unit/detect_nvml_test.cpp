// SPDX-License-Identifier: Apache-2.0
#include "detect/nvml.h"

#include <gmock/gmock.h>

#include "detect/detect.h"
#include "detect_testing.h"

namespace unisono::detect {
namespace {

using topology::parseBusId;

TEST(DetectNvml, AsksTheDriversLibrary) {
  std::string problem;
  const auto nvml = loadNvml(UNISONO_FAKE_NVML, problem);
  ASSERT_NE(nvml, nullptr) << problem;
  const topology::BusId first = parseBusId("0000:41:00.0"), second = parseBusId("0000:42:00.0");
  EXPECT_EQ(nvml->gpus(), (std::vector<topology::BusId>{first, second}));
  EXPECT_EQ(nvml->computeCapability(first), 86);
  EXPECT_EQ(nvml->computeCapability(second), 90);
  const auto links = nvml->nvlinks(first);
  ASSERT_EQ(links.size(), 2u) << "one link is down, one carries no memory traffic";
  EXPECT_EQ(links[0].remoteBusId, "00000000:42:00.0");
  EXPECT_EQ(links[0].remote, NvmlSource::NvLink::Remote::gpu);
  EXPECT_EQ(links[1].remoteBusId, "FFFFFFFF:FF:FF.0");
  EXPECT_EQ(links[1].remote, NvmlSource::NvLink::Remote::nvswitch);
  EXPECT_EQ(nvml->nvlinks(second).size(), 3u);
  EXPECT_EQ(nvml->chipLink(first).count, 2);
  EXPECT_EQ(nvml->chipLink(first).megabytes, 40000);
  EXPECT_EQ(nvml->chipLink(second).count, 0);
  EXPECT_FALSE(nvml->peerAllowed(first, second));
  EXPECT_TRUE(nvml->peerAllowed(first, first));
  ASSERT_TRUE(nvml->fabric(first));
  EXPECT_EQ(nvml->fabric(first)->clique, 5u);
  EXPECT_EQ(nvml->fabric(first)->cluster[15], 9);
  EXPECT_FALSE(nvml->fabric(second)) << "it has not joined yet";
  const topology::BusId unknown = parseBusId("0000:99:00.0");
  EXPECT_EQ(nvml->computeCapability(unknown), 0);
  EXPECT_TRUE(nvml->nvlinks(unknown).empty());
  EXPECT_TRUE(nvml->peerAllowed(first, unknown));
  EXPECT_FALSE(nvml->fabric(unknown));
}

TEST(DetectNvml, TheLibraryIsShutDownWithItsOwner) {
  for (int round = 0; round < 2; round++) {
    std::string problem;
    EXPECT_NE(loadNvml(UNISONO_FAKE_NVML, problem), nullptr) << problem;
  }
}

TEST(DetectNvml, WhatCannotBeLoadedSaysWhy) {
  std::string problem;
  EXPECT_EQ(loadNvml("libunisono-no-such-library.so", problem), nullptr);
  EXPECT_THAT(problem, ::testing::HasSubstr("libunisono-no-such-library.so"));
  EXPECT_EQ(loadNvml("libm.so.6", problem), nullptr);
  EXPECT_THAT(problem, ::testing::HasSubstr("nvmlInit_v2"));
}

TEST(DetectNvml, MachineOfItsAnswers) {
  testing::FakeRoot root;
  root.gpu("pci0000:41/0000:41:00.0");
  root.gpu("pci0000:41/0000:42:00.0", {{"class", "0x030000"}});
  std::string problem;
  const auto nvml = loadNvml(UNISONO_FAKE_NVML, problem);
  ASSERT_NE(nvml, nullptr) << problem;
  DetectRequest request;
  request.root = root.path();
  request.nvml = nvml.get();
  const Detected detected = detectMachine(request);
  const std::string text = topology::writeTopologyXml(detected.topology);
  EXPECT_THAT(text,
              ::testing::HasSubstr(
                  "<gpu dev=\"0\" sm=\"86\" gdr=\"1\">\n"
                  "        <nvlink target=\"0000:42:00.0\" count=\"1\" tclass=\"0x030000\"/>\n"
                  "        <nvlink target=\"fffffff:ff:ff.0\" count=\"1\" tclass=\"0x068000\"/>\n"
                  "        <c2c bw=\"40000\" count=\"2\"/>\n"));
  EXPECT_THAT(text,
              ::testing::HasSubstr(
                  "<gpu dev=\"1\" sm=\"90\" gdr=\"0\">\n"
                  "        <nvlink target=\"0000:41:00.0\" count=\"1\" tclass=\"0x030200\"/>\n"));
  EXPECT_EQ(detected.p2pRefused, (std::set<std::pair<int, int>>{{0, 1}}));
}

}  // namespace
}  // namespace unisono::detect
