// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "operations.h"
#include "program_testing.h"
#include "tuning/measured.h"

// `unisono tune` as its users run it.
namespace unisono::tune {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Program;
using testing::read;
using ::testing::StartsWith;

class TuneProgram : public Program {
 protected:
  Run tune(const std::string& arguments, const std::string& environment = "") {
    return run("tune " + arguments, environment);
  }
};

#ifndef __SANITIZE_THREAD__  // see ExplainProgram.RunsTheCallOnSimulatedGpus

// Every candidate that `explain` lists as able to run has times from the file, which choose.
TEST_F(TuneProgram, WritesATableThatCallsFollow) {
  const Run tuned = tune(at("table") + " --preset hgx-h200x4 --ranks 2 -b 1K -e 2K");
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_THAT(tuned.err, HasSubstr("AllReduce Tree LL128, 2 ranks: 1 KiB "));
  EXPECT_THAT(tuned.out,
              AllOf(HasSubstr("Choices with 2 ranks"), HasSubstr("UNISONO_TUNING_FILE=")));
  EXPECT_THAT(read(at("table")), StartsWith("# Written by unisono tune"));
  const std::string environment = "UNISONO_TUNING_FILE=" + at("table");
  for (const char* operation :
       {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}) {
    const Run explained =
        run(std::string("explain ") + operation + " --preset hgx-h200x4 --ranks 2 -s 2K --json",
            environment);
    ASSERT_EQ(explained.status, 0) << explained.err;
    const json report = json::parse(explained.out);
    int able = 0;
    for (const json& candidate : report["candidates"]) {
      const std::string reason = candidate["reason"];
      if (!reason.empty() && reason.find("times the time") == std::string::npos) continue;
      able++;
      EXPECT_EQ(candidate["measured"], true) << operation << candidate;
      EXPECT_GE(candidate["predicted_us"], report["choice"]["predicted_us"]) << operation;
    }
    EXPECT_GE(able, 4) << operation;
  }
  // So have messages, of every path.
  const tuning::MessageTable messages =
      tuning::parseMeasurements(read(at("table")), at("table")).messages;
  EXPECT_EQ(messages.size(), 12u);
  for (const tuning::MessageCurve& curve : messages) {
    const Run explained = run(
        fmt::format(
            "explain {} --preset hgx-h200x4 --ranks 2 -s 2K --json",
            bench::operations()[static_cast<size_t>(curve.operation) + tuning::kCollectives].name),
        environment);
    ASSERT_EQ(explained.status, 0) << explained.err;
    const json report = json::parse(explained.out);
    for (const json& row : report["routes"][0]["candidates"]) {
      if (row["path"] != nameOf(curve.path)) continue;
      // Interpolation may round the last digit.
      EXPECT_DOUBLE_EQ(row["predicted_us"], curve.points.back().timeUs) << row;
    }
  }
  for (const char* operation : {"all_reduce", "sendrecv"}) {
    const Run bench =
        run(fmt::format("bench {} -g 2 -b 1K -e 4K --backend host", operation), environment);
    EXPECT_EQ(bench.status, 0) << bench.out << bench.err;
    EXPECT_THAT(bench.out, HasSubstr("# all results correct"));
  }
}

TEST_F(TuneProgram, AFailedRunLeavesTheFileAsItWas) {
  std::ofstream(at("table")) << "# mine\n";
  const Run run =
      tune(at("table") + " --preset hgx-h200x4 --ranks 2 -b 1K -e 1K", "NCCL_SOCKET_IFNAME=none");
  EXPECT_EQ(run.status, 3);
  EXPECT_THAT(run.err,
              AllOf(HasSubstr("unisono tune: AllReduce"), HasSubstr("NCCL_SOCKET_IFNAME")));
  EXPECT_EQ(read(at("table")), "# mine\n");
  EXPECT_EQ(
      tune(at("new") + " --preset hgx-h200x4 --ranks 2 -b 1K -e 1K", "NCCL_SOCKET_IFNAME=none")
          .status,
      3);
  EXPECT_FALSE(std::filesystem::exists(at("new")));
}

#endif

TEST_F(TuneProgram, WrongArgumentsAreErrors) {
  struct Case {
    std::string arguments;
    const char* part;
  };
  const std::string file = at("table");
  const Case cases[] = {
      {"--preset dgx-h100", "FILE is required"},
      {"/nowhere/table --preset dgx-h100", "cannot write /nowhere/table"},
      {file + " --preset dgx-h101", "The presets are dgx-h100"},
      {file + " --preset dgx-h100 --ranks 1", "1 is not from 2 to the 8 GPUs"},
      {file + " --preset dgx-h100 --ranks 2,9", "9 is not from 2 to the 8 GPUs"},
      {file + " --preset dgx-h100 --ranks 2,", "\"2,\" is not a list of numbers"},
      {file + " --preset dgx-h100 --nodes 2 --ranks 3", "does not divide by 2 nodes"},
      {file + " --preset dgx-h100 -b 1M -e 1K", "--min 1 MiB is not from 1 B to --max 1 KiB"},
      {file + " --preset dgx-h100 -e much", "--max: \"much\" is not a size"},
      {file + " --nodes 2", "--nodes and --root need --file or --preset"},
      {file + " --root /tmp", "--nodes and --root need --file or --preset"}};
  for (const Case& wrong : cases) {
    const Run run = tune(wrong.arguments);
    EXPECT_EQ(run.status, 2) << wrong.arguments;
    EXPECT_THAT(run.err, HasSubstr(wrong.part)) << wrong.arguments;
    EXPECT_EQ(run.out, "");
    EXPECT_FALSE(std::filesystem::exists(file)) << wrong.arguments;
  }
}

}  // namespace
}  // namespace unisono::tune
