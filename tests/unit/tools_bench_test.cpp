// SPDX-License-Identifier: Apache-2.0
// The program end to end, on the fake library: what it prints and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

using testing::HasSubstr;
using testing::Not;

struct Outcome {
  int status;
  std::string output;  // both streams
};

// `environment`: "NAME=value", or empty.
Outcome bench(const std::string& arguments, const std::string& environment = "") {
  const std::string command = "env " + environment + " " UNISONO_PROGRAM " bench " + arguments +
                              " --library " UNISONO_FAKE_LIBRARY " --backend host 2>&1";
  Outcome outcome{-1, ""};
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer;
  while (size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), got);
  }
  int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

const char* const kOperations[] = {"all_reduce", "all_gather", "reduce_scatter",
                                   "broadcast",  "reduce",     "sendrecv",
                                   "alltoall",   "gather",     "scatter"};

class Operations : public testing::TestWithParam<const char*> {};

TEST_P(Operations, PassWithEveryTypeOperatorAndRoot) {
  Outcome outcome =
      bench(std::string(GetParam()) + " -g 3 -b 4 -e 4K -f 32 -d all -o all -r all -n 2 -w 1 -c 2");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("# all results correct"));
  EXPECT_THAT(outcome.output, HasSubstr("bfloat16"));
}

TEST_P(Operations, PassWithThreads) {
  Outcome outcome = bench(std::string(GetParam()) + " -t 2 -g 2 -b 1K -e 64K -f 8 -n 3 -z 1");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("4 ranks"));
}

TEST_P(Operations, SeeAWrongElement) {
  for (const char* type : {"int32", "float", "half", "f8e5m2"}) {
    Outcome outcome =
        bench(std::string(GetParam()) + " -g 2 -b 1K -r 1 -d " + type, "FAKE_NCCL_FAULT=element");
    EXPECT_EQ(outcome.status, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("WRONG"));
    EXPECT_THAT(outcome.output, HasSubstr("rank 1 (device 1), receive buffer"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Operations, testing::ValuesIn(kOperations),
                         [](const auto& test) { return std::string(test.param); });

TEST(Bench, SeesWritesOutsideTheResult) {
  for (const char* operation : {"all_reduce", "all_gather", "gather"}) {
    Outcome outcome = bench(std::string(operation) + " -g 2 -b 1K -r 0", "FAKE_NCCL_FAULT=outside");
    EXPECT_EQ(outcome.status, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("1 bytes outside the result were written"));
  }
}

TEST(Bench, SeesWritesToTheInput) {
  Outcome outcome = bench("all_gather -g 2 -b 1K", "FAKE_NCCL_FAULT=input");
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("overwrote its own input"));
}

TEST(Bench, DoesNotLookWhenToldSo) {
  Outcome outcome = bench("all_reduce -g 2 -b 1K -c 0", "FAKE_NCCL_FAULT=element");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("results were not checked"));
}

TEST(Bench, LargeSizesAreCheckedToTheEnd) {
  // The fault is in the last element of some megabytes.
  Outcome outcome = bench("all_gather -g 2 -b 5M -n 1 -w 0", "FAKE_NCCL_FAULT=element");
  EXPECT_EQ(outcome.status, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("byte 5242876"));
}

TEST(Bench, LibraryErrorsEndWithItsWords) {
  for (const char* ranks : {"-g 2", "-g 1 -t 2"}) {
    Outcome outcome = bench(std::string("all_reduce -b 8 ") + ranks, "FAKE_NCCL_FAULT=error");
    EXPECT_EQ(outcome.status, 3) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("the fake was asked to fail"));
    // The class of the error would only repeat the text.
    EXPECT_THAT(outcome.output, Not(HasSubstr("invalid usage")));
    EXPECT_THAT(outcome.output, HasSubstr("ncclAllReduce"));
  }
}

TEST(Bench, AHangEndsWithTheTimeout) {
  Outcome outcome = bench("all_reduce -g 2 -b 8 -T 1", "FAKE_NCCL_FAULT=hang");
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("did not complete within 1 s"));
}

TEST(Bench, WrongOptionsEndWithStatus2) {
  Outcome outcome = bench("all_reduce -d complex");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.output, HasSubstr("bfloat16"));
  EXPECT_EQ(bench("all_reduce --no-such-option").status, 2);
  EXPECT_EQ(bench("no_operation").status, 2);
  EXPECT_EQ(bench("all_reduce -g 100").status, 2);
  EXPECT_EQ(bench("all_reduce --topo /no/such/file.xml").status, 2);
}

