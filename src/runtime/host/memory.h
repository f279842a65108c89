// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "runtime/host/segment.h"
#include "runtime/runtime.h"

namespace unisono::runtime::host {

// The memory of all simulated devices. Large allocations are segments of their own; small ones
// share segments, so that a program with thousands of them does not run out of descriptors.
// Thread-safe. What it hands out keeps it alive. In a child that is forked off, freeing does
// nothing: the memory is the parent's.
class MemoryManager : public std::enable_shared_from_this<MemoryManager> {
 public:
  // Zero-filled, aligned to 512 bytes as cudaMalloc's.
  std::shared_ptr<DeviceMemory> allocate(int device, size_t bytes);
  // The same, made of adjacent allocations of `segmentBytes`, rounded up to pages.
  std::shared_ptr<DeviceMemory> allocateSegmented(int device, size_t bytes, size_t segmentBytes);
  // As allocate(), in place of memory of the device's host; always a segment of its own.
  std::shared_ptr<DeviceMemory> allocateShared(int device, size_t bytes);
  // See Runtime::retainRun(). Nothing needs it here; what was not retained is not exported, so that
  // tests find it.
  void retain(const void* address);
  MemoryHandle exportRetained(const void* address, size_t bytes);
  // `handles` have passed checkRun().
  std::shared_ptr<MappedMemory> importRun(std::span<const MemoryHandle> handles);
  DmaBuf exportDmaBuf(const void* address, size_t bytes);
  PointerInfo inspect(const void* address);
  unisono::runtime::Allocation findAllocation(const void* address);

 private:
  class Allocation;

  // A segment that small allocations of a device share.
  struct Pool {
    std::shared_ptr<MemorySegment> segment;
    std::map<size_t, size_t> free;  // offset: bytes
  };
  struct Range {
    size_t bytes;
    int device;
    std::shared_ptr<MemorySegment> segment;
    uint64_t serial;
    MemoryHandle::Kind kind = MemoryHandle::Kind::descriptor;
    bool retained = false;
  };

  // The allocation that holds a range. Throws Error(invalidArgument) if none does.
  Range rangeOf(const void* address, size_t bytes);
  std::shared_ptr<DeviceMemory> add(std::shared_ptr<MemorySegment> segment, size_t bytes,
                                    int device, MemoryHandle::Kind kind);
  std::byte* takeFromPool(int device, size_t bytes, std::shared_ptr<MemorySegment>& segment);
  void free(const Allocation& allocation);
  std::map<uintptr_t, Range>::iterator find(const void* address);
  std::shared_ptr<MemorySegment> mapped(const MemoryHandle& handle);

  const int forks_ = forkCount();  // of the process that made this
  std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;  // by start
  uint64_t lastSerial_ = 0;
  std::map<int, std::vector<std::unique_ptr<Pool>>> pools_;
  // Segments of other processes, by the secret of their ticket, each mapped once.
  std::map<std::array<std::byte, 16>, std::weak_ptr<MemorySegment>> imported_;
};

}  // namespace unisono::runtime::host
