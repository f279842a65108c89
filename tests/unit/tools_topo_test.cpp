// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <pugixml.hpp>
#include <set>

#include "program_testing.h"
#include "topo_view.h"
#include "topology/presets.h"
#include "topology/validate.h"

// `unisono topo` as its users run it, and the texts it is made of.
namespace unisono::topo {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::read;

class TopoProgram : public testing::Program {
 protected:
  Run topo(const std::string& arguments) { return run("topo " + arguments); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(at(name)) << text;
    return at(name);
  }
};

View viewOf(const std::string& preset, int nodes) {
  ViewSettings settings;
  settings.nodes = nodes;
  return makeView(topology::describeMachine(topology::preset(preset)), settings);
}

TEST_F(TopoProgram, PrintsTreePathsAndChannels) {
  const Run run = topo("--preset dgx-h100 --nodes 2");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(
      run.out,
      HasSubstr("8 GPUs, 8 NET ports, 2 NUMA nodes; 2 such machines with 16 ranks\n\nTree"));
  EXPECT_THAT(run.out, HasSubstr("+ 48 PCI GPU/0\n"));
  EXPECT_THAT(run.out,
              HasSubstr("\nring: 8 channels x 48 GB/s = 384 GB/s per direction between GPUs (NVL)\n"
                        "  to the network: 8 channels x 48 GB/s = 384 GB/s (PIX)\n"
                        "  channels come in pairs that swap their two ports"));
  EXPECT_THAT(run.out, HasSubstr("\n  1: NET/7-mlx5_7 > GPU 7 6 5 4 3 2 1 0 > NET/0-mlx5_0\n"));
  EXPECT_THAT(run.out, HasSubstr("\ntree: 8 channels x 48 GB/s = 384 GB/s per direction"));
  EXPECT_THAT(run.out, HasSubstr("\n  the first GPU of a chain carries its network traffic\n"));
  EXPECT_THAT(run.out, HasSubstr("\nnvls: 8 channels x 40 GB/s = 320 GB/s per direction"));
  EXPECT_THAT(run.out, HasSubstr("\nno channels: collnet_chain, collnet_direct\n"));
}

TEST_F(TopoProgram, FoldsEqualPathsAndExplainsTheirTypes) {
  const Run run = topo("--preset dgx-h100");
  EXPECT_THAT(run.out, HasSubstr("\nPaths (type and GB/s)\n"
                                 "GPU/0-7 each other: NVL 370.8\n"
                                 "GPU/0 to NET/0 PIX 48; other ports PXN 48\n"));
  EXPECT_THAT(run.out,
              HasSubstr("\nNET/1 to GPU/1 PIX 48; GPU/0, 2-3 PHB 48; other GPUs SYS 22\n"));
  EXPECT_THAT(run.out, HasSubstr("\nPath types: NVL NVLink; PIX at most one PCI switch; PXN "));
  EXPECT_THAT(run.out, Not(HasSubstr("NVB")));
  // Two halves, each at a PCI switch of its own, and a port that only the second one is near to.
  EXPECT_THAT(topo("--preset rtx3090-x8").out,
              HasSubstr("\nGPU/0-3 each other: PIX 24; to GPU/4-7 SYS 10\n"
                        "GPU/4-7 each other: PIX 24; to GPU/0-3 SYS 10\n"));
}

// The length of the longest line of a text, in bytes.
size_t widthOf(const std::string& text) {
  size_t widest = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) widest = std::max(widest, line.size());
  return widest;
}

void visit(topology::XmlNode& node, const std::function<void(topology::XmlNode&)>& change) {
  change(node);
  for (topology::XmlNode& child : node.children) visit(child, change);
}

