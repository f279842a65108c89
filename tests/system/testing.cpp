// SPDX-License-Identifier: Apache-2.0
#include "testing.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace unisono::system_test {
namespace {

int entriesOf(const char* directory) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) count++;
  return count;
}

}  // namespace

::testing::AssertionResult isOk(ncclResult_t result) {
  if (result == ncclSuccess) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "result " << result << "; " << ncclGetLastError(nullptr)
                                       << " / " << unisonoHostGetLastError();
}

void check(ncclResult_t result) {
  if (result == ncclSuccess) return;
  throw std::runtime_error("result " + std::to_string(result) + "; " + ncclGetLastError(nullptr) +
                           " / " + unisonoHostGetLastError());
}

DeviceBuffer::DeviceBuffer(int device, size_t bytes) : bytes_(bytes) {
  device::use(device);
  address_ = device::allocate(bytes);
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ != nullptr) device::release(address_);
}

DeviceStream::DeviceStream(int device) {
  device::use(device);
  stream_ = device::createStream();
}

DeviceStream::~DeviceStream() {
  if (stream_ != nullptr) device::destroyStream(stream_);
}

Ranks::Ranks(int ranks) : comms_(static_cast<size_t>(ranks)) {
  for (int rank = 0; rank < ranks; rank++) {
    devices_.push_back(deviceOf(rank));
    streams_.emplace_back(devices_.back());
  }
  check(ncclCommInitAll(comms_.data(), ranks, devices_.data()));
}

Ranks::Ranks(int nodes, int ranksPerNode, ncclConfig_t* config)
    : comms_(static_cast<size_t>(nodes * ranksPerNode)) {
  const ncclUniqueId id = newId();
  for (int rank = 0; rank < size(); rank++) {
    devices_.push_back(deviceOf(rank % ranksPerNode));
    streams_.emplace_back(devices_.back());
  }
  inGroup([&](int rank) {
    const Setting node("NCCL_HOSTID", ("node " + std::to_string(rank / ranksPerNode)).c_str());
    device::use(device(rank));
    check(ncclCommInitRankConfig(&comms_[static_cast<size_t>(rank)], size(), id, rank, config));
  });
}

Ranks::~Ranks() {
  for (ncclComm_t comm : comms_) ncclCommDestroy(comm);
}

void Ranks::inGroup(const std::function<void(int)>& body) const {
  check(ncclGroupStart());
  for (int rank = 0; rank < size(); rank++) body(rank);
  check(ncclGroupEnd());
}

void Ranks::synchronize() const {
  for (const DeviceStream& stream : streams_) stream.synchronize();
}

void onThreads(int ranks, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; rank++) {
    threads.emplace_back([&, rank] {
      try {
        device::use(deviceOf(rank));
        body(rank);
      } catch (const std::exception& error) {
        std::lock_guard lock(mutex);
        errors.push_back("rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) ADD_FAILURE() << error;
}

Member::Member(const ncclUniqueId& id, int rank, int ranks, ncclConfig_t* config) {
  check(ncclCommInitRankConfig(&comm, ranks, id, rank, config));
}

ncclUniqueId newId() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id));
  return id;
}

ncclResult_t waitWhileInProgress(ncclComm_t comm) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
    check(ncclCommGetAsyncError(comm, &state));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

void checkFinished(ncclComm_t comm, ncclResult_t result) {
  check(result == ncclInProgress ? waitWhileInProgress(comm) : result);
}

void useOnce(ncclComm_t comm, size_t count) {
  int device = 0, ranks = 0, rank = 0;
  check(ncclCommCuDevice(comm, &device));
  check(ncclCommCount(comm, &ranks));
  check(ncclCommUserRank(comm, &rank));
  DeviceBuffer buffer(device, count * sizeof(int));
  DeviceStream stream(device);
  std::vector<int> values(count, rank + 1);
  device::copy(buffer.as(), values.data(), buffer.bytes());
  checkFinished(comm,
                ncclAllReduce(buffer.as(), buffer.as(), count, ncclInt, ncclSum, comm, stream));
  stream.synchronize();
  device::copy(values.data(), buffer.as(), buffer.bytes());
  for (size_t i = 0; i < count; i++) {
    if (values[i] != ranks * (ranks + 1) / 2) {
      throw std::runtime_error("element " + std::to_string(i) + " of the sum is " +
                               std::to_string(values[i]));
    }
  }
}

Setting::Setting(const char* name, const char* value) : name_(name) {
  const char* before = std::getenv(name);
  wasSet_ = before != nullptr;
  if (wasSet_) before_ = before;
  ::setenv(name, value, 1);
}

Setting::~Setting() {
  if (wasSet_) {
    ::setenv(name_, before_.c_str(), 1);
  } else {
    ::unsetenv(name_);
  }
}

LaunchLog::LaunchLog()
    : path_(std::filesystem::temp_directory_path() /
            ("unisono-launches-" + std::to_string(::getpid()))),
      level_("NCCL_DEBUG", "TRACE"),
      file_("NCCL_DEBUG_FILE", path_.c_str()) {}

LaunchLog::~LaunchLog() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

std::vector<std::string> LaunchLog::take() {
  static constexpr std::string_view kMark = " unisono TRACE rank 0: ";
  if (!stream_.is_open()) stream_.open(path_);
  stream_.clear();
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream_, line);) {
    const size_t mark = line.find(kMark);
    if (mark != std::string::npos) lines.push_back(line.substr(mark + kMark.size()));
  }
  return lines;
}

int openDescriptors() {
  return entriesOf("/proc/self/fd");
}

int runningThreads() {
  return entriesOf("/proc/self/task");
}

}  // namespace unisono::system_test
