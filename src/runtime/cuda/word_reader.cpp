// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/word_reader.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"

namespace unisono::runtime {

void WordReader::prepare(int device) {
  const std::lock_guard lock(mutex_);
  if (readers_.contains(device)) return;
  const DeviceCallScope scope(device);
  Reader reader;
  check(cudaStreamCreateWithFlags(&reader.stream, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags", device);
  void* words = nullptr;
  const cudaError_t status = cudaHostAlloc(&words, kWords * sizeof(uint64_t), cudaHostAllocDefault);
  if (status != cudaSuccess) {
    quietly(cudaStreamDestroy(reader.stream));
    throw cudaFailure(status, "cudaHostAlloc", device);
  }
  reader.words = static_cast<uint64_t*>(words);
  readers_.emplace(device, reader);
}

bool WordReader::read(int device, std::span<const uint64_t* const> addresses,
                      std::span<uint64_t> values) {
  const std::lock_guard lock(mutex_);
  const auto entry = readers_.find(device);
  if (entry == readers_.end()) return false;
  const Reader& reader = entry->second;
  const DeviceCallScope scope(device);
  for (size_t done = 0; done < addresses.size(); done += kWords) {
    const size_t count = std::min(kWords, addresses.size() - done);
    if (!readSome(reader, addresses.subspan(done, count), values.subspan(done, count))) {
      return false;
    }
  }
  return true;
}

bool WordReader::isIdle(const Reader& reader) const {
  const cudaError_t status = cudaStreamQuery(reader.stream);
  if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
  return status == cudaSuccess;
}

bool WordReader::readSome(const Reader& reader, std::span<const uint64_t* const> addresses,
                          std::span<uint64_t> values) const {
  constexpr std::chrono::milliseconds kLimit{200};
  if (!isIdle(reader)) return false;
  for (size_t i = 0, next = 0; i < addresses.size(); i = next) {
    next = i + 1;
    while (next < addresses.size() && addresses[next] == addresses[next - 1] + 1) next++;
    check(cudaMemcpyAsync(reader.words + i, addresses[i], (next - i) * sizeof(uint64_t),
                          cudaMemcpyDefault, reader.stream),
          "cudaMemcpyAsync");
  }
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (!isIdle(reader)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::copy_n(reader.words, values.size(), values.begin());
  return true;
}

}  // namespace unisono::runtime