// A rack of GB300 trays, each a host with four GPUs, in one NVLink domain. `withoutNvlink` is the
// rank of a GPU that has none.
topology::XmlTopology rackOf(int trays, int withoutNvlink = -1) {
  topology::MachineDescription tray = topology::preset("gh200-x4");
  tray.sockets = 2;
  tray.sm = 103;
  tray.peerNvlinks.clear();
  tray.switchNvlinks = 18;
  tray.pciSpeed = "64.0 GT/s PCIe";
  tray.nicMegabits = 800'000;
  topology::XmlNode system;
  system.name = "system";
  system.set("version", "1");
  int rank = 0;
  for (int host = 0; host < trays; host++) {
    topology::XmlTopology one = topology::describeMachine(tray);
    visit(one.system, [&](topology::XmlNode& node) {
      if (node.name == "cpu") node.set("host_hash", std::to_string(host + 1));
      if (node.name != "gpu") return;
      if (rank == withoutNvlink) {
        std::erase_if(node.children, [](const auto& child) { return child.name == "nvlink"; });
      }
      node.set("rank", std::to_string(rank++));
    });
    for (topology::XmlNode& cpu : one.system.children) system.children.push_back(std::move(cpu));
  }
  return topology::checkTopologyXml(std::move(system), "rack");
}

TEST(TopoText, FitsATerminal) {
  for (const std::string& name : topology::presetNames()) {
    SCOPED_TRACE(name);
    EXPECT_LE(widthOf(treeText(viewOf(name, 2), JoinedPart::show)), 120u);
  }
  const std::string text = treeText(makeView(rackOf(18), {}), JoinedPart::show);
  EXPECT_LE(widthOf(text), 120u);
  EXPECT_THAT(text, HasSubstr("\nGPU/0-17:0-3 each other: NVL 721.8\n"));
  EXPECT_THAT(text, HasSubstr("\n  0-15: GPU h0: 0 1 2 3 | h1: 0 1 2 3 | "));
  EXPECT_LT(text.size(), 64u * 1024);
}

TEST(TopoText, WrapsAtSpaces) {
  const std::string word(50, 'x');
  EXPECT_EQ(wrapped(word + " " + word + " " + word, 2), word + " " + word + "\n  " + word);
  EXPECT_EQ(wrapped("  " + word + word + word + " end", 4),
            "  " + word + word + word + "\n    end");
  EXPECT_EQ(wrapped(word + word + word, 4), word + word + word);
  EXPECT_EQ(wrapped(word + " | 0 1 " + word + " 2 3", 4, 100),
            word + "\n    | 0 1 " + word + " 2 3");
}

TEST(TopoText, NothingHarmfulFromFilesIsPrinted) {
  EXPECT_EQ(printable("mlx5_0"), "mlx5_0");
  const std::string fine = "Z\xc3\xbcrich \xe2\x82\xac \xf0\x9f\x98\x80";
  EXPECT_EQ(printable(fine), fine);
  EXPECT_EQ(printable("a\x1b[2J\n\x7f"), "a\\x1b[2J\\x0a\\x7f");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // a C1 control character
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xc1\x81"), "\\xc1\\x81");           // longer than it has to be
  EXPECT_EQ(printable("\xef\xbf\xbf"), "\\xef\\xbf\\xbf");  // U+FFFF, which XML forbids

  topology::XmlTopology file = topology::describeMachine(topology::preset("dgx-h100"));
  visit(file.system, [](topology::XmlNode& node) {
    if (node.name == "net") node.set("name", "eth\x1b]0;x\n\xff");
  });
  ViewSettings settings;
  settings.nodes = 2;
  const View view = makeView(file, settings);
  const std::string text = treeText(view, JoinedPart::show);
  EXPECT_THAT(text, HasSubstr("NET/0-eth\\x1b]0;x\\x0a\\xff\n"));
  for (const std::string& shown : {text, svgText(view, "ring"), jsonText(view, JoinedPart::hide)}) {
    EXPECT_EQ(shown.find('\x1b'), std::string::npos);
    EXPECT_EQ(shown.find('\xff'), std::string::npos);
  }
}

TEST_F(TopoProgram, ErrorsDoNotPrintControlCharacters) {
  const Run run = topo(
      "--file " + write("bad.xml", "<system version=\"1\"><cpu numaid=\"&#27;[2J\"/></system>"));
  EXPECT_EQ(run.status, 2);
  EXPECT_EQ(run.err.find('\x1b'), std::string::npos);
  EXPECT_THAT(run.err, HasSubstr("\\x1b[2J"));
}

TEST(TopoWarnings, AGoodMachineHasNone) {
  for (const char* name : {"dgx-h100", "dgx-a100", "dgx1-v100", "gh200-x4", "scale-16x16"}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(viewOf(name, 1).warnings, ::testing::IsEmpty());
    EXPECT_THAT(viewOf(name, 2).warnings, ::testing::IsEmpty());
  }
}

