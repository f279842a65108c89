// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "program_testing.h"
#include "support/fake_net.h"

// `unisono explain` as its users run it.
namespace unisono::explain {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::read;

[[maybe_unused]] constexpr const char* kNotUnderThreadSanitizer =
    "ThreadSanitizer takes the thread-local storage of a library that was opened at run time for a "
    "data race";

class ExplainProgram : public testing::Program {
 protected:
  Run explain(const std::string& arguments, const std::string& environment = "") {
    return run("explain " + arguments, environment);
  }
  json explainJson(const std::string& arguments, const std::string& environment = "") {
    const Run run = explain(arguments + " --json", environment);
    EXPECT_EQ(run.status, 0) << run.err;
    return json::parse(run.out);
  }
};

TEST_F(ExplainProgram, PrintsTheChoiceTheCandidatesAndTheRanges) {
  const Run run = explain("--preset hgx-h200x8 -s 8");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("AllReduce of 8 B (2 float, sum) by 8 ranks on 1 node"));
  EXPECT_THAT(run.out, HasSubstr("\nChoice: Direct LL"));
  EXPECT_THAT(run.out, HasSubstr("the choice (time measured)"));
  EXPECT_THAT(run.out, HasSubstr("times the time of the choice"));
  EXPECT_THAT(run.out, HasSubstr("no NVLink multicast"));
  EXPECT_THAT(run.out, HasSubstr("\nBy size\n"));
  EXPECT_EQ(run.err, "");
}

TEST_F(ExplainProgram, KnowsHowManyBlocksAGpuRuns) {
  const auto blocks = [&](const std::string& preset) {
    const json answer = explainJson("all_gather --ranks 2 -s 4M --preset " + preset);
    EXPECT_EQ(answer["choice"]["algorithm"], "Direct");
    return answer["choice"]["channels"].get<int>();
  };
  EXPECT_GT(blocks("dgx-h100"), 108);
  EXPECT_LE(blocks("dgx-a100"), 108);
  EXPECT_LE(blocks("dgx1-v100"), 80);
}

TEST_F(ExplainProgram, FollowsTheEnvironment) {
  const json ring = explainJson("--preset hgx-h200x8 -s 8", "NCCL_ALGO=ring");
  EXPECT_EQ(ring["choice"]["algorithm"], "Ring");
  EXPECT_EQ(ring["choice"]["allowed"], true);
  EXPECT_TRUE(ring["warnings"].empty());
  const json nvls = explainJson("--preset hgx-h200x8 -s 8", "NCCL_ALGO=nvls");
  EXPECT_EQ(nvls["choice"]["allowed"], false);
  ASSERT_EQ(nvls["warnings"].size(), 1u);
  const json threads = explainJson("broadcast --preset hgx-h200x8 -s 1G", "NCCL_NTHREADS=128");
  EXPECT_EQ(threads["choice"]["threads"], 128 + 64);
  std::ofstream(at("times")) << "AllReduce Ring Simple 1 8 8 0.5\n";
  const json file = explainJson("--preset hgx-h200x8 -s 8", "UNISONO_TUNING_FILE=" + at("times"));
  EXPECT_EQ(file["choice"]["algorithm"], "Ring");
  EXPECT_EQ(file["choice"]["predicted_us"], 0.5);
}

// Between nodes of a simulation, which LL128 can pass.
TEST_F(ExplainProgram, AsksTheTunerPlugin) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << kNotUnderThreadSanitizer;
#endif
  const std::string call = "--preset dgx-h100 --nodes 2 --ranks 2 --run -b 1K -e 1M -s 64K",
                    plugin = "NCCL_TUNER_PLUGIN=" UNISONO_TUNER_EXAMPLE;
  const json without = explainJson(call, "NCCL_TUNER_PLUGIN=none");
  EXPECT_EQ(without["tuner"], "");
  EXPECT_EQ(without["choice"]["algorithm"], "Ring");
  const json with = explainJson(call, plugin);
  EXPECT_EQ(with["tuner"], "Example (v4)");
  EXPECT_TRUE(with["warnings"].empty());
  EXPECT_EQ(with["choice"]["algorithm"], "Tree");
  EXPECT_EQ(with["choice"]["protocol"], "LL128");
  EXPECT_EQ(with["ranges"][0]["protocol"], "LL128");
  EXPECT_EQ(with["ranges"][0]["last_bytes"], 256 << 10);
  EXPECT_THAT(explain(call, plugin).out, HasSubstr("\nTuner plug-in: Example (v4)\n"));
  EXPECT_EQ(explainJson("broadcast " + call, plugin)["choice"]["algorithm"], "Ring");

  const json missing = explainJson(call, "NCCL_TUNER_PLUGIN=/nowhere/tuner.so");
  EXPECT_EQ(missing["choice"], without["choice"]);
  ASSERT_EQ(missing["warnings"].size(), 1u);
  EXPECT_THAT(missing["warnings"][0], HasSubstr("/nowhere/tuner.so cannot be loaded"));
}

