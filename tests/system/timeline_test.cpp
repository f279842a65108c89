// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "testing.h"

// The file of UNISONO_TRACE.
namespace unisono::system_test {
namespace {

using nlohmann::json;

std::string textOf(const std::string& path) {
  std::ostringstream all;
  all << std::ifstream(path).rdbuf();
  return all.str();
}

// What the library has logged in all tests.
class Log {
 public:
  ~Log() { ::unlink(path_.c_str()); }
  std::string text() const { return textOf(path_); }

 private:
  const std::string path_ = testing::TempDir() + "unisono_trace_log_" + std::to_string(::getpid());
  const Setting level_{"NCCL_DEBUG", "WARN"}, file_{"NCCL_DEBUG_FILE", path_.c_str()};
};
const Log log;

// A name in the directory of temporary files; the files of ranks 0 and 1 are removed.
class TraceFile {
 public:
  explicit TraceFile(const std::string& name)
      : path_(testing::TempDir() + "unisono_trace_" + std::to_string(::getpid()) + name) {}
  ~TraceFile() {
    for (const int rank : {0, 1}) ::unlink(path(rank).c_str());
  }
  TraceFile(const TraceFile&) = delete;
  const std::string& pattern() const { return path_; }
  std::string path(int rank = 0) const {
    std::string path = path_;
    if (const size_t at = path.find("%r"); at != std::string::npos) {
      path.replace(at, 2, std::to_string(rank));
    }
    return path;
  }
  json read(int rank = 0) const { return json::parse(textOf(path(rank))); }

 private:
  std::string path_;
};

// The complete events of a name.
std::vector<json> slicesOf(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "X" && event["name"] == name) found.push_back(event);
  }
  return found;
}

double endOf(const json& slice) {
  return slice["ts"].get<double>() + slice["dur"].get<double>();
}

// Rounding to nanoseconds aside.
bool contains(const json& outer, const json& inner) {
  constexpr double kRounding = 0.002;
  return outer["pid"] == inner["pid"] && outer["tid"] == inner["tid"] &&
         outer["ts"].get<double>() <= inner["ts"].get<double>() + kRounding &&
         endOf(outer) + kRounding >= endOf(inner);
}

double nowMicroseconds(const json& trace) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return (static_cast<double>(std::chrono::nanoseconds(now).count()) -
          trace["baseTimeNanoseconds"].get<double>()) /
         1000;
}

// The slices of channels, which the blocks of kernels have noted.
std::vector<json> channelsOf(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const json& slice : slicesOf(trace, name)) {
    if (slice["cat"] == "channel") found.push_back(slice);
  }
  return found;
}

// The clock of the device is read between two looks at that of the CPU, which may be far apart.
constexpr double kClockError = 500'000;

TEST(Timeline, ShowsACallItsStepsAndItsKernel) {
  const TraceFile file("_%r");
  const Setting trace("UNISONO_TRACE", file.pattern().c_str());
  {
    const Ranks ranks(2);
    onThreads(2, [&](int rank) {
      const DeviceBuffer buffer(rank, 4000);
      check(ncclAllReduce(buffer.as(), buffer.as(), 1000, ncclFloat, ncclSum, ranks.comm(rank),
                          ranks.stream(rank)));
      device::synchronize(ranks.stream(rank));
    });
  }
  for (const int rank : {0, 1}) {
    const json all = file.read(rank);
    const auto calls = slicesOf(all, "ncclAllReduce");
    ASSERT_EQ(calls.size(), 1u);
    const json arguments = calls[0]["args"];
    EXPECT_EQ(arguments["Collective name"], "allreduce");
    EXPECT_EQ(arguments["In msg nelems"], 1000);
    EXPECT_EQ(arguments["Out msg nelems"], 1000);
    EXPECT_EQ(arguments["Group size"], 2);
    EXPECT_EQ(arguments["dtype"], "Float");
    EXPECT_EQ(arguments["Process Group Ranks"], "[0, 1]");
    EXPECT_EQ(arguments["Rank"], rank);
    EXPECT_TRUE(arguments.contains("Algorithm")) << arguments;
    EXPECT_EQ(calls[0]["pid"], ::getpid());
    EXPECT_LE(endOf(calls[0]), nowMicroseconds(all));
    EXPECT_GT(endOf(calls[0]), nowMicroseconds(all) - 600e6) << "not of the last ten minutes";
    for (const char* step : {"plan", "connect", "launch"}) {
      const auto steps = slicesOf(all, step);
      ASSERT_EQ(steps.size(), 1u) << step;
      // Connecting may run on a thread of its own.
      const bool isHere = std::string(step) != "connect";
      EXPECT_TRUE(!isHere || contains(calls[0], steps[0])) << step;
    }
    const auto kernels = slicesOf(all, "ncclDevKernel_AllReduce");
    ASSERT_EQ(kernels.size(), 1u);
    EXPECT_EQ(kernels[0]["cat"], "kernel");
    EXPECT_EQ(kernels[0]["pid"], rank) << "of the device";
    EXPECT_GT(kernels[0]["dur"], 0.0);
    EXPECT_GE(kernels[0]["ts"].get<double>(), slicesOf(all, "plan")[0]["ts"].get<double>());
    EXPECT_EQ(kernels[0]["args"]["In msg nelems"], 1000);
    EXPECT_EQ(slicesOf(all, "ncclCommInitRank").size(), 1u);
    const auto channels = channelsOf(all, "AllReduce");
    ASSERT_FALSE(channels.empty());
    for (size_t i = 0; i < channels.size(); i++) {
      EXPECT_EQ(channels[i]["args"]["Channel"], i);
      EXPECT_EQ(channels[i]["args"]["Rank"], rank);
      EXPECT_EQ(channels[i]["pid"], rank) << "of the device";
      const auto launch = channels[i]["args"]["Launch"].get<std::string>();
      EXPECT_NE(launch.find("blocks: " + std::to_string(channels.size())), std::string::npos)
          << launch;
      EXPECT_GT(channels[i]["dur"], 0.0);
      EXPECT_LE(channels[i]["dur"], kernels[0]["dur"]);
      EXPECT_GE(channels[i]["ts"].get<double>(), kernels[0]["ts"].get<double>() - kClockError);
      EXPECT_LE(endOf(channels[i]), endOf(kernels[0]) + kClockError);
    }
  }
}

