// SPDX-License-Identifier: Apache-2.0
#include "comm/node_links.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "detect/detect.h"
#include "detect_testing.h"
#include "topology/xml.h"

namespace unisono::comm {
namespace {

using detect::NvmlSource;
using detect::testing::FakeNvml;
using detect::testing::links;
using Remote = NvmlSource::NvLink::Remote;

// GPUs with all kinds of links.
FakeNvml machine() {
  FakeNvml driver;
  auto& first = driver.add("0000:01:00.0");
  first.links = links(4, "0000:05:00.0", Remote::nvswitch);
  for (const auto& link : links(5, "0000:06:00.0", Remote::nvswitch)) first.links.push_back(link);
  first.links.push_back(first.links.front());  // not next to the others
  auto& second = driver.add("0000:02:00.0");
  second.links = links(3, "FFFFFFFF:FFFF:FF.0");
  second.chip = {10, 44'000};
  driver.add("0000:03:00.0").links = links(2, "0000:04:00.0", Remote::gpu);
  driver.add("0000:04:00.0").links = links(1, "0000:03:00.0", Remote::gpu);
  driver.add("0000:07:00.0").links = links(1, "no address");
  return driver;
}

std::vector<NodeDevice> devicesOf(FakeNvml& driver) {
  std::vector<NodeDevice> devices;
  for (const topology::BusId gpu : driver.order) {
    devices.push_back({gpu, 90, true, false, 0, 0, packLinks(driver, gpu), {}});
  }
  return devices;
}

std::string detected(NvmlSource& driver) {
  const detect::testing::FakeRoot root;
  detect::DetectRequest request;
  request.root = root.path();
  request.nvml = &driver;
  return topology::writeTopologyXml(detect::detectMachine(request).topology);
}

TEST(NodeLinks, AreThoseThatEachRankHasAskedFor) {
  FakeNvml driver = machine();
  const std::vector<NodeDevice> devices = devicesOf(driver);
  const std::string expected = detected(driver);
  EXPECT_NE(expected.find("nvlink target=\"0000:06:00.0\" count=\"5\""), std::string::npos);
  for (const topology::BusId gpu : driver.order) {
    driver.known[gpu].links.clear();  // nobody asks again
    driver.known[gpu].chip = {};
  }
  NodeLinks shared(driver, devices);
  EXPECT_EQ(detected(shared), expected);
}

TEST(NodeLinks, AreThoseOfTheDriverWhereNoRankKnowsThem) {
  FakeNvml driver = machine();
  const std::string expected = detected(driver);
  std::vector<NodeDevice> devices = devicesOf(driver);
  devices[0].links = {};
  devices.pop_back();
  NodeLinks shared(driver, devices);
  EXPECT_EQ(detected(shared), expected);
}

TEST(NodeLinks, OfGpusThatTheRuntimeSeesNeedNoDriver) {
  FakeNvml driver = machine();
  std::vector<NodeDevice> devices = devicesOf(driver);
  for (size_t i = 0; i < devices.size(); i++) EXPECT_EQ(devices[i].links.index, i);
  const topology::BusId first = driver.order[0], second = driver.order[1];
  driver.refused = {{first, second}};
  NodeLinks shared(driver, devices);
  EXPECT_FALSE(shared.peerAllowed(first, second));
  devices[0].reachIsCertain = true;
  EXPECT_FALSE(shared.peerAllowed(second, first)) << "one of them is not seen";
  devices[1].reachIsCertain = true;
  EXPECT_TRUE(shared.peerAllowed(first, second)) << "the runtime has said that they are peers";
}

// A rank tells nothing rather than a part.
TEST(NodeLinks, ToTooManyPlacesAreNotTold) {
  FakeNvml driver;
  auto& gpu = driver.add("0000:01:00.0");
  for (size_t i = 0; i <= LinkFacts::kMostTargets; i++) {
    EXPECT_EQ(packLinks(driver, driver.order[0]).isKnown, 1) << i;
    gpu.links.push_back(
        {topology::formatBusId(0x50000 + static_cast<topology::BusId>(i) * 16), Remote::nvswitch});
  }
  EXPECT_EQ(packLinks(driver, driver.order[0]).isKnown, 0);
}

}  // namespace
}  // namespace unisono::comm
