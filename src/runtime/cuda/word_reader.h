// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <span>

namespace unisono::runtime {

// Reads words of device memory by copies on streams of its own, which run while kernels do.
class WordReader {
 public:
  void prepare(int device);
  // Returns false if the copies are not done within a moment. Until they are, so does every call
  // for the same device.
  bool read(int device, std::span<const uint64_t* const> addresses, std::span<uint64_t> values);

 private:
  static constexpr size_t kWords = 512;

  // Kept for the life of the process: freeing pinned memory would wait for the device.
  struct Reader {
    cudaStream_t stream = nullptr;
    uint64_t* words = nullptr;  // pinned
  };
  bool isIdle(const Reader& reader) const;
  bool readSome(const Reader& reader, std::span<const uint64_t* const> addresses,
                std::span<uint64_t> values) const;

  std::mutex mutex_;
  std::map<int, Reader> readers_;  // by device
};

}  // namespace unisono::runtime