TEST(TopoWarnings, NoPortBetweenNodes) {
  const View view = viewOf("hgx-h200x4", 2);
  ASSERT_EQ(view.warnings.size(), 1u);
  EXPECT_THAT(view.warnings[0], HasSubstr("no data can get across the 2 nodes"));
  EXPECT_THAT(treeText(view, JoinedPart::hide), HasSubstr("\nwarning: no NET port can be reached"));
  EXPECT_EQ(nlohmann::json::parse(jsonText(view, JoinedPart::hide))["warnings"].size(), 1u);
  EXPECT_THAT(viewOf("hgx-h200x4", 1).warnings, ::testing::IsEmpty());
}

TEST(TopoWarnings, AGpuWithoutNvlink) {
  EXPECT_THAT(makeView(rackOf(2), {}).warnings, ::testing::IsEmpty());
  const View view = makeView(rackOf(2, 5), {});
  ASSERT_FALSE(view.warnings.empty());
  EXPECT_THAT(view.warnings[0], HasSubstr("GPU/1:1 has no NVLink, the other 7 GPUs have"));
}

TEST(TopoWarnings, IdlePortsAndSlowTrees) {
  View view = viewOf("dgx-h100", 2);
  topology::GraphSet& graphs = view.domains[0].graphs;
  graphs.tree.speedInter = graphs.ring.speedInter / 2;
  EXPECT_THAT(findWarnings(view), ::testing::IsEmpty());
  graphs.tree.speedInter = 3000;
  EXPECT_THAT(findWarnings(view),
              ::testing::ElementsAre("trees carry 24 GB/s to the network, rings 384 GB/s"));
  graphs.tree = graphs.ring;
  graphs.ring.channels.resize(2);
  EXPECT_THAT(findWarnings(view),
              ::testing::ElementsAre("6 of 8 NET ports are idle, no ring uses them: NET/1-6"));
  // Rings that fill the links of a GPU need no more ports.
  graphs.ring.speedInter *= 4;
  EXPECT_THAT(findWarnings(view), ::testing::IsEmpty());
  graphs.ring.speedInter /= 4;
  // Nobody misses farther or slower ports, such as one for management.
  graphs.ring.typeInter = topology::PathType::loc;
  EXPECT_THAT(findWarnings(view), ::testing::IsEmpty());
  graphs.ring.typeInter = topology::PathType::pix;
  for (topology::Node& node : view.whole.topology.nodes) {
    if (node.type == topology::NodeType::net) node.net.bandwidth /= 2;
  }
  EXPECT_THAT(findWarnings(view), ::testing::IsEmpty());
}

