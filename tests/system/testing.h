// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <nccl.h>
#include <unisono/host.h>

#include <cstddef>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/sanitized.h"

// What the tests of the C API share.
namespace unisono::system_test {

// The devices that a program is linked with: simulated ones (testing_host.cpp), or GPUs
// (tests/gpu/testing_cuda.cpp) for programs that use nothing else of a backend. These functions
// throw std::runtime_error.
namespace device {
int count();
void use(int device);
void* allocate(size_t bytes);  // on the device in use
void release(void* address);
void copy(void* to, const void* from, size_t bytes);  // device or ordinary memory; waits
cudaStream_t createStream();                          // of the device in use
void destroyStream(cudaStream_t stream);
void synchronize(cudaStream_t stream);
bool isIdle(cudaStream_t stream);
}  // namespace device

// Where a test's rank lives; several share a device where there are not enough.
inline int deviceOf(int rank) {
  return rank % device::count();
}

using test::kSanitized;

// `full`, or less of it where a sanitizer makes everything slow.
constexpr int scaled(int full, int sanitized) {
  return kSanitized ? sanitized : full;
}

// Of the ranks of a communicator that does everything. Half of the time would go into the 8 ranks,
// of which a sanitizer has other tests.
inline std::vector<int> numbersOfRanks() {
  return kSanitized ? std::vector{1, 2, 3, 5} : std::vector{1, 2, 3, 5, 8};
}

// Fails the running test with the library's text when `result` is not success.
::testing::AssertionResult isOk(ncclResult_t result);
#define EXPECT_OK(call) EXPECT_TRUE(::unisono::system_test::isOk(call))
#define ASSERT_OK(call) ASSERT_TRUE(::unisono::system_test::isOk(call))

// For code that cannot return from a test: throws std::runtime_error with the library's text.
void check(ncclResult_t result);

// Memory of one device, freed at the end.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int device, size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  template <typename T = std::byte>
  T* as() const {
    return static_cast<T*>(address_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* address_ = nullptr;
  size_t bytes_ = 0;
};

// A stream of one device, destroyed at the end.
class DeviceStream {
 public:
  explicit DeviceStream(int device);
  ~DeviceStream();
  DeviceStream(DeviceStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { device::synchronize(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Ranks 0 .. n - 1, each on deviceOf(rank), all driven by the thread that made them.
class Ranks {
 public:
  explicit Ranks(int ranks);
  // On simulated nodes: rank r is on node r / ranksPerNode, and on that node's device of its number
  // there.
  Ranks(int nodes, int ranksPerNode, ncclConfig_t* config = nullptr);
  ~Ranks();
  int size() const { return static_cast<int>(comms_.size()); }
  ncclComm_t comm(int rank) const { return comms_[static_cast<size_t>(rank)]; }
  cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)]; }
  int device(int rank) const { return devices_[static_cast<size_t>(rank)]; }
  // Calls `body(rank)` for each rank inside one group.
  void inGroup(const std::function<void(int rank)>& body) const;
  void synchronize() const;

 private:
  std::vector<ncclComm_t> comms_;
  std::vector<int> devices_;
  std::vector<DeviceStream> streams_;
};

// Runs `body(rank)` on a thread for each rank, with deviceOf(rank) current, and fails the test for
// each that throws.
void onThreads(int ranks, const std::function<void(int rank)>& body);

// A thread's rank of a new communicator; destroyed at the end.
class Member {
 public:
  Member(const ncclUniqueId& id, int rank, int ranks, ncclConfig_t* config = nullptr);
  ~Member() {
    if (comm != nullptr) ncclCommDestroy(comm);
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  ncclComm_t comm = nullptr;
};

ncclUniqueId newId();

// Waits until the last operation of a nonblocking communicator is no longer in progress, for 60 s
// at most, and returns the communicator's state.
ncclResult_t waitWhileInProgress(ncclComm_t comm);

// As check(), and waits for an operation that is in progress.
void checkFinished(ncclComm_t comm, ncclResult_t result);

// Sums `rank + 1` over all ranks and throws unless the result is right: whether a communicator
// works.
void useOnce(ncclComm_t comm, size_t count = 1000);

// Sets a variable of the environment for as long as it lives.
class Setting {
 public:
  Setting(const char* name, const char* value);
  ~Setting();

 private:
  const char* name_;
  std::string before_;
  bool wasSet_;
};

// What the library writes to its log about the launches of rank 0 of each communicator. To be made
// before the library is used, which opens its log once.
class LaunchLog {
 public:
  LaunchLog();
  ~LaunchLog();
  LaunchLog(const LaunchLog&) = delete;
  // The lines since the last call.
  std::vector<std::string> take();

 private:
  std::string path_;
  Setting level_, file_;
  std::ifstream stream_;
};

int openDescriptors();
int runningThreads();

}  // namespace unisono::system_test
