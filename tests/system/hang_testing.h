// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  bool waitForReport() const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (text().find("unisono_hang") == std::string::npos) {
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

}  // namespace unisono::system_test
