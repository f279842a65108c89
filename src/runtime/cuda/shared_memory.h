// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "runtime/cuda/memory.h"
#include "runtime/host/segment.h"
#include "runtime/runtime.h"

// Memory of the host that several processes map and that all their GPUs use: memfd segments that
// are registered with CUDA. Unlike /dev/shm they have no limit but the memory itself.
namespace unisono::runtime {

// A segment that kernels of all devices of this process can use.
class RegisteredSegment {
 public:
  // Registers it in the context of `device`, which pins its pages. Throws Error.
  RegisteredSegment(std::unique_ptr<host::MemorySegment> segment, int device);
  RegisteredSegment(const RegisteredSegment&) = delete;
  RegisteredSegment& operator=(const RegisteredSegment&) = delete;
  ~RegisteredSegment();

  // As kernels address it.
  std::byte* address() const { return address_; }
  host::MemorySegment& segment() const { return *segment_; }

 private:
  std::unique_ptr<host::MemorySegment> segment_;
  int device_;
  std::byte* address_ = nullptr;
};

// See Runtime::allocateShared.
std::shared_ptr<DeviceMemory> allocateSharedMemory(int device, size_t bytes);

// Describes `bytes` bytes at an address of such memory. False if it is other memory.
bool exportSharedMemory(const void* address, size_t bytes, MemoryHandle& handle);

// Maps the whole segment of another process.
std::unique_ptr<RegisteredSegment> importSharedMemory(const MemoryHandle& handle, int device);

}  // namespace unisono::runtime