// Small calls go over LL. LL128 needs adapters that reach memory of the GPU, which sockets do not.
TEST_F(ExplainProgram, KnowsWhatJoinsTheNodes) {
  const std::string node = "--file " UNISONO_TEST_DATA "/topologies/h800x8-vm.detected.xml -s 8 ";
  const std::string call = node + "--nodes 2 ";
  const json plain = explainJson(call, "NCCL_NET_PLUGIN=none");
  EXPECT_EQ(plain["network"], "InfiniBand, RoCE or sockets");
  EXPECT_EQ(plain["choice"]["algorithm"], "Tree");
  EXPECT_EQ(plain["choice"]["protocol"], "LL");
  const auto reasonOf = [](const json& report, const char* algorithm,
                           const char* protocol) -> std::string {
    for (const json& row : report["candidates"]) {
      if (row["algorithm"] == algorithm && row["protocol"] == protocol) return row["reason"];
    }
    return "no candidate";
  };
  EXPECT_THAT(reasonOf(plain, "Ring", "LL128"), HasSubstr("times the time of the choice"));
  EXPECT_EQ(explainJson(node)["network"], "");
  const json sockets = explainJson(call, "NCCL_NET_PLUGIN=none NCCL_NET=Socket");
  EXPECT_EQ(sockets["network"], "Socket");
  EXPECT_THAT(reasonOf(sockets, "Ring", "LL128"), HasSubstr("adapters that reach memory"));

  const std::string plugin = "NCCL_NET_PLUGIN=" + testing::fakeNetPath(11);
  EXPECT_EQ(explainJson(call, plugin)["network"], "Fake11 (v11)");
  const char* const direct = "Fake11 (v11), with GPUDirect where topo --why allows it";
  EXPECT_EQ(explainJson(call, plugin + " FAKE_NET_POINTERS=5")["network"], direct);
  EXPECT_EQ(explainJson(call, plugin + " FAKE_NET_POINTERS=5 NCCL_DMABUF_ENABLE=0")["network"],
            "Fake11 (v11)");
  const auto reasonOfChains = [&](const json& report) {
    return reasonOf(report, "CollNetChain", "Simple");
  };
  const json reducing = explainJson(call, plugin + " NCCL_COLLNET_ENABLE=1");
  EXPECT_EQ(reducing["network"], "Fake11 (v11), which reduces through Sum11 (v11)");
  EXPECT_THAT(reasonOfChains(reducing), HasSubstr("runs only where"));
  EXPECT_THAT(reasonOfChains(explainJson(call, plugin)), HasSubstr("does not reduce"));
  EXPECT_THAT(
      reasonOfChains(explainJson(call + "--type f8e4m3", plugin + " NCCL_COLLNET_ENABLE=1")),
      HasSubstr("not with this type and operator"));
}

TEST_F(ExplainProgram, AsNcclChoosesAmongNcclsAlgorithms) {
  const json small = explainJson("--preset dgx-h100 --nodes 8 -s 8 --as-nccl");
  EXPECT_EQ(small["ranks"], 64);
  EXPECT_EQ(small["choice"]["algorithm"], "Tree");
  const json large = explainJson("--preset dgx-h100 -s 1G --as-nccl --multicast");
  EXPECT_EQ(large["choice"]["algorithm"], "NVLS");
}

TEST_F(ExplainProgram, RangesFollowEachOther) {
  const json report = explainJson("--preset dgx-h100 --nodes 2 --as-nccl -b 1 -e 4G");
  uint64_t next = 1;
  for (const json& range : report["ranges"]) {
    EXPECT_EQ(range["first_bytes"], next);
    next = range["last_bytes"].get<uint64_t>() + 1;
  }
  EXPECT_EQ(next, (uint64_t{4} << 30) + 1);
  EXPECT_GT(report["ranges"].size(), 2u);
}

