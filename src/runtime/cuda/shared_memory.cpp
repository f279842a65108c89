// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/shared_memory.h"

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"

namespace unisono::runtime {
namespace {

class SharedMemory;

// What this process has allocated, by address. Never destroyed, as memory of static objects may
// outlive it.
struct Allocations {
  std::mutex mutex;
  std::map<uint64_t, const SharedMemory*> byAddress;

  static Allocations& get() {
    static auto* allocations = new Allocations;
    return *allocations;
  }
};

class SharedMemory final : public DeviceMemory {
 public:
  SharedMemory(std::unique_ptr<host::MemorySegment> segment, size_t bytes, int device)
      : DeviceMemory(nullptr, bytes, device), registered_(std::move(segment), device) {
    address_ = registered_.address();
    Allocations& allocations = Allocations::get();
    std::lock_guard lock(allocations.mutex);
    allocations.byAddress.emplace(start(), this);
  }
  ~SharedMemory() override {
    Allocations& allocations = Allocations::get();
    std::lock_guard lock(allocations.mutex);
    allocations.byAddress.erase(start());
  }

  uint64_t start() const { return reinterpret_cast<uint64_t>(address_); }
  host::MemorySegment& segment() const { return registered_.segment(); }

 private:
  RegisteredSegment registered_;
};

}  // namespace

RegisteredSegment::RegisteredSegment(std::unique_ptr<host::MemorySegment> segment, int device)
    : segment_(std::move(segment)), device_(device) {
  DeviceCallScope scope(device);
  const cudaError_t status = cudaHostRegister(segment_->address(), segment_->bytes(),
                                              cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (status != cudaSuccess) {
    Error error = cudaFailure(status, "cudaHostRegister of shared host memory", device);
    error.remedy(
        "The host may lack memory that can be pinned; fewer channels (NCCL_MAX_NCHANNELS) or "
        "smaller buffers (NCCL_BUFFSIZE) need less");
    throw error;
  }
  void* address = nullptr;
  const cudaError_t found = cudaHostGetDevicePointer(&address, segment_->address(), 0);
  if (found != cudaSuccess) {
    quietly(cudaHostUnregister(segment_->address()));
    throw cudaFailure(found, "cudaHostGetDevicePointer", device);
  }
  // As on every GPU since Pascal. Proxies use what kernels of other ranks address.
  if (address != segment_->address()) {
    quietly(cudaHostUnregister(segment_->address()));
    throw Error(ErrorCode::systemError,
                fmt::format("Device {} does not use the CPU's addresses of host memory", device));
  }
  address_ = static_cast<std::byte*>(address);
}

RegisteredSegment::~RegisteredSegment() {
  releaseOn(device_, [this] { quietly(cudaHostUnregister(segment_->address())); });
}

std::shared_ptr<DeviceMemory> allocateSharedMemory(int device, size_t bytes) {
  return std::make_shared<SharedMemory>(
      std::make_unique<host::MemorySegment>(bytes, "unisono-host-memory"), bytes, device);
}

bool exportSharedMemory(const void* address, size_t bytes, MemoryHandle& handle) {
  const auto start = reinterpret_cast<uint64_t>(address);
  Allocations& allocations = Allocations::get();
  std::lock_guard lock(allocations.mutex);
  auto found = allocations.byAddress.upper_bound(start);
  if (found == allocations.byAddress.begin()) return false;
  const SharedMemory& memory = *(--found)->second;
  const uint64_t offset = start - memory.start();
  if (offset >= memory.bytes() || bytes > memory.bytes() - offset) return false;
  handle = {};
  handle.kind = MemoryHandle::Kind::hostMemory;
  handle.device = memory.device();
  handle.process = processToken();
  handle.address = start;
  handle.bytes = bytes;
  handle.base = memory.start();
  handle.baseBytes = memory.segment().bytes();
  static_assert(sizeof(DescriptorTicket) <= sizeof(handle.payload));
  std::memcpy(handle.payload.data(), &memory.segment().ticket(), sizeof(DescriptorTicket));
  return true;
}

std::unique_ptr<RegisteredSegment> importSharedMemory(const MemoryHandle& handle, int device) {
  DescriptorTicket ticket;
  std::memcpy(&ticket, handle.payload.data(), sizeof(ticket));
  const UniqueDescriptor descriptor = fetchDescriptor(ticket);
  return std::make_unique<RegisteredSegment>(
      std::make_unique<host::MemorySegment>(descriptor, static_cast<size_t>(handle.baseBytes)),
      device);
}

}  // namespace unisono::runtime