TEST_F(TopoProgram, TheJoinedPartCanBeLeftOut) {
  Run run = topo("--preset dgx-h100 --nodes 1024 --no-joined");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(run.out, Not(HasSubstr("Joined:")));
  EXPECT_THAT(run.out, HasSubstr("\nring: 8 channels"));
  run = topo("--preset dgx-h100 --nodes 1024 --json --no-joined");
  const auto json = nlohmann::json::parse(run.out);
  EXPECT_FALSE(json.contains("joined"));
  EXPECT_EQ(json["ranks"], 8192);
  EXPECT_LT(run.out.size(), 100'000u);
}

TEST_F(TopoProgram, PrintsTheChannelsOfAllNodes) {
  Run run = topo("--preset dgx-h100 --nodes 3");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(
      run.out,
      HasSubstr("Joined: 24 ranks on 3 nodes, 16 channels that share the bandwidth of 8\n"));
  // The second node takes the other ring of the pair: out by the port that the first leaves by.
  EXPECT_THAT(run.out, HasSubstr("\nring 0, 8: 0 1 2 3 4 5 6 7 | 15 14 13 12 11 10 9 8 | "
                                 "16 17 18 19 20 21 22 23\n"));
  EXPECT_THAT(run.out, HasSubstr("\ntree 0: 0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | "
                                 "16 17 18 19 20 21 22 23; 8's parent is 16, 16's parent is 0\n"));
  EXPECT_THAT(run.out, HasSubstr("\ntree 8: 0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | "
                                 "16 17 18 19 20 21 22 23; 0's parent is 8, 16's parent is 0\n"));
  EXPECT_THAT(
      run.out,
      HasSubstr("\nnvls head 1: 1 | 9 | 17; tree 0: 9's parent is 17, 17's parent is 1; tree 1: "));
  run = topo("--preset hgx-h200x4");
  EXPECT_THAT(run.out,
              HasSubstr("Joined: 4 ranks on 1 node, 24 channels that share the bandwidth of 12\n"
                        "ring 0-23: 0 1 2 3\n"));
  run = topo("--preset dgx-h100 --nodes 512");
  EXPECT_THAT(run.out, HasSubstr("16 17 18 19 20 21 22 23 | ... 509 more nodes\n"));
}

TEST_F(TopoProgram, TakesTheSettingsOfTheEnvironment) {
  const auto topoWith = [&](const char* name, const std::string& value,
                            const std::string& arguments) {
    setenv(name, value.c_str(), 1);
    Run run = topo(arguments);
    unsetenv(name);
    return run;
  };
  EXPECT_THAT(topoWith("NCCL_P2P_DISABLE", "1", "--preset dgx-h100 --why 0 1").out,
              HasSubstr("P2P: no, NCCL_P2P_DISABLE forbids it"));
  EXPECT_THAT(topoWith("NCCL_P2P_LEVEL", "LOC", "--preset dgx-h100 --why 0 1").out,
              HasSubstr("used up to LOC only (NCCL_P2P_LEVEL)"));
  EXPECT_THAT(topoWith("NCCL_NET_GDR_LEVEL", "LOC", "--preset dgx-h100 --why 0 mlx5_0").out,
              HasSubstr("(NCCL_NET_GDR_LEVEL)"));
  EXPECT_THAT(
      topoWith("NCCL_CROSS_NIC", "0", "--preset dgx-h100 --nodes 2").out,
      HasSubstr("\nring: 8 channels x 45 GB/s = 360 GB/s per direction between GPUs (NVL)\n"
                "  to the network: 8 channels x 45 GB/s = 360 GB/s (PXN)\n"
                "  each channel leaves a node through the port it enters by (cross NIC 0)\n"));
  EXPECT_THAT(topoWith("NCCL_MAX_NCHANNELS", "5", "--preset dgx-h100 --nodes 2").out,
              HasSubstr("2 nodes, 5 channels\n"));
  // A value that cannot be used leaves the default.
  const Run bad = topoWith("NCCL_P2P_LEVEL", "FAR", "--preset dgx-h100 --why 0 1");
  EXPECT_EQ(bad.status, 0);
  EXPECT_THAT(bad.out, HasSubstr("P2P: yes"));
  const Run refused = topoWith("UNISONO_HOST_DEVICES", "many", "--preset dgx-h100");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("UNISONO_HOST_DEVICES=many"));

  // Without memory to share, every GPU is a node of its own.
  setenv("NCCL_SHM_DISABLE", "1", 1);
  const Run apart = topoWith("NCCL_P2P_DISABLE", "1", "--preset dgx-h100");
  unsetenv("NCCL_SHM_DISABLE");
  EXPECT_THAT(apart.out, HasSubstr("Channels among GPU/7, which only the network connects"));
  EXPECT_THAT(apart.out, HasSubstr("Joined: 8 ranks on 8 nodes"));
}

