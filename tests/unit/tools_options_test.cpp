// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "bench_options.h"
#include "bench_report.h"
#include "machine.h"

namespace unisono::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

BenchOptions parse(std::vector<std::string> words) {
  CLI::App app;
  BenchArguments arguments;
  addBenchCommand(app, arguments);
  words.insert(words.begin(), "bench");
  std::reverse(words.begin(), words.end());
  app.parse(words);
  return finishOptions(arguments);
}

std::string refusal(std::vector<std::string> words) {
  try {
    parse(std::move(words));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ParseSize, TakesSuffixes) {
  EXPECT_EQ(parseSize("0"), 0u);
  EXPECT_EQ(parseSize("8"), 8u);
  EXPECT_EQ(parseSize("1K"), 1024u);
  EXPECT_EQ(parseSize("4m"), 4u << 20);
  EXPECT_EQ(parseSize("1G"), 1u << 30);
  EXPECT_EQ(parseSize("2T"), size_t{2} << 40);
  EXPECT_EQ(parseSize("3MiB"), 3u << 20);
  EXPECT_EQ(parseSize("3MB"), 3u << 20);
  EXPECT_EQ(parseSize("7B"), 7u);
  EXPECT_EQ(parseSize("1.5K"), 1536u);
}

TEST(ParseSize, RefusesTheRest) {
  for (const char* text : {"", "K", "x", "-1", "1X", "1KX", "1.3", "1e99", "nan", "inf", "1 K",
                           "99999999999999T", "0x10"}) {
    EXPECT_THROW(parseSize(text), UsageError) << text;
  }
}

TEST(BenchSizes, GrowByFactorOrStep) {
  EXPECT_THAT(benchSizes(parse({"reduce", "-b", "8", "-e", "100"}), 1 << 20),
              ElementsAre(8, 16, 32, 64));
  EXPECT_THAT(benchSizes(parse({"reduce", "-b", "8", "-e", "100", "-f", "4"}), 1),
              ElementsAre(8, 32));
  EXPECT_THAT(benchSizes(parse({"reduce", "-b", "8", "-e", "40", "-i", "16"}), 1),
              ElementsAre(8, 24, 40));
  EXPECT_THAT(benchSizes(parse({"reduce", "-b", "0", "-e", "2"}), 1), ElementsAre(0, 1, 2));
  EXPECT_THAT(benchSizes(parse({"reduce", "-b", "1M"}), 64), ElementsAre(1 << 20));
  EXPECT_THAT(benchSizes(parse({"reduce", "-e", "4"}), 64), ElementsAre(4));
  EXPECT_THAT(benchSizes(parse({"reduce"}), 32), ElementsAre(8, 16, 32));
}

TEST(Options, AreRead) {
  BenchOptions options = parse(
      {"all_reduce",    "-g", "2",   "-t", "3", "-n", "7", "-w",     "1",  "-c", "2", "-d",
       "half,fp8_e4m3", "-o", "all", "-z", "1", "-R", "2", "--seed", "42", "-a", "3", "--library",
       "x.so"});
  EXPECT_EQ(options.operation, BenchOperation::allReduce);
  EXPECT_EQ(options.gpusPerThread, 2);
  EXPECT_EQ(options.threads, 3);
  EXPECT_EQ(options.iterations, 7);
  EXPECT_EQ(options.warmup, 1);
  EXPECT_EQ(options.checks, 2);
  EXPECT_THAT(options.types, ElementsAre(ElementType::float16, ElementType::float8e4m3));
  EXPECT_EQ(options.reductions.size(), 6u);
  EXPECT_TRUE(options.blocking);
  EXPECT_EQ(options.registration, 2);
  EXPECT_EQ(options.seed, 42u);
  EXPECT_EQ(options.averaging, Averaging::max);
  EXPECT_EQ(options.library, "x.so");
  EXPECT_EQ(parse({"broadcast", "-r", "all"}).root, -1);
  EXPECT_EQ(parse({"broadcast", "-r", "-1"}).root, -1);
  EXPECT_EQ(parse({"broadcast", "-d", "all"}).types.size(), size_t{kElementTypes});
  EXPECT_EQ(parse({"all_gather", "-o", "all"}).reductions.size(), 1u);
  EXPECT_EQ(parse({"reduce", "--against", "y.so"}).repeatCount(), 5);
  EXPECT_EQ(parse({"reduce", "-e", "1K", "-e", "2K"}).maxBytes, size_t{2048});
}

TEST(Options, AreRefusedWithWhatIsAllowed) {
  EXPECT_THAT(refusal({"allreduce"}), HasSubstr("all_reduce, all_gather"));
  EXPECT_THAT(refusal({"reduce", "-d", "complex"}), HasSubstr("bfloat16"));
  EXPECT_THAT(refusal({"reduce", "-o", "xor"}), HasSubstr("mulsum"));
  EXPECT_THAT(refusal({"reduce", "-b", "1X"}), HasSubstr("powers of 1024"));
  EXPECT_THAT(refusal({"reduce", "-b", "2M", "-e", "1M"}),
              HasSubstr("-b 2 MiB is larger than -e 1 MiB"));
  EXPECT_THAT(refusal({"reduce", "-f", "1"}), HasSubstr("greater than 1"));
  EXPECT_THAT(refusal({"reduce", "-i", "0"}), HasSubstr("must be at least 1"));
  EXPECT_THAT(refusal({"reduce", "-n", "0"}), HasSubstr("must be at least 1"));
  EXPECT_THAT(refusal({"reduce", "-R", "3"}), HasSubstr("from 0 to 2"));
  EXPECT_THAT(refusal({"reduce", "-r", "first"}), HasSubstr("-1 or all"));
  EXPECT_THAT(refusal({"reduce", "--backend", "rocm"}), HasSubstr("expected host or cuda"));
  EXPECT_THAT(refusal({"reduce", "--backend", "host", "-G", "1"}), HasSubstr("graphs"));
  EXPECT_THAT(refusal({"reduce", "--nodes", "2", "-G", "1"}), HasSubstr("graphs"));
  EXPECT_THAT(refusal({"reduce", "--backend", "cuda", "--topo", "x.xml"}), HasSubstr("host"));
  EXPECT_THAT(refusal({"reduce", "--processes", "-t", "2"}), HasSubstr("-t must be 1"));
  EXPECT_THAT(refusal({"reduce", "--seed", "x"}), HasSubstr("--seed"));
}

BenchMachine machineOf(int gpus, const std::string& backend = "host") {
  BenchMachine machine;
  machine.backend = backend;
  machine.deviceNames.assign(static_cast<size_t>(gpus), "a GPU");
  return machine;
}

TEST(Place, NumbersRanksByNodeProcessThreadAndGpu) {
  Placement threads = place(parse({"reduce", "-t", "2", "--nodes", "2"}), machineOf(8), false);
  EXPECT_EQ(threads.ranks(), 16);
  EXPECT_EQ(threads.workers(), 4);
  std::vector<LocalRank> last = threads.ranksOf(3);
  ASSERT_EQ(last.size(), 4u);
  EXPECT_EQ(last[0].rank, 12);
  EXPECT_EQ(last[0].device, 4);
  EXPECT_EQ(threads.nodeOf(1), 1);

  Placement processes =
      place(parse({"reduce", "--processes", "--nodes", "2", "-g", "3"}), machineOf(8), false);
  EXPECT_EQ(processes.ranks(), 6);
  EXPECT_EQ(processes.processes(), 6);
  EXPECT_EQ(processes.nodeOf(3), 1);
  EXPECT_EQ(processes.ranksOf(4)[0].device, 1);
}

TEST(Place, DividesACudaMachineAmongTheNodes) {
  const BenchMachine machine = machineOf(4, "cuda");
  const BenchOptions options =
      parse({"reduce", "--backend", "cuda", "--processes", "--nodes", "2"});
  const Placement processes = place(options, machine, false);
  ASSERT_EQ(processes.ranks(), 4);
  EXPECT_EQ(processes.nodeOf(2), 1);
  EXPECT_EQ(processes.ranksOf(2)[0].device, 2);

  const Placement whole =
      place(parse({"reduce", "--backend", "cuda", "--nodes", "2"}), machine, false);
  ASSERT_EQ(whole.ranksOf(1).size(), 2u);
  EXPECT_EQ(whole.ranksOf(1)[1].device, 3);

  // Two nodes on one GPU.
  const BenchOptions crowded =
      parse({"reduce", "--backend", "cuda", "--processes", "--nodes", "2", "-g", "1"});
  EXPECT_THROW(place(crowded, machineOf(1, "cuda"), false), UsageError);
  EXPECT_EQ(place(crowded, machineOf(1, "cuda"), true).ranksOf(1)[0].device, 0);
}

TEST(Place, RefusesWhatTheMachineLacks) {
  EXPECT_THROW(place(parse({"reduce", "-g", "9"}), machineOf(8), false), UsageError);
  EXPECT_EQ(place(parse({"reduce", "-g", "9"}), machineOf(8), true).ranksOf(0)[8].device, 0);
  EXPECT_THROW(place(parse({"reduce", "-r", "8"}), machineOf(8), false), UsageError);
}

TEST(Report, SpreadAndRatio) {
  Spread odd = spreadOf({3, 1, 2});
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.max, 3);
  EXPECT_EQ(spreadOf({4, 1, 2, 3}).median, 2.5);
  Measurement ours{{1, 2}, 0, ""}, other{{2, 1}, 0, ""};
  EXPECT_THAT(ratios(ours, other), ElementsAre(2, 0.5));
}

}  // namespace
}  // namespace unisono::bench