TEST(Timeline, OneFileForTheRanksOfAProcess) {
  const TraceFile file("");
  const Setting trace("UNISONO_TRACE", file.pattern().c_str());
  for (int round = 1; round <= 2; round++) {
    {
      const Ranks ranks(2);
      const DeviceBuffer buffers[] = {{0, 4000}, {1, 4000}};
      ranks.inGroup([&](int rank) {
        const int peer = 1 - rank;
        std::byte* data = buffers[rank].as();
        check(ncclSend(data, 100, ncclHalf, peer, ranks.comm(rank), ranks.stream(rank)));
        check(ncclRecv(data + 2000, 100, ncclHalf, peer, ranks.comm(rank), ranks.stream(rank)));
      });
      ranks.synchronize();
    }
    const json all = file.read();
    const auto sends = slicesOf(all, "ncclSend");
    ASSERT_EQ(sends.size(), 2u * static_cast<size_t>(round)) << "later communicators add to it";
    EXPECT_EQ(sends[0]["args"]["Src Rank"], 0);
    EXPECT_EQ(sends[0]["args"]["Dst Rank"], 1);
    EXPECT_EQ(slicesOf(all, "ncclDevKernel_Send and 1 more").size(), sends.size());
    std::set<int64_t> tracks;  // of channels: each rank has its own
    for (const json& slice : channelsOf(all, "Send and 1 more")) {
      tracks.insert(slice["tid"].get<int64_t>());
    }
    EXPECT_GE(tracks.size(), 2u * static_cast<size_t>(round));
  }
}

TEST(Timeline, ShowsTheReplaysOfCapturedCalls) {
  constexpr int kReplays = 3;
  const TraceFile file("_graph_%r");
  const Setting trace("UNISONO_TRACE", file.pattern().c_str());
  double begin = 0, end = 0;
  {
    const Ranks ranks(2);
    onThreads(2, [&](int rank) {
      const DeviceBuffer buffer(rank, 4000);
      const cudaStream_t stream = ranks.stream(rank);
      unisonoHostGraph_t graph = nullptr;
      check(unisonoHostStreamBeginCapture(stream));
      for (const size_t count : {1000, 10}) {
        check(ncclAllReduce(buffer.as(), buffer.as(), count, ncclFloat, ncclSum, ranks.comm(rank),
                            stream));
      }
      check(unisonoHostStreamEndCapture(stream, &graph));
      const auto now = [] {
        return static_cast<double>(std::chrono::system_clock::now().time_since_epoch().count());
      };
      if (rank == 0) begin = now();
      for (int i = 0; i < kReplays; i++) check(unisonoHostGraphLaunch(graph, stream));
      device::synchronize(stream);
      if (rank == 0) end = now();
      check(unisonoHostGraphDestroy(graph));
    });
  }
  for (const int rank : {0, 1}) {
    const json all = file.read(rank);
    EXPECT_EQ(slicesOf(all, "ncclAllReduce").size(), 2u);
    const auto kernels = slicesOf(all, "ncclDevKernel_AllReduce");
    ASSERT_EQ(kernels.size(), 2u * kReplays);
    double before =
        rank == 0 ? (begin - all["baseTimeNanoseconds"].get<double>()) / 1000 - kClockError : 0;
    for (size_t i = 0; i < kernels.size(); i++) {
      EXPECT_EQ(kernels[i]["args"]["Captured call"], i % 2 + 1);
      EXPECT_EQ(kernels[i]["args"]["In msg nelems"], i % 2 == 0 ? 1000 : 10);
      EXPECT_EQ(kernels[i]["pid"], rank) << "of the device";
      EXPECT_GE(kernels[i]["ts"].get<double>() + 0.002, before) << "replays do not overlap";
      before = endOf(kernels[i]);
    }
    // Blocks of captured calls keep the times of the last replay.
    const auto channels = channelsOf(all, "AllReduce");
    for (const json& last : {kernels[kernels.size() - 2], kernels.back()}) {
      const auto found = std::ranges::find_if(channels, [&](const json& slice) {
        return slice["ts"].get<double>() + 0.002 >= last["ts"].get<double>() &&
               endOf(slice) <= endOf(last) + 0.002;
      });
      EXPECT_NE(found, channels.end()) << last;
    }
    if (rank == 0) {
      EXPECT_LE(before, (end - all["baseTimeNanoseconds"].get<double>()) / 1000 + kClockError);
    }
  }
}

