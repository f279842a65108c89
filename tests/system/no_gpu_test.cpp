// SPDX-License-Identifier: Apache-2.0
// A program that expects a GPU on a machine without one: nothing says which backend to use.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace {

class NoGpu : public testing::Test {
 protected:
  // Before the first call: the log is opened once.
  static void SetUpTestSuite() {
    ::unsetenv("UNISONO_BACKEND");
    ::setenv("NCCL_DEBUG", "version", 1);
    ::setenv("NCCL_DEBUG_FILE", logFile().c_str(), 1);
  }
  static void TearDownTestSuite() { std::filesystem::remove(logFile()); }

#ifdef UNISONO_CUDA
  void SetUp() override {
    if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "there is a GPU";
  }
#endif

  static std::string logFile() {
    return std::filesystem::temp_directory_path() /
           ("unisono-no-gpu-" + std::to_string(::getpid()) + ".log");
  }
};

TEST_F(NoGpu, HostMemoryIsRefusedWithTheReasonForTheBackend) {
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclCommInitAll(&comm, 1, nullptr), ncclSuccess) << ncclGetLastError(nullptr);
  float values[4] = {};
  EXPECT_EQ(ncclAllReduce(values, values, 4, ncclFloat, ncclSum, comm, nullptr),
            ncclInvalidArgument);
  const std::string text = ncclGetLastError(nullptr);
  EXPECT_NE(text.find("No GPU is used, because "), std::string::npos) << text;
#ifndef UNISONO_CUDA
  EXPECT_NE(text.find("this library was built without CUDA"), std::string::npos) << text;
#endif
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

TEST_F(NoGpu, VersionIsLoggedOnce) {
  for (int repeat = 0; repeat < 2; repeat++) {
    ncclComm_t comm = nullptr;
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ASSERT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess) << ncclGetLastError(nullptr);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  }
  std::stringstream log;
  log << std::ifstream(logFile()).rdbuf();
  Dl_info library{};
  ASSERT_NE(::dladdr(reinterpret_cast<const void*>(&ncclGetVersion), &library), 0);
  const std::string text = log.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(
      text.find("VERSION Unisono " UNISONO_VERSION " with the API of NCCL 2.28.9, loaded from " +
                std::string(library.dli_fname)),
      std::string::npos)
      << text;
}

}  // namespace
