// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "topology/machine.h"
#include "topology/presets.h"
#include "topology/xml_merge.h"
#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::foreignTopology;
using testing::ownTopology;
using testing::readFile;

// Collects the devices of a tree as a virtual machine shows them: no bridges, one NUMA node.
void collectDevices(const XmlNode& node, XmlNode& flat) {
  for (const XmlNode& child : node.children) {
    if (child.name != "pci") continue;
    const bool device = std::any_of(child.children.begin(), child.children.end(), [](auto& inner) {
      return inner.name == "gpu" || inner.name == "nic";
    });
    if (device) flat.children.push_back(child);
    collectDevices(child, flat);
  }
}

void markKept(XmlNode& node) {
  if (node.name == "gpu" || node.name == "net") node.set("keep", "1");
  for (XmlNode& child : node.children) markKept(child);
}

XmlNode detectedInVm(const XmlNode& whole) {
  XmlNode system{"system", {{"version", "1"}}, {}, 0};
  XmlNode& cpu = system.addChild("cpu");
  cpu.set("host_hash", "0x77");
  cpu.set("numaid", "-1");
  for (const XmlNode& own : whole.children) collectDevices(own, cpu);
  markKept(system);
  return system;
}

// Removes what a platform's file does not tell.
void makeSkeleton(XmlNode& node) {
  std::erase_if(node.children, [](const XmlNode& child) { return child.name == "gpu"; });
  if (node.name == "net") {
    std::erase_if(node.attributes, [](const auto& entry) { return entry.name != "name"; });
  }
  for (XmlNode& child : node.children) makeSkeleton(child);
}

std::string described(XmlNode system, std::string_view name) {
  return describeTopology(
      Machine(buildTopology(checkTopologyXml(std::move(system), name)), PathSettings{}));
}

TEST(Merge, PutsHiddenBridgesBack) {
  for (const char* name : {"dgx-h100", "dgx-a100", "rtx3090-x8", "scale-16x16"}) {
    const XmlNode whole = describeMachine(preset(name)).system;
    XmlNode platform = whole;
    makeSkeleton(platform);
    mergeTopology(platform, detectedInVm(whole));
    trimToKept(platform);
    EXPECT_EQ(described(platform, name), described(whole, name));
    for (const XmlNode& cpu : platform.children) EXPECT_EQ(*cpu.find("host_hash"), "0x77");
  }
}

TEST(Merge, CompletesAPlatformsFileToWhatTheOriginalSaw) {
  const auto path = foreignTopology("h800x8-vm.virtual.xml");
  if (!path) GTEST_SKIP() << "the files of known machines are not next to this checkout";
  const XmlNode whole = parseTopologyXml(ownTopology("h800x8-vm.detected.xml"), "h800").system;
  XmlNode platform = parseTopologyXml(readFile(*path), "virtual").system;
  mergeTopology(platform, detectedInVm(whole));
  trimToKept(platform);
  EXPECT_EQ(described(platform, "merged"), described(whole, "h800"));
}

TEST(Merge, JoinsWhatTwoRanksSee) {
  const XmlNode whole = describeMachine(preset("hgx-h200x4")).system;
  XmlNode first = whole, second = whole;
  std::erase_if(first.children[0].children,
                [](auto& pci) { return *pci.find("busid") >= "0000:12"; });
  std::erase_if(second.children[0].children,
                [](auto& pci) { return *pci.find("busid") < "0000:11"; });
  mergeTopology(first, second);
  EXPECT_EQ(described(first, "joined"), described(whole, "whole"));
}

TEST(Merge, OfAFileWithItselfChangesNothing) {
  std::vector<XmlNode> files{
      parseXml(ownTopology("h800x8-vm.detected.xml"), "h800"),
      parseXml(
          "<system version=\"1\"><cpu numaid=\"0\"><nic><net name=\"a\" dev=\"0\"/></nic>"
          "<nic><net name=\"b\" dev=\"1\"/><net name=\"b\" dev=\"2\"/></nic><nic/></cpu></system>",
          "adapters without devices")};
  for (const std::string& name : presetNames()) {
    files.push_back(describeMachine(preset(name)).system);
  }
  for (const XmlNode& file : files) {
    XmlNode merged = file;
    mergeTopology(merged, file);
    EXPECT_EQ(writeXml(merged), writeXml(file));
  }
}

TEST(Merge, KeepsHostsApart) {
  XmlNode first = describeMachine(preset("hgx-h200x4")).system, second = first;
  first.children[0].set("host_hash", "0x1");
  second.children[0].set("host_hash", "0x2");
  for (XmlNode& pci : second.children[0].children) {
    pci.children[0].set("rank", std::to_string(4 + std::stoi(*pci.children[0].find("rank"))));
  }
  mergeTopology(first, second);
  const XmlTopology joined = checkTopologyXml(first, "joined");
  EXPECT_EQ(gpusOf(joined).size(), 8u);
  EXPECT_EQ(buildTopology(joined).hosts.size(), 2u);
}

TEST(Merge, TheFileWinsAndDetectionFillsIn) {
  XmlNode file = parseXml(
      "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\" link_speed=\"\" "
      "link_width=\"8\"/></cpu></system>",
      "file");
  mergeTopology(file, parseXml("<system version=\"1\"><cpu numaid=\"3\"><pci busid=\"01:00.0\" "
                               "link_speed=\"16 GT/s\" link_width=\"16\"><gpu dev=\"0\"/></pci>"
                               "</cpu></system>",
                               "found"));
  ASSERT_EQ(file.children.size(), 1u) << "the other NUMA node brings nothing new";
  XmlNode* pci = findDevice(file, 0, parseBusId("0000:01:00.0"));
  ASSERT_TRUE(pci);
  EXPECT_EQ(*pci->find("link_speed"), "16 GT/s");
  EXPECT_EQ(*pci->find("link_width"), "8");
  EXPECT_EQ(pci->children.size(), 1u);
  EXPECT_FALSE(findDevice(file, 0, parseBusId("0000:02:00.0")));
}

TEST(Trim, LeavesOutWhatIsNotKept) {
  XmlNode system = describeMachine(preset("dgx-h100")).system;
  XmlNode* gpu = findDevice(system, 0, gpusOf(checkTopologyXml(system, "x"))[2].busId);
  ASSERT_TRUE(gpu);
  gpu->children[0].set("keep", "1");
  trimToKept(system);
  EXPECT_EQ(system.children.size(), 1u);
  const XmlTopology rest = checkTopologyXml(system, "rest");
  ASSERT_EQ(gpusOf(rest).size(), 1u);
  EXPECT_EQ(gpusOf(rest)[0].dev, 2);
  EXPECT_EQ(writeTopologyXml(rest).find("keep"), std::string::npos);
  EXPECT_NE(writeTopologyXml(rest).find("nvlink"), std::string::npos);
}

}  // namespace
}  // namespace unisono::topology
