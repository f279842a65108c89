// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

namespace unisono::runtime {

// Reads words of device memory by copies on streams of its own, which run while kernels do. A
// thread for each device makes them: while another thread of the process waits in a copy to
// pageable memory, as PyTorch's Tensor.cpu() and Tensor.item() do, CUDA does not return from a
// copy.
class WordReader {
 public:
  void prepare(int device);
  // Returns false if the copies are not done within a moment. Until they are, so does every call
  // for the same device.
  bool read(int device, std::span<const uint64_t* const> addresses, std::span<uint64_t> values);

 private:
  class Device;

  std::mutex mutex_;
  // Kept for the life of the process: freeing pinned memory would wait for the device.
  std::map<int, std::shared_ptr<Device>> devices_;
};

}  // namespace unisono::runtime