TEST_F(TopoProgram, ShowsGivenGraphsAndWhatIsWrongWithThem) {
  const auto graph = [](int speed) {
    return "<graphs version=\"1\"><graph id=\"0\" pattern=\"4\" nchannels=\"1\" speedintra=\"" +
           std::to_string(speed) +
           "\" speedinter=\"20\" typeintra=\"NVL\" typeinter=\"PIX\"><channel><gpu dev=\"2\"/>"
           "<gpu dev=\"0\"/><gpu dev=\"3\"/><gpu dev=\"1\"/></channel></graph></graphs>";
  };
  const auto topoWith = [&](const std::string& file, const std::string& arguments) {
    setenv("NCCL_GRAPH_FILE", file.c_str(), 1);
    Run run = topo(arguments);
    unsetenv("NCCL_GRAPH_FILE");
    return run;
  };
  Run run = topoWith(write("g.xml", graph(20)), "--preset hgx-h200x4");
  EXPECT_THAT(run.out,
              HasSubstr("ring: 1 channel x 20 GB/s = 20 GB/s per direction between GPUs (NVL)"));
  EXPECT_THAT(run.out, HasSubstr("ring 0-1: 2 0 3 1\n"));
  EXPECT_THAT(run.out, Not(HasSubstr("note:")));
  run = topoWith(write("much.xml", graph(500)), "--preset hgx-h200x4");
  EXPECT_EQ(run.status, 0);
  EXPECT_THAT(run.out, HasSubstr("much.xml: ring: "));
  run = topoWith(write("other.xml", graph(20)), "--preset dgx-h100");
  EXPECT_EQ(run.status, 2);
  EXPECT_THAT(run.err, HasSubstr("other.xml:1: <channel> has 4 GPUs, the topology has 8"));
  run = topoWith(at("none.xml"), "--preset hgx-h200x4");
  EXPECT_EQ(run.status, 2);
  EXPECT_THAT(run.err, HasSubstr("none.xml"));
}

TEST_F(TopoProgram, JsonIsTheSameMachine) {
  const Run run = topo("--preset dgx-h100 --nodes 2 --json");
  ASSERT_EQ(run.status, 0) << run.err;
  const auto json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["node_count"], 2);
  EXPECT_EQ(json["ranks"], 16);
  const View view = viewOf("dgx-h100", 2);
  EXPECT_EQ(json["nodes"].size(), view.whole.topology.nodes.size());
  EXPECT_EQ(json["paths"].size(), 16u * 15u);
  std::set<std::string> patterns;
  for (const auto& graph : json["graphs"]) {
    patterns.insert(graph["pattern"].get<std::string>());
    EXPECT_FALSE(graph["channels"].empty());
    for (const char* key : {"speed_intra", "speed_inter"}) EXPECT_GT(graph[key].get<double>(), 0);
    for (const char* key : {"type_intra", "type_inter"}) EXPECT_TRUE(graph[key].is_string());
  }
  EXPECT_EQ(patterns, (std::set<std::string>{"ring", "tree", "nvls"}));
  const auto& ring = json["graphs"][0];
  ASSERT_EQ(ring["channels"].size(), view.domains[0].graphs.ring.channels.size());
  std::set<int> ranks;
  for (const int rank : ring["channels"][0]["ranks"]) ranks.insert(rank);
  EXPECT_EQ(ranks.size(), 8u);
  EXPECT_EQ(ring["channels"][0]["net_in"], "NET/0-mlx5_0");

  const auto& joined = json["joined"];
  EXPECT_EQ(joined["nodes"], 2);
  EXPECT_EQ(joined["node_of_rank"][8], 1);
  ASSERT_EQ(joined["channels"].size(), 16u);
  for (const auto& channel : joined["channels"]) {
    std::set<int> visited;
    for (const int rank : channel["ring"]) visited.insert(rank);
    EXPECT_EQ(visited.size(), 16u);
    int roots = 0;
    for (const int parent : channel["tree_parent_of_rank"]) roots += parent < 0;
    EXPECT_EQ(roots, 1);
  }
  EXPECT_EQ(joined["nvls"].size(), 8u);
  EXPECT_EQ(joined["nvls"][1]["head_of_node"], (std::vector<int>{1, 9}));
  EXPECT_EQ(joined["nvls"][1]["tree_0_parent_of_node"], (std::vector<int>{-1, 1}));
}

TEST_F(TopoProgram, WritesFilesThatItReadsBack) {
  const Run first = topo("--preset dgx-a100 --nodes 2 --dump " + at("m.xml") + " --graphs " +
                         at("g.xml") + " --json " + at("m.json"));
  ASSERT_EQ(first.status, 0) << first.err;
  const Run second = topo(at("m.xml") + " --nodes 2 --graphs " + at("g2.xml"));
  ASSERT_EQ(second.status, 0) << second.err;
  EXPECT_EQ(read(at("g.xml")), read(at("g2.xml")));
  EXPECT_THAT(read(at("g.xml")), HasSubstr("<graphs version=\"1\">"));
  const auto withoutTitle = [](const std::string& text) { return text.substr(text.find(": ")); };
  EXPECT_EQ(withoutTitle(first.out), withoutTitle(second.out));
  EXPECT_EQ(nlohmann::json::parse(read(at("m.json")))["ranks"], 16);
}