TEST_F(ExplainProgram, DrawsThePlot) {
  const Run run = explain("--preset dgx-h100 --svg " + at("plot.svg"));
  ASSERT_EQ(run.status, 0) << run.err;
  const std::string svg = read(at("plot.svg"));
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg"), HasSubstr("Ring Simple"), HasSubstr("the choice"),
                         HasSubstr("NVLS Simple (cannot run)"), HasSubstr("</svg>")));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf,")));
}

TEST_F(ExplainProgram, RunsTheCallOnSimulatedGpus) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << kNotUnderThreadSanitizer;
#endif
  const json report = explainJson("all_reduce --preset hgx-h200x4 --ranks 2 --run -b 1K -e 256K");
  EXPECT_EQ(report["run"]["backend"], "host");
  EXPECT_EQ(report["run"]["simulated"], true);
  ASSERT_EQ(report["run"]["rows"].size(), 5u);
  for (const json& row : report["run"]["rows"]) {
    EXPECT_GT(row["measured_us"], 0.0);
    EXPECT_GT(row["predicted_us"], 0.0);
    EXPECT_EQ(row["wrong"], 0);
  }
  const Run text = explain("all_gather --preset hgx-h200x4 --nodes 2 --ranks 2 --run -s 1K");
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("Measured (host backend)"));
  EXPECT_THAT(text.out, HasSubstr("A CPU simulated the GPUs"));
  EXPECT_THAT(text.out, HasSubstr("simulation on CPU us"));
  EXPECT_THAT(text.out, Not(HasSubstr("measured / predicted")));
}

TEST_F(ExplainProgram, ExplainsMessages) {
  const Run run = explain("alltoall --preset hgx-h200x8 -s 16K");
  ASSERT_EQ(run.status, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("alltoall of 16 KiB (512 float) by 8 ranks on 1 node"));
  EXPECT_THAT(run.out, HasSubstr("Each message has 2 KiB."));
  EXPECT_THAT(run.out, HasSubstr("\nPredicted: "));
  EXPECT_THAT(run.out, HasSubstr("Messages inside a node (as from rank 0 to rank 1)"));
  EXPECT_THAT(run.out, HasSubstr("\nChoice: Direct LL, "));
  EXPECT_THAT(run.out, HasSubstr("the choice (time measured)"));
  EXPECT_THAT(run.out, HasSubstr("Direct LL comes first (time measured)"));
  EXPECT_EQ(run.err, "");

  const Run larger = explain("alltoall --preset hgx-h200x8 -s 512K");
  EXPECT_THAT(larger.out, HasSubstr("\nChoice: Direct LL128, "));
  EXPECT_THAT(larger.out, HasSubstr("more than 4012 bytes, which LL128 carries faster"));

  const json nothing = explainJson("sendrecv --preset hgx-h200x8 -s 0 -b 0 -e 8");
  EXPECT_EQ(nothing["routes"][0]["candidates"][1]["reason"], "there is nothing to send");
  EXPECT_EQ(nothing["routes"][0]["choice"]["channels"], 0);
  EXPECT_TRUE(nothing["predicted_us"].is_null());

  // Every path of one node, from small to large.
  const json report = explainJson("sendrecv -d uint8 --preset hgx-h200x8 -b 1 -e 1G");
  ASSERT_EQ(report["routes"].size(), 1u);
  const json& ranges = report["routes"][0]["ranges"];
  ASSERT_EQ(ranges.size(), 3u);
  EXPECT_EQ(ranges[0]["path"], "Direct LL");
  EXPECT_EQ(ranges[1]["path"], "Direct LL128");
  EXPECT_EQ(ranges[1]["last_bytes"], 8 << 20);
  EXPECT_EQ(ranges[2]["path"], "FIFO Simple");
  uint64_t next = 1;
  for (const json& range : ranges) {
    EXPECT_EQ(range["first_bytes"], next);
    next = range["last_bytes"].get<uint64_t>() + 1;
  }
  EXPECT_EQ(next, (uint64_t{1} << 30) + 1);
  EXPECT_DOUBLE_EQ(ranges[1]["last_us"], 28.97);
  EXPECT_DOUBLE_EQ(ranges[2]["last_us"], 2959);
}

