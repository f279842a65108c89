// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "child_processes.h"

// Jobs that hang, and the log in which the report appears.
namespace unisono::system_test {

inline constexpr size_t kFewInts = 64, kManyInts = 300'000;
inline constexpr std::chrono::milliseconds kPatience{60'000};
// UNISONO_HANG_SECONDS of most tests: the ranks of one are in their calls by then, however busy the
// machine is.
inline constexpr const char* kHangSeconds = kSanitized ? "6" : "2";

// The log of all processes of a test.
class Log {
 public:
  Log() : file_(testing::TempDir() + "unisono_hang_" + std::to_string(::getpid())) {
    ::unlink(file_.c_str());
  }
  ~Log() { ::unlink(file_.c_str()); }
  const std::string& file() const { return file_; }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(file_).rdbuf();
    return all.str();
  }
  // One for a hang, but a second rank reports too if the watchdog of the first is kept from running
  // for some seconds.
  bool hasReport() const { return reports() == 1 || reports() == 2; }
  int reports() const {
    const std::string all = text();
    int count = 0;
    for (size_t at = all.find("No progress for"); at != std::string::npos;
         at = all.find("No progress for", at + 1)) {
      count++;
    }
    return count;
  }
  // For one that has `part`: a busy machine may take so long for an earlier call that there is a
  // report of that as well.
  bool waitForReport(const char* part = "unisono_hang") const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (text().find(part) == std::string::npos) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return true;
  }

 private:
  const std::string file_;
};

// One rank of a job whose processes all log to one file.
struct Rank {
  Rank(const Log& log, const Pipe& pipe, int rank, int ranks, const char* seconds = kHangSeconds)
      : number(rank), buffer(0, 1) {
    ::setenv("UNISONO_HANG_SECONDS", seconds, 1);
    ::setenv("NCCL_DEBUG_FILE", log.file().c_str(), 1);
    check(unisonoHostSetDevice(rank));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "job";
    check(ncclCommInitRankConfig(&comm, ranks, sharedId(pipe, rank, ranks), rank, &config));
    buffer = DeviceBuffer(rank, 2 * kManyInts * sizeof(int));
    check(unisonoHostStreamCreate(&stream));
  }

  ncclResult_t sum(size_t count, ncclRedOp_t op = ncclSum, ncclDataType_t type = ncclInt) const {
    return ncclAllReduce(buffer.as(), buffer.as(), count, type, op, comm, stream);
  }
  void synchronize() const { check(unisonoHostStreamSynchronize(stream)); }
  // The state of the communicator once it is an error, and after how long.
  ncclResult_t waitForError(std::chrono::milliseconds& after) const {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess && Clock::now() - start < kPatience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      check(ncclCommGetAsyncError(comm, &state));
    }
    after = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    return state;
  }
  // Everything has come to an end, with or without an error.
  void finish() const {
    EXPECT_OK(unisonoHostStreamSynchronize(stream));
    EXPECT_OK(ncclCommDestroy(comm));
  }
  void abandon() const { EXPECT_OK(ncclCommAbort(comm)); }

  int number;
  ncclComm_t comm = nullptr;
  DeviceBuffer buffer;
  cudaStream_t stream = nullptr;
};

// The calls of `body` on a stream, captured into a graph.
class Graph {
 public:
  template <typename Body>
  Graph(cudaStream_t stream, Body body) : stream_(stream) {
    check(unisonoHostStreamBeginCapture(stream));
    body();
    check(unisonoHostStreamEndCapture(stream, &graph_));
  }
  ~Graph() { unisonoHostGraphDestroy(graph_); }
  Graph(const Graph&) = delete;
  void launch() const { launch(stream_); }
  void launch(cudaStream_t stream) const { check(unisonoHostGraphLaunch(graph_, stream)); }

 private:
  cudaStream_t stream_;
  unisonoHostGraph_t graph_ = nullptr;
};

// Of two ranks, both of which have made a call: another one, before which rank 1 waits on its
// stream for a message of another communicator, which stands for a kernel of the user. It comes
// after the report.
inline void callAfterOtherWork(const Log& log, const Rank& rank, const Pipe& pipe) {
  const int me = rank.number;
  ncclComm_t pair = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "side";
  check(ncclCommInitRankConfig(&pair, 2, sharedId(pipe, me, 2), me, &config));
  DeviceBuffer message(me, 64);
  DeviceStream side(me);
  const cudaStream_t where = me == 1 ? rank.stream : static_cast<cudaStream_t>(side);
  const auto exchange = [&](bool sends) {
    return sends ? ncclSend(message.as(), 4, ncclInt, 1 - me, pair, where)
                 : ncclRecv(message.as(), 4, ncclInt, 1 - me, pair, where);
  };
  check(exchange(me == 0));  // connects
  if (me == 1) check(exchange(false));
  check(rank.sum(kFewInts));
  if (me == 0) {
    EXPECT_TRUE(log.waitForReport());
    while (log.text().find("outside") == std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    check(exchange(true));
    side.synchronize();
  }
  rank.finish();
  check(ncclCommDestroy(pair));
}

}  // namespace unisono::system_test
