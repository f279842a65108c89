// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/word_reader.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/event.h"

namespace unisono::runtime {

class WordReader::Device {
 public:
  explicit Device(int device) : device_(device) {
    const DeviceCallScope scope(device);
    stream_ = createUrgentStream(device);
    void* words = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&words, kWords * sizeof(uint64_t), cudaHostAllocDefault);
    if (status != cudaSuccess) {
      quietly(cudaStreamDestroy(stream_));
      throw cudaFailure(status, "cudaHostAlloc", device);
    }
    words_ = static_cast<uint64_t*>(words);
  }

  bool read(const std::shared_ptr<Device>& self, std::span<const uint64_t* const> addresses,
            std::span<uint64_t> values) {
    constexpr std::chrono::milliseconds kLimit{200};
    const std::lock_guard reader(readers_);
    std::unique_lock lock(mutex_);
    if (busy_) return false;
    if (!std::exchange(started_, true)) {
      startThread("unisono-words", [self] { self->run(); }).detach();
    }
    addresses_.assign(addresses.begin(), addresses.end());
    busy_ = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, kLimit, [this] { return !busy_; })) return false;
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
    std::copy_n(values_.begin(), values.size(), values.begin());
    return true;
  }

 private:
  static constexpr size_t kWords = 512;  // that are copied at a time

  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return busy_; });
      error_ = nullptr;
      const std::vector<const uint64_t*> addresses = addresses_;
      std::vector<uint64_t> values(addresses.size());
      lock.unlock();
      std::exception_ptr error;
      try {
        const DeviceCallScope scope(device_);
        for (size_t done = 0; done < addresses.size(); done += kWords) {
          const size_t count = std::min(kWords, addresses.size() - done);
          copy(std::span(addresses).subspan(done, count), std::span(values).subspan(done, count));
        }
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
      values_ = std::move(values);
      busy_ = false;
      changed_.notify_all();
    }
  }

  // Neighbours are copied at once.
  void copy(std::span<const uint64_t* const> addresses, std::span<uint64_t> values) const {
    for (size_t i = 0, next = 0; i < addresses.size(); i = next) {
      next = i + 1;
      while (next < addresses.size() && addresses[next] == addresses[next - 1] + 1) next++;
      check(cudaMemcpyAsync(words_ + i, addresses[i], (next - i) * sizeof(uint64_t),
                            cudaMemcpyDefault, stream_),
            "cudaMemcpyAsync");
    }
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream_);
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    std::copy_n(words_, values.size(), values.begin());
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  uint64_t* words_ = nullptr;  // pinned

  std::mutex readers_;  // one caller at a time: request and answer are members
  std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false, busy_ = false;
  std::vector<const uint64_t*> addresses_;
  std::vector<uint64_t> values_;
  std::exception_ptr error_;
};

void WordReader::prepare(int device) {
  const std::lock_guard lock(mutex_);
  if (!devices_.contains(device)) devices_.emplace(device, std::make_shared<Device>(device));
}

bool WordReader::read(int device, std::span<const uint64_t* const> addresses,
                      std::span<uint64_t> values) {
  std::shared_ptr<Device> reader;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = devices_.find(device);
    if (entry == devices_.end()) return false;
    reader = entry->second;
  }
  return reader->read(reader, addresses, values);
}

}  // namespace unisono::runtime