TEST_F(ExplainProgram, PredictsMessages) {
  const json report = explainJson("sendrecv --preset hgx-h200x8 --ranks 2 -s 1M");
  EXPECT_DOUBLE_EQ(report["predicted_us"], 6.33);
  EXPECT_NEAR(report["gb_per_second"], 165.65, 0.01);
  EXPECT_EQ(report["bus_gb_per_second"], report["gb_per_second"]);
  for (const json& row : report["routes"][0]["candidates"]) {
    const bool known = row["path"] != "CopyEngines";
    EXPECT_EQ(row["predicted_us"].is_number(), known) << row;
    EXPECT_EQ(row["measured"], known) << row;
  }
  // Slower through the host, where nothing was measured.
  const json host = explainJson("sendrecv --preset hgx-h200x8 -s 1M", "NCCL_P2P_DISABLE=1");
  EXPECT_GT(host["predicted_us"], 2 * report["predicted_us"].get<double>());
  EXPECT_EQ(host["routes"][0]["candidates"][4]["measured"], false);
  // A call takes as long as the slowest of its routes.
  const json nodes = explainJson("alltoall --preset dgx-h100 --nodes 2 -s 16M");
  EXPECT_EQ(nodes["predicted_us"], nodes["routes"][1]["candidates"][4]["predicted_us"]);
  EXPECT_GT(nodes["predicted_us"], nodes["routes"][0]["candidates"][4]["predicted_us"]);
  EXPECT_TRUE(explainJson("gather --preset dgx-h100 --nodes 2 -s 1K")["predicted_us"].is_number())
      << "small messages over FIFOs inside the node, too";
  // A file of measured times replaces the prediction, and moves the border between paths.
  std::ofstream(at("times")) << "SendReceive Direct LL 1 2 1024 2\n"
                                "SendReceive Direct LL 1 2 8192 9\n"
                                "SendReceive Direct LL128 1 2 1024 4\n"
                                "SendReceive Direct LL128 1 2 8192 6\n";
  const json file = explainJson("sendrecv -d uint8 --preset hgx-h200x8 --ranks 2 -s 8K -b 1K -e 8K",
                                "UNISONO_TUNING_FILE=" + at("times"));
  EXPECT_EQ(file["predicted_us"], 6);
  EXPECT_EQ(file["routes"][0]["ranges"][0]["last_bytes"], 1024);
  EXPECT_EQ(file["routes"][0]["candidates"][1]["reason"],
            "slower from 1025 bytes on, by the times of UNISONO_TUNING_FILE");
}

TEST_F(ExplainProgram, MessagesFollowTheEnvironment) {
  const auto pathOf = [&](const std::string& arguments, const std::string& environment) {
    return explainJson(arguments, environment)["routes"][0]["choice"]["path"];
  };
  const std::string call = "sendrecv --preset hgx-h200x8 -s 1K";
  EXPECT_EQ(pathOf(call, ""), "Direct LL");
  EXPECT_EQ(pathOf(call, "NCCL_PROTO=LL128"), "Direct LL128");
  EXPECT_EQ(pathOf(call, "NCCL_ALGO=ring"), "FIFO Simple");
  EXPECT_EQ(pathOf(call, "NCCL_P2P_LL_THRESHOLD=10"), "FIFO Simple");
  EXPECT_EQ(pathOf(call, "NCCL_P2P_DISABLE=1"), "FIFO LL");
  const json large = explainJson("sendrecv --preset hgx-h200x8 -s 64M", "NCCL_MAX_P2P_NCHANNELS=2");
  EXPECT_EQ(large["routes"][0]["choice"]["channels"], 1);
  const json wide =
      explainJson("sendrecv --preset hgx-h200x8 --ranks 2 -s 64M", "NCCL_MAX_P2P_NCHANNELS=2");
  EXPECT_EQ(wide["routes"][0]["choice"]["channels"], 2);
}

TEST_F(ExplainProgram, MessagesBetweenNodesHaveTheirOwnChoice) {
  const std::string call = "gather --preset dgx-h100 --nodes 2 ";
  const json report = explainJson(call + "-s 16K", "NCCL_NET_PLUGIN=none");
  ASSERT_EQ(report["routes"].size(), 2u);
  EXPECT_EQ(report["routes"][1]["name"], "between nodes");
  EXPECT_EQ(report["routes"][1]["to"], 8);
  EXPECT_EQ(report["routes"][1]["links"], "the network");
  EXPECT_EQ(report["routes"][1]["choice"]["path"], "FIFO LL");
  for (const json& row : report["routes"][1]["candidates"]) {
    EXPECT_EQ(row["chosen"], row["reason"].get<std::string>().empty()) << row;
  }
  EXPECT_EQ(report["routes"][0]["choice"]["path"], "Direct LL");
  EXPECT_EQ(report["routes"][1]["candidates"][1]["reason"], "only inside one node");
  const Run large = explain(call + "-s 1G --svg " + at("messages.svg"), "NCCL_NET_PLUGIN=none");
  EXPECT_THAT(large.out, HasSubstr("more than 2048 bytes on a channel"));
  EXPECT_THAT(large.out, HasSubstr("copy engines carry all-gather and all-to-all only"));
  EXPECT_THAT(read(at("messages.svg")),
              AllOf(HasSubstr("<svg"), HasSubstr("FIFO Simple between nodes"),
                    HasSubstr("Direct LL inside a node"), Not(HasSubstr("Direct LL between nodes")),
                    HasSubstr("the choice inside a node"), HasSubstr("</svg>"),
                    Not(HasSubstr("nan")), Not(HasSubstr("inf,"))));
}