TEST(Bench, EqualSeedsGiveEqualInputs) {
  Outcome first = bench("all_reduce -g 2 -b 64 --seed 5", "FAKE_NCCL_FAULT=element");
  Outcome second = bench("all_reduce -g 2 -b 64 --seed 5", "FAKE_NCCL_FAULT=element");
  Outcome third = bench("all_reduce -g 2 -b 64 --seed 6", "FAKE_NCCL_FAULT=element");
  auto found = [](const Outcome& outcome) {
    size_t at = outcome.output.find("found");
    return at == std::string::npos ? "" : outcome.output.substr(at, 30);
  };
  EXPECT_NE(found(first), "");
  EXPECT_EQ(found(first), found(second));
  EXPECT_NE(found(first), found(third));
  EXPECT_THAT(first.output, HasSubstr("seed 5"));
}

TEST(Bench, WritesJson) {
  const std::string path = testing::TempDir() + "/bench_" + std::to_string(::getpid()) + ".json";
  Outcome outcome = bench("all_gather -g 4 -b 1K -e 2K --json " + path);
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  std::ifstream file(path);
  nlohmann::json json = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  EXPECT_EQ(json["operation"], "all_gather");
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["wrong"], 0);
  EXPECT_EQ(json["bus_factor"], 0.75);
  ASSERT_EQ(json["rows"].size(), 2u);
  EXPECT_EQ(json["rows"][1]["bytes"], 2048);
  EXPECT_EQ(json["rows"][1]["count"], 128);
  EXPECT_GT(json["rows"][0]["in_place"]["ours"]["time"]["median"], 0);
  Outcome refused = bench("all_gather -g 2 -b 8 --json /no/such/folder/x.json");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.output, HasSubstr("/no/such/folder/x.json"));
  EXPECT_THAT(refused.output, Not(HasSubstr("all results correct")));  // before it measures
}

TEST(Bench, ComparesTwoLibraries) {
  const std::string path = testing::TempDir() + "/against_" + std::to_string(::getpid()) + ".json";
  Outcome outcome = bench(
      "all_reduce -g 2 -b 1K -e 2K --repeats 4 --against " UNISONO_OTHER_LIBRARY " --json " + path);
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("ratio min/median/max"));
  std::ifstream file(path);
  nlohmann::json json = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  ASSERT_EQ(json["libraries"].size(), 2u);
  EXPECT_NE(json["libraries"][0]["path"], json["libraries"][1]["path"]);
  const nlohmann::json& place = json["rows"][0]["out_of_place"];
  ASSERT_EQ(place["ours"]["seconds"].size(), 4u);
  ASSERT_EQ(place["other"]["seconds"].size(), 4u);
  EXPECT_LE(place["ratio"]["min"], place["ratio"]["median"]);
  EXPECT_LE(place["ratio"]["median"], place["ratio"]["max"]);
}

TEST(Bench, RanksInSeveralProcessesNeedALibraryThatConnectsThem) {
  // The fake does not: what is tested is that the run ends with an error, and soon.
  Outcome outcome = bench("all_reduce --processes -g 2 -b 8 -T 1");
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("did not complete within 1 s"));
  EXPECT_EQ(bench("all_reduce --processes -g 2 -b 8", "FAKE_NCCL_FAULT=error").status, 3);
}

// A single rank needs no peer, so a run in a child process can complete.
TEST(Bench, RunsInAChildProcess) {
  Outcome outcome = bench("all_reduce --processes -g 1 -b 8 -e 1K");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("# all results correct"));
  EXPECT_EQ(bench("all_reduce --processes -g 0 -d x").status, 2);
}

TEST(Bench, AMissingLibraryIsNamed) {
  std::string command = UNISONO_PROGRAM " bench all_reduce --library /no/such/lib.so 2>&1";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::array<char, 4096> buffer{};
  size_t got = std::fread(buffer.data(), 1, buffer.size() - 1, pipe);
  int status = ::pclose(pipe);
  EXPECT_EQ(WEXITSTATUS(status), 3);
  EXPECT_THAT(std::string(buffer.data(), got), HasSubstr("/no/such/lib.so"));
}

}  // namespace
