// SPDX-License-Identifier: Apache-2.0
#include "topology/xml.h"

#include <gtest/gtest.h>

#include "topology_testing.h"

namespace unisono::topology {
namespace {

using testing::errorOf;
using testing::foreignTopology;
using testing::ownTopology;
using testing::readFile;

// A machine of two linked GPUs, with room to break it.
constexpr std::string_view kTwoGpus = R"(<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="0" sm="80" rank="0" gdr="1">
        <nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>
      </gpu>
    </pci>
    <pci busid="0000:02:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="1" sm="80" rank="1" gdr="1">
        <nvlink target="0000:01:00.0" count="4" tclass="0x030200"/>
      </gpu>
    </pci>
  </cpu>
</system>
)";

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.rfind(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string errorOfText(const std::string& text) {
  return errorOf([&] { parseTopologyXml(text, "file"); });
}

TEST(BusIds, AreReadAndWritten) {
  EXPECT_EQ(parseBusId("0000:65:02.0"), 0x65020);
  EXPECT_EQ(parseBusId("65:02.0"), 0x65020);
  EXPECT_EQ(parseBusId("fffffff:ff:ff.0"), kHiddenBusId);
  EXPECT_EQ(formatBusId(0x65020), "0000:65:02.0");
  EXPECT_EQ(formatBusId(kHiddenBusId), "fffffff:ff:ff.0");
  for (const char* text : {"", "0000", "0000:65:02", "0000:65:g2.0", "0000:65:02.00", ":65:02.0",
                           "000000000:65:02.0", "0:0:65:02.0", "-1:65:02.0", " 0000:65:02.0"}) {
    EXPECT_EQ(parseBusId(text), kNoBusId) << text;
  }
}

TEST(TopologyXml, GivesTheGpusOfADetectedMachine) {
  const XmlTopology file = parseTopologyXml(ownTopology("h800x8-vm.detected.xml"), "h800");
  EXPECT_TRUE(file.notes.empty());
  const std::vector<GpuDescription> gpus = gpusOf(file);
  ASSERT_EQ(gpus.size(), 8u);
  for (int i = 0; i < 8; i++) {
    EXPECT_EQ(gpus[i].dev, i);
    EXPECT_EQ(gpus[i].rank, i);
    EXPECT_EQ(gpus[i].sm, 90);
    EXPECT_EQ(gpus[i].numa, i / 4);
    EXPECT_EQ(gpus[i].cpu, i / 4);
    EXPECT_EQ(gpus[i].host, 0);
  }
  EXPECT_EQ(formatBusId(gpus[4].busId), "0000:6f:02.0");
}

TEST(TopologyXml, IsWrittenAsItWasRead) {
  const std::string text = ownTopology("h800x8-vm.detected.xml");
  const XmlTopology file = parseTopologyXml(text, "h800");
  const std::string written = writeTopologyXml(file);
  EXPECT_EQ(writeTopologyXml(parseTopologyXml(written, "again")), written);
  EXPECT_EQ(written, text + (text.ends_with('\n') ? "" : "\n"));
}

TEST(TopologyXml, KeepsSpecialCharacters) {
  XmlNode system{"system", {{"version", "1"}, {"note", "<\"a\" & 'b'>\t\n"}}, {}, 0};
  const XmlNode again = parseXml(writeXml(system), "text");
  EXPECT_EQ(*again.find("note"), "<\"a\" & 'b'>\t\n");
}

TEST(TopologyXml, ReadsEveryKnownFile) {
  int files = 0;
  for (const char* name :
       {"aws-g5.48xl-topo.xml", "aws-p4d-24xl-topo.xml", "aws-p4de-24xl-topo.xml",
        "azure-ncv4-topo.xml", "azure-ndv2-topo.xml", "azure-ndv4-topo.xml", "azure-ndv5-topo.xml",
        "h200x4-vm.detected.xml", "h800x8-vm.virtual.xml", "simccl-1A100_1CX6.xml",
        "simccl-2A100_1CX6.xml", "simccl-4A100_2CX6.xml", "simccl-8A100_4CX6.xml"}) {
    const auto path = foreignTopology(name);
    if (!path) continue;
    ++files;
    const XmlTopology file = parseTopologyXml(readFile(*path), name);
    EXPECT_EQ(writeTopologyXml(parseTopologyXml(writeTopologyXml(file), name)),
              writeTopologyXml(file));
  }
  if (files == 0) GTEST_SKIP() << "the topology files of others are not next to this checkout";
}

TEST(TopologyXml, IsRefusedWhenCutOffAnywhere) {
  const std::string text(kTwoGpus);
  const size_t end = text.rfind('>');
  for (size_t length = 0; length < end; length++) {
    EXPECT_NE(errorOfText(text.substr(0, length)), "") << length;
  }
}

TEST(TopologyXml, ErrorsNameLineAndCause) {
  const std::string good(kTwoGpus);
  ASSERT_EQ(errorOfText(good), "");
  const auto error = [&](std::string_view from, std::string_view to) {
    return errorOfText(replaced(good, from, to));
  };
  EXPECT_EQ(error("0000:02:00.0\" class", "0000:01:00.0\" class"),
            "file:8: <pci> has bus id 0000:01:00.0, which line 3 has too");
  EXPECT_EQ(error("rank=\"1\"", "rank=\"0\""), "file:9: <gpu> has rank 0, which another GPU has");
  EXPECT_EQ(error("dev=\"1\"", "dev=\"0\""),
            "file:9: <gpu> has dev 0, which another GPU of its host has");
  EXPECT_EQ(error("count=\"4\"", "count=\"3\""),
            "file:5: <nvlink> has count 4, its other end in line 10 has 3");
  EXPECT_EQ(error("sm=\"80\"", "sm=\"eighty\""),
            "file:9: <gpu> has sm=\"eighty\", which is not a whole number");
  EXPECT_EQ(error("sm=\"80\"", "sm=\"80\" sm=\"90\""), "file:9: <gpu> has attribute sm twice");
  EXPECT_EQ(error("dev=\"1\"", ""), "file:9: <gpu> has no attribute dev");
  EXPECT_EQ(error("count=\"4\"", "count=\"-4\""),
            "file:10: <nvlink> has count=\"-4\", allowed are 1 to 1024");
  EXPECT_EQ(error("\"0x030200\" link_speed", "\"0x060400\" link_speed"),
            "file:9: <gpu> is in a <pci> of class 0x060400, which is not a GPU");
  EXPECT_EQ(error("0000:02:00.0\" class", "0000-02-00.0\" class"),
            "file:8: <pci> has busid=\"0000-02-00.0\", which is not a PCI address");
  EXPECT_EQ(error("</system>", "<cpu numaid=\"0\"/></system>"),
            "file:14: <cpu> names NUMA node 0 a second time");
  EXPECT_EQ(error("</system>", "<gpu/></system>"), "file:14: <gpu> is not allowed inside <system>");
  EXPECT_EQ(error("version=\"1\"", "version=\"2\""),
            "file:1: <system> has version 2, this library reads version 1");
  EXPECT_EQ(error("</system>", "</system>\n<system/>"),
            "file:15: a second root element is not allowed");
  EXPECT_EQ(error("</system>", "</sysstem>"),
            "file:14: the end tag </sysstem> does not match the last open element");
  EXPECT_EQ(error("</system>", ""), "file:14: the text ends inside <system>");
  EXPECT_EQ(error("</system>", "words</system>"), "file:13: text between elements is not allowed");
}

TEST(TopologyXml, RefusesWhatCouldGrowWithoutBound) {
  EXPECT_EQ(errorOfText("<!DOCTYPE a [<!ENTITY b \"&b;&b;\">]>\n<system version=\"1\"/>"),
            "file:1: a DOCTYPE is not allowed");
  std::string deep = "<system version=\"1\">";
  for (int i = 0; i < 100000; i++) deep += "<pci>";
  EXPECT_NE(errorOfText(deep), "");
  for (int i = 0; i < 100000; i++) deep += "</pci>";
  EXPECT_EQ(errorOfText(deep + "</system>"), "file:1: elements are nested deeper than 64");
  std::string wide = "<system version=\"1\">\n";
  for (int i = 0; i < 70000; i++) wide += "<a/>";
  EXPECT_EQ(errorOfText(wide + "</system>"), "file:2: more than 65536 elements");
  EXPECT_EQ(errorOfText(std::string(9u << 20, ' ')),
            "file:1: the text has more than 8388608 bytes, the limit");
  EXPECT_EQ(errorOfText(std::string("<system version=\"1\"/>\n\0", 23)),
            "file:2: a zero byte is not allowed");
}

TEST(TopologyXml, RefusesABridgeBelowItself) {
  EXPECT_EQ(errorOfText("<system version=\"1\"><cpu>\n<pci busid=\"0000:01:00.0\">\n"
                        "<pci busid=\"0000:02:00.0\">\n<pci busid=\"0000:01:00.0\"/></pci></pci>"
                        "</cpu></system>"),
            "file:4: <pci> has bus id 0000:01:00.0, which line 2 has too");
}

TEST(TopologyXml, APortMayBeBelowEachCpuButNotTwiceBelowOne) {
  const auto file = [](std::string_view first, std::string_view second) {
    return fmt::format(
        "<system version=\"1\"><cpu numaid=\"0\"><nic>{}</nic></cpu>\n"
        "<cpu numaid=\"1\"><nic>{}</nic></cpu></system>",
        first, second);
  };
  constexpr std::string_view kEth0 = "<net name=\"eth0\" dev=\"0\"/>";
  constexpr std::string_view kEth1 = "<net name=\"eth1\" dev=\"0\"/>";
  EXPECT_EQ(errorOfText(file(kEth0, kEth0)), "");
  EXPECT_EQ(parseTopologyXml(file(kEth0, kEth0), "file").notes.size(), 1u);
  EXPECT_EQ(errorOfText(file(kEth0, kEth1)),
            "file:2: <net> has dev 0, which another net of its host has");
  EXPECT_EQ(errorOfText(file(fmt::format("{}{}", kEth0, kEth0), "")),
            "file:1: <net> has dev 0, which another net of its host has");
}

TEST(TopologyXml, NotesWhatItLeavesOut) {
  const XmlTopology file =
      parseTopologyXml(replaced(std::string(kTwoGpus), "</system>", "<future/></system>"), "file");
  ASSERT_EQ(file.notes.size(), 1u);
  EXPECT_EQ(file.notes[0], "file:14: <future> is unknown and left out");
}

// `count` elements of a kind, spread over two hosts so that only the bound on all of them counts.
std::string manyElements(std::string_view kind, int count) {
  std::string text = "<system version=\"1\">";
  for (int host = 0; host < 2; host++) {
    text += fmt::format("<cpu numaid=\"0\" host_hash=\"{:#x}\">", host + 1);
    for (int i = host; i < count; i += 2) {
      const int pci = i + 4;
      text += fmt::format("<pci busid=\"{:04x}:{:02x}:{:02x}.0\">", pci >> 13, pci >> 5 & 255,
                          pci & 31);
      if (kind == "gpu") text += fmt::format("<gpu dev=\"{}\" sm=\"90\"/>", i);
      if (kind == "net") text += fmt::format("<nic><net dev=\"{}\"/></nic>", i);
      text += "</pci>";
    }
    text += "</cpu>";
  }
  return text + "</system>";
}

std::string manyNumaNodes(int hosts, int count) {
  std::string text = "<system version=\"1\">";
  for (int host = 0; host < hosts; host++) {
    for (int i = 0; i < count; i++) {
      text += fmt::format("<cpu numaid=\"{}\" host_hash=\"{:#x}\"/>", i, host + 1);
    }
  }
  return text + "</system>";
}

TEST(TopologyXml, BoundsWhatAMachineMayHave) {
  const auto error = [](const std::string& text) {
    return errorOf([&] { parseTopologyXml(text, "many"); });
  };
  EXPECT_EQ(error(manyElements("gpu", kMaxGpus)), "");
  EXPECT_EQ(error(manyElements("gpu", kMaxGpus + 1)),
            "many:1: <gpu> is number 1025; a topology has at most 1024");
  EXPECT_EQ(error(manyElements("net", kMaxPorts)), "");
  EXPECT_EQ(error(manyElements("net", kMaxPorts + 1)),
            "many:1: <net> is number 1025; a topology has at most 1024");
  EXPECT_EQ(error(manyElements("pci", kMaxPciDevices + 1)),
            "many:1: <pci> is number 4097; a topology has at most 4096");
  EXPECT_EQ(error(manyNumaNodes(4, kMaxNumaNodesOfHost)), "");
  EXPECT_EQ(error(manyNumaNodes(1, kMaxNumaNodesOfHost + 1)),
            "many:1: <cpu> is number 257; a host has at most 256");
  EXPECT_EQ(error(manyNumaNodes(5, kMaxNumaNodesOfHost)),
            "many:1: <cpu> is number 1025; a topology has at most 1024");
}

}  // namespace
}  // namespace unisono::topology
