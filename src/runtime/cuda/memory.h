// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "runtime/runtime.h"

// Device and pinned memory: allocation, address ranges, who may access them.
namespace unisono::runtime {

// Owns one reference to a physical allocation of the driver's virtual memory management (VMM).
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  explicit PhysicalMemory(CUmemGenericAllocationHandle handle) : handle_(handle), owned_(true) {}
  PhysicalMemory(PhysicalMemory&& other) noexcept
      : handle_(other.handle_), owned_(std::exchange(other.owned_, false)) {}
  PhysicalMemory& operator=(PhysicalMemory&&) = delete;
  ~PhysicalMemory();

  explicit operator bool() const { return owned_; }
  CUmemGenericAllocationHandle handle() const { return handle_; }
  CUmemAllocationProp properties() const;

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  bool owned_ = false;
};

// Owns a range of addresses with physical allocations mapped one after the other; no device may
// access it until grantAccess. Sizes are multiples of the allocations' granularity; a granularity
// of 0 is the driver's own. The mapping keeps the physical memory.
class AddressRange {
 public:
  struct Part {
    CUmemGenericAllocationHandle memory;
    size_t bytes;
  };
  AddressRange(std::span<const Part> parts, size_t granularity, int device);
  AddressRange(const PhysicalMemory& memory, size_t bytes, size_t granularity, int device);
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  void* address() const { return reinterpret_cast<void*>(address_); }
  size_t bytes() const { return bytes_; }

 private:
  void release();

  CUdeviceptr address_ = 0;
  std::vector<size_t> mapped_;  // bytes of each allocation
  size_t bytes_ = 0;
  int device_;
};

// What a device offers for sharing memory; asked for without making a context.
struct SharingSupport {
  bool descriptors = false;  // VMM with POSIX file descriptors
  bool fabric = false;       // VMM with fabric handles; the driver may refuse them all the same
  bool directRdma = false;   // VMM memory that network cards can reach
};
SharingSupport sharingSupport(int device);

// The smallest unit in which memory with `properties` is allocated and mapped.
size_t allocationGranularity(const CUmemAllocationProp& properties, int device);

// Allocates, zero-filled, by VMM with the handles that `support` names or by cudaMalloc. The VMM
// form returns null where the driver refuses memory with these handles altogether. Devices on which
// this process already has a context get access to VMM memory at once, others when they import it.
std::shared_ptr<DeviceMemory> allocateVmm(int device, size_t bytes, const SharingSupport& support);
std::shared_ptr<DeviceMemory> allocateMalloc(int device, size_t bytes);
std::shared_ptr<PinnedMemory> allocatePinnedMemory(size_t bytes);
std::shared_ptr<LaunchFlag> allocateLaunchFlag(int device);

// Whether kernels on `device` can reach memory of `owner`; makes no context.
bool peerReachable(int device, int owner);
// The Error for two devices that cannot; `why` is what CUDA said, or empty.
Error peerUnreachable(int device, int owner, const std::string& why);

// Lets `device` access the VMM range that is mapped from `base`, whose memory is on `owner`.
void grantAccess(void* base, size_t bytes, int device, int owner);
// Lets `device` access all memory that cudaMalloc gave on `owner`.
void enablePeer(int device, int owner);

}  // namespace unisono::runtime