// Two ranks that reach each other over sockets only.
TEST(Timeline, ShowsWhatGoesOverTheNetwork) {
  constexpr size_t kCount = 500'000;
  const TraceFile file("_net_%r");
  {
    const Setting trace("UNISONO_TRACE", file.pattern().c_str());
    const Setting settings[] = {{"NCCL_P2P_DISABLE", "1"},
                                {"NCCL_SHM_DISABLE", "1"},
                                {"NCCL_ALGO", "ring"},
                                {"NCCL_PROTO", "Simple"}};
    const Ranks ranks(2);
    onThreads(2, [&](int rank) {
      const DeviceBuffer buffer(rank, kCount * sizeof(float));
      check(ncclAllReduce(buffer.as(), buffer.as(), kCount, ncclFloat, ncclSum, ranks.comm(rank),
                          ranks.stream(rank)));
      device::synchronize(ranks.stream(rank));
    });
  }
  std::map<int64_t, uint64_t> slots[2][2];  // by rank, direction and channel
  for (const int rank : {0, 1}) {
    const json all = file.read(rank);
    const json call = slicesOf(all, "ncclAllReduce").at(0);
    uint64_t bytes = 0;
    std::map<std::pair<int64_t, int64_t>, double> ends;  // by track
    for (const bool sends : {false, true}) {
      for (const json& slice :
           slicesOf(all, sends ? "send over the network" : "receive over the network")) {
        const json arguments = slice["args"];
        EXPECT_EQ(arguments["Rank"], rank);
        EXPECT_EQ(arguments["Peer"], 1 - rank);
        EXPECT_EQ(arguments["Protocol"], "Simple");
        EXPECT_EQ(arguments.contains("Bytes"), sends);
        if (sends) bytes += arguments["Bytes"].get<uint64_t>();
        slots[rank][sends ? 1 : 0][arguments["Channel"].get<int64_t>()] +=
            arguments["Slots"].get<uint64_t>();
        EXPECT_GE(slice["ts"].get<double>(), call["ts"].get<double>());
        EXPECT_LE(endOf(slice), nowMicroseconds(all));
        double& end = ends[{slice["pid"].get<int64_t>(), slice["tid"].get<int64_t>()}];
        EXPECT_GE(slice["ts"].get<double>() + 0.002, end) << "slices of a track overlap";
        end = endOf(slice);
      }
    }
    // A ring of two ranks: half of the data to be reduced, and the result of the other half.
    EXPECT_EQ(bytes, kCount * sizeof(float));
  }
  EXPECT_FALSE(slots[0][1].empty());
  EXPECT_EQ(slots[0][1], slots[1][0]);
  EXPECT_EQ(slots[1][1], slots[0][0]);
}

// As it is after a kill.
TEST(Timeline, IsWellFormedWhileTheProcessRuns) {
  const TraceFile file("_running");
  const Setting trace("UNISONO_TRACE", file.pattern().c_str());
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  // What is read while it is being written may be torn.
  const auto isComplete = [&] {
    const json all = json::parse(textOf(file.path()), nullptr, false);
    return !all.is_discarded() && slicesOf(all, "ncclDevKernel_AllReduce").size() == 2;
  };
  while (!isComplete()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    ::usleep(1000);
  }
}

TEST(Timeline, IsLeftOutWithOneWarningWhereItCannotBeWritten) {
  const TraceFile busy("_busy");
  const int other = ::open(busy.path().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  ASSERT_EQ(::write(other, "keep", 4), 4);
  for (const std::string& path : {std::string("/nowhere/trace.json"), busy.path()}) {
    const Setting trace("UNISONO_TRACE", path.c_str());
    const Ranks ranks(2);
    onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
  }
  ::close(other);
  const std::string text = log.text();
  EXPECT_NE(text.find("/nowhere/trace.json cannot be written"), std::string::npos) << text;
  EXPECT_NE(text.find("another process writes it"), std::string::npos) << text;
  size_t warnings = 0;
  for (size_t at = 0; (at = text.find("WARN", at)) != std::string::npos; at++) warnings++;
  EXPECT_EQ(warnings, 2u) << text;
  EXPECT_EQ(textOf(busy.path()), "keep");
}

}  // namespace
}  // namespace unisono::system_test