TEST_F(TopoProgram, ExplainsAPath) {
  Run run = topo("--preset dgx-h100 --nodes 2 --why 0 mlx5_3");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("GPU/0 -> NET/3-mlx5_3: PXN"));
  EXPECT_THAT(run.out, HasSubstr("GPUDirect read: yes, from GPU/3, which sends for GPU/0 (PXN)"));
  EXPECT_THAT(run.out, HasSubstr("nearest ports of GPU/0: NET/0-mlx5_0 (PIX"));
  run = topo("--preset dgx-h100 --nodes 2 --why net0 gpu0");
  EXPECT_THAT(run.out, HasSubstr("ring channels that enter here: 0\n"));
  EXPECT_THAT(run.out, HasSubstr("ring channels that leave here: 1\n"));
  run = topo("--preset dgx-h100 --why net0 gpu0");
  EXPECT_THAT(run.out, HasSubstr("--nodes 2"));
  run = topo("--preset rtx3090-x8 --why GPU/0 0000:17:00.0");
  EXPECT_THAT(run.out, HasSubstr("GPU/0 -> GPU/7: SYS"));
  EXPECT_THAT(run.out, HasSubstr("P2P: no, the path is SYS, and P2P is used up to PXB only"));
}

TEST_F(TopoProgram, WrongInputIsExit2WithItsCause) {
  struct Case {
    std::string arguments, cause;
  };
  const std::vector<Case> cases = {
      {"--preset dgx-h101", "there is no machine preset \"dgx-h101\""},
      {"--preset dgx-h100 --file x.xml", "excludes"},
      {"--preset dgx-h100 --nodes 0", "--nodes"},
      {"--preset dgx-h100 --nodes many", "--nodes"},
      {"--preset scale-16x16 --nodes 65537", "--nodes"},
      {"--preset dgx-h100 --pattern tree", "--pattern requires --svg"},
      {"--preset dgx-h100 --why GPU/0", "--why"},
      {"--preset dgx-h100 --why GPU/0 PCI/0000:d0:00.0",
       "needs a GPU, NET port, CPU or NVSwitch; PCI/0000:d0:00.0 is none of these"},
      {"--preset dgx-h100 --why GPU/0 GPU/8", "this machine has no \"GPU/8\""},
      {"--preset hgx-h200x8 --pattern star --svg " + at("x.svg"), "\"star\""},
      {"--preset hgx-h200x8 --svg " + at("no/x.svg"), "no/x.svg"},
      {"--file " + at("none.xml"), "No such file"},
      {"--file " + write("cut.xml", "<system version=\"1\">\n<cpu numaid=\"0\">\n"), "cut.xml:"},
      {"--file " + write("odd.xml", "<system version=\"1\">\n<gpu dev=\"0\"/>\n</system>"),
       "odd.xml:2: <gpu> is not allowed inside <system>"},
      {"--file " + write("no.xml", "<system version=\"1\"><cpu numaid=\"0\"/></system>"), "cloud"},
      {"--file " + write("sm.xml",
                         "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\">"
                         "<gpu dev=\"0\"/></pci></cpu></system>"),
       "no compute capability"},
      {"--file ''", "--file: the name is empty"},
      {"--preset ''", "--preset: the name is empty"},
      {"--root " + at("none"), "none is not a directory"},
      {"--root " + at(""), "no GPU found"},
      {"--root / --preset dgx-h100", "excludes"},
  };
  for (const Case& wrong : cases) {
    SCOPED_TRACE(wrong.arguments);
    const Run run = topo(wrong.arguments);
    EXPECT_EQ(run.status, 2);
    EXPECT_THAT(run.err, HasSubstr(wrong.cause));
    EXPECT_EQ(run.out, "");
  }
}