TEST_F(ExplainProgram, RunsMessagesOnSimulatedGpus) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << kNotUnderThreadSanitizer;
#endif
  const json report = explainJson("alltoall --preset hgx-h200x4 --ranks 2 --run -b 1K -e 64K");
  EXPECT_EQ(report["run"]["simulated"], true);
  ASSERT_EQ(report["run"]["rows"].size(), 4u);
  for (const json& row : report["run"]["rows"]) {
    EXPECT_GT(row["measured_us"], 0.0);
    EXPECT_GT(row["predicted_us"], 0.0);
    EXPECT_EQ(row["wrong"], 0);
    EXPECT_EQ(row["paths"][0], "Direct LL");
  }
  const Run text = explain("sendrecv --preset hgx-h200x4 --ranks 2 --run -s 1K");
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("A CPU simulated the GPUs"));
  EXPECT_THAT(text.out, Not(HasSubstr("measured / predicted")));
}

// A launch of the direct family has at most as many blocks as the user allows.
TEST_F(ExplainProgram, KnowsTheLimitOfBlocks) {
  const std::string call = "--preset hgx-h200x8 -s 1M";
  EXPECT_EQ(
      explainJson(call,
                  "NCCL_ALGO=direct NCCL_PROTO=LL128 NCCL_MAX_NCHANNELS=4")["choice"]["channels"],
      4);
}

TEST_F(ExplainProgram, WrongArgumentsAreErrorsThatListTheAcceptedOnes) {
  struct Case {
    const char* arguments;
    const char* part;
  };
  const Case cases[] = {
      {"all_to_all --preset dgx-h100",
       "expected one of all_reduce, all_gather, reduce_scatter, broadcast, reduce, sendrecv, "
       "alltoall, gather, scatter"},
      {"alltoall --preset dgx-h100 --as-nccl", "alltoall consists of messages; omit it"},
      {"sendrecv --preset dgx-h100 -b 2K -e 1K", "--min 2 KiB is larger than --max 1 KiB"},
      {"--preset dgx-h100 -d quad", "expected one of int8, uint8"},
      {"--preset dgx-h100 -o xor", "expected one of sum, prod, max, min, avg, mulsum"},
      {"--preset dgx-h100 -s many", "--size: \"many\" is not a size"},
      {"--preset dgx-h100 -b 1M -e 1K", "--min 1 MiB is larger than --max 1 KiB"},
      {"--preset dgx-h100 --nodes 2 --ranks 3", "3 ranks do not divide by 2 nodes"},
      {"--preset dgx-h100 --ranks 9", "has 8 GPUs, not 9"},
      {"--preset dgx-h101", "The presets are dgx-h100"},
      {"--preset dgx-h100 --as-nccl --run", "omit it or --as-nccl"},
      {"--file /nowhere", "/nowhere"},
      {"--bogus", "Accepted are --help, OPERATION, --size"},
      {"all_reduce more", "not expected: more"},
      {"--preset", "--preset"}};
  for (const Case& wrong : cases) {
    const Run run = explain(wrong.arguments);
    EXPECT_EQ(run.status, 2) << wrong.arguments;
    EXPECT_THAT(run.err, HasSubstr(wrong.part)) << wrong.arguments;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_THAT(explain("--preset dgx-h100", "NCCL_ALGO=fast").err, HasSubstr("Use Tree, Ring"));
  std::ofstream(at("times")) << "AllReduce Ring Simple 1 8 8\n";
  EXPECT_THAT(explain("--preset dgx-h100", "UNISONO_TUNING_FILE=" + at("times")).err,
              HasSubstr("has 6 words instead of 7"));
}

}  // namespace
}  // namespace unisono::explain