TEST(TopoView, EveryPresetHasAValidView) {
  for (const std::string& name : topology::presetNames()) {
    SCOPED_TRACE(name);
    const View view = viewOf(name, 2);
    ASSERT_EQ(view.domains.size(), 1u);
    const topology::Machine& machine = view.domains[0].machine;
    for (const NamedChannels& named : graphsOf(view.domains[0])) {
      if (named.graph->channels.empty()) continue;
      EXPECT_THAT(topology::validate(*named.graph, machine), ::testing::IsEmpty());
    }
    for (size_t i = 0; i < machine.topology.nodes.size(); i++) {
      const int index = static_cast<int>(i);
      EXPECT_EQ(view.whole.topology.nameOf(wholeIndex(view, machine.topology, index)),
                machine.topology.nameOf(index));
    }
  }
}

TEST(TopoView, NamesOfNodes) {
  const View view = viewOf("dgx-h100", 1);
  const topology::Topology& topology = view.whole.topology;
  for (size_t i = 0; i < topology.nodes.size(); i++) {
    EXPECT_EQ(findNode(topology, topology.nameOf(static_cast<int>(i))), static_cast<int>(i));
  }
  EXPECT_EQ(findNode(topology, "3"), findNode(topology, "GPU/3"));
  EXPECT_EQ(findNode(topology, "gpu3"), findNode(topology, "GPU/3"));
  EXPECT_EQ(findNode(topology, "0000:13:00.0"), findNode(topology, "GPU/3"));
  EXPECT_EQ(topology.node(findNode(topology, "NET/5")).net.dev, 5);
  EXPECT_EQ(findNode(topology, "mlx5_5"), findNode(topology, "net5"));
}

struct Rectangle {
  double left, top, right, bottom;
};

// All boxes, or those of one colour.
std::vector<Rectangle> boxesOf(const pugi::xml_node& svg, std::string_view fill = "") {
  std::vector<Rectangle> boxes;
  for (const pugi::xml_node& rect : svg.children("rect")) {
    const double x = rect.attribute("x").as_double(), y = rect.attribute("y").as_double();
    if (!rect.attribute("x")) continue;  // the background
    if (!fill.empty() && rect.attribute("fill").value() != fill) continue;
    boxes.push_back(
        {x, y, x + rect.attribute("width").as_double(), y + rect.attribute("height").as_double()});
  }
  return boxes;
}

// Boxes are inside the picture and do not overlap, devices are above their CPU, and each distinct
// channel has a colour of its own.
TEST(TopoPicture, IsReadable) {
  for (const std::string& name : topology::presetNames()) {
    for (const int nodes : {1, 2}) {
      const View view = viewOf(name, nodes);
      for (const NamedChannels& named : graphsOf(view.domains[0])) {
        if (named.graph->channels.empty()) continue;
        SCOPED_TRACE(name + " " + std::string(named.name));
        const std::string text = svgText(view, named.name);
        pugi::xml_document document;
        ASSERT_TRUE(document.load_string(text.c_str()));
        const pugi::xml_node svg = document.child("svg");
        const double width = svg.attribute("width").as_double();
        const double height = svg.attribute("height").as_double();
        const std::vector<Rectangle> boxes = boxesOf(svg);
        for (size_t i = 0; i < boxes.size(); i++) {
          const Rectangle& a = boxes[i];
          EXPECT_TRUE(a.left >= 0 && a.top >= 0 && a.right <= width && a.bottom <= height);
          for (size_t j = 0; j < i; j++) {
            const Rectangle& b = boxes[j];
            EXPECT_FALSE(a.left < b.right && b.left < a.right && a.top < b.bottom &&
                         b.top < a.bottom)
                << "two boxes overlap at " << a.left << "," << a.top;
          }
        }
        const std::vector<Rectangle> cpus = boxesOf(svg, "#d6e6f7");
        for (const char* device : {"#d9f0d3", "#fde7c8"}) {
          for (const Rectangle& box : boxesOf(svg, device)) {
            EXPECT_TRUE(std::any_of(cpus.begin(), cpus.end(),
                                    [&](const Rectangle& cpu) {
                                      return cpu.top > box.bottom && cpu.left <= box.left &&
                                             box.right <= cpu.right;
                                    }))
                << "the device at " << box.left << " hangs over the edge of its CPU";
          }
        }
        std::set<std::string> colours;
        for (const pugi::xml_node& rect : svg.children("rect")) {
          if (std::string_view(rect.attribute("fill").value()).starts_with("hsl")) {
            colours.insert(rect.attribute("fill").value());
          }
        }
        EXPECT_EQ(colours.size(), equalChannels(*named.graph).size());
        for (const int gpu : view.whole.topology.of(topology::NodeType::gpu)) {
          EXPECT_THAT(text, HasSubstr(">GPU " +
                                      std::to_string(view.whole.topology.node(gpu).gpu.dev) + "<"));
        }
      }
    }
  }
}

size_t countOf(const std::string& text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) count++;
  return count;
}

TEST(TopoPicture, ShowsTotalsAndUnusedPorts) {
  const std::string two = svgText(viewOf("dgx-h100", 2), "ring");
  EXPECT_THAT(two,
              HasSubstr("ring: 8 channels x 48 GB/s = 384 GB/s per direction between GPUs (NVL), "
                        "384 GB/s to the network (PIX)"));
  EXPECT_EQ(countOf(two, "stroke-dasharray"), 0u);
  const std::string one = svgText(viewOf("dgx-h100", 1), "ring");
  EXPECT_EQ(countOf(one, "stroke-dasharray"), 8u);
  EXPECT_THAT(one, HasSubstr("dashed: not used by these channels"));
  EXPECT_THAT(svgText(viewOf("hgx-h200x4", 2), "ring"), HasSubstr(">warning: no NET port"));
}

TEST(TopoPicture, SixteenGpusFitAScreen) {
  const std::string text = svgText(viewOf("scale-16x16", 2), "ring");
  pugi::xml_document document;
  ASSERT_TRUE(document.load_string(text.c_str()));
  EXPECT_LE(document.child("svg").attribute("width").as_double(), 1920);
}

TEST(TopoPicture, WrapsARackByHost) {
  const std::string text = svgText(makeView(rackOf(18), {}), "ring");
  pugi::xml_document document;
  ASSERT_TRUE(document.load_string(text.c_str()));
  const pugi::xml_node svg = document.child("svg");
  EXPECT_LE(svg.attribute("width").as_double(), 1920);
  EXPECT_EQ(boxesOf(svg, "#d9f0d3").size(), 72u);
  for (int host = 0; host < 18; host++) {
    EXPECT_THAT(text, HasSubstr(">host " + std::to_string(host) + "<"));
    EXPECT_THAT(text, HasSubstr("h" + std::to_string(host) + ": 0 1 2 3"));
  }
  EXPECT_EQ(countOf(text, ">NVSwitch, 721.8 GB/s to each GPU<"), 1u);
  EXPECT_EQ(countOf(text, ">the same NVSwitch, "), 4u);
}

// Chip-to-chip links have lines of their own, and every two CPUs are connected.
TEST(TopoPicture, DrawsEveryKindOfLink) {
  const std::string text = svgText(viewOf("gh200-x4", 1), "ring");
  pugi::xml_document document;
  ASSERT_TRUE(document.load_string(text.c_str()));
  std::set<std::string> chip, pci;
  int cpuLinks = 0;
  for (const pugi::xml_node& node : document.child("svg").children()) {
    const std::string_view name = node.name(), colour = node.attribute("stroke").value();
    if (name != "line" && name != "path") continue;
    if (node.attribute("x1").as_double() == 28) continue;  // the legend begins there
    if (colour == "#7b4fb5") chip.insert(node.attribute("x1").value());
    if (colour == "#8a949e") pci.insert(node.attribute("x1").value());
    cpuLinks += colour == "#2f6399";
  }
  EXPECT_GE(chip.size(), 4u);
  for (const std::string& x : chip) EXPECT_FALSE(pci.contains(x)) << x;
  EXPECT_EQ(cpuLinks, 6 + 1);  // one in the legend
}

TEST(TopoPicture, TextFromFilesIsEscaped) {
  topology::MachineDescription description = topology::preset("dgx-h100");
  description.name = "a<b>&\"c\"";
  const View view = makeView(topology::describeMachine(description), {});
  const std::string text = svgText(view, "ring");
  EXPECT_THAT(text, HasSubstr("a&lt;b&gt;&amp;&quot;c&quot;"));
  EXPECT_THAT(text, Not(HasSubstr("a<b>")));
}

}  // namespace
}  // namespace unisono::topo
