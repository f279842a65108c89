// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/unique_descriptor.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/share.h"
#include "runtime/cuda/shared_memory.h"
#include "runtime/descriptor_service.h"

namespace unisono::runtime {
namespace {

CUdeviceptr devicePointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// One attribute of a device address, or zero where the driver does not know it. Value is the type
// that the documentation of the attribute names; booleans are written to a zeroed unsigned.
template <typename Value>
Value pointerAttribute(CUpointer_attribute attribute, CUdeviceptr address) {
  Value value{};
  return quietly(driver().pointerGetAttribute(&value, attribute, address)) ? value : Value{};
}

// The physical allocation that is mapped at `address`, or none if no VMM memory is.
PhysicalMemory physicalMemory(CUdeviceptr address) {
  CUmemGenericAllocationHandle handle = 0;
  void* pointer = reinterpret_cast<void*>(address);
  if (!quietly(driver().memRetainAllocationHandle(&handle, pointer))) return PhysicalMemory();
  return PhysicalMemory(handle);
}

// A number that no other mapping of this process has had; 0: nothing is mapped at `address`.
unsigned long long serialAt(CUdeviceptr address) {
  return pointerAttribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
}

// Whether cudaMalloc made the memory. How the driver backs that is its own affair, and such a
// backing, though a reference may be had, is not ours to export.
bool isLegacy(CUdeviceptr address) {
  return pointerAttribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address) != 0;
}

bool isPooled(CUdeviceptr address) {
  return pointerAttribute<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) != nullptr;
}

// An allocation that other processes may map with the handle types that it was created for.
class VmmOffer {
 public:
  // `memory` is empty if the driver gives no reference to it.
  VmmOffer(PhysicalMemory memory, unsigned long long serial)
      : memory_(std::move(memory)), serial_(serial) {}

  // Of the mapping that the memory had when it was retained.
  unsigned long long serial() const { return serial_; }

  // Offers the memory, if it is not offered already. Throws Error if it cannot be shared.
  void describe(MemoryHandle& handle) {
    if (offer_ == nullptr && !hasFabric_) share(handle);
    if (offer_ != nullptr) {
      static_assert(sizeof(DescriptorTicket) <= sizeof(handle.payload));
      handle.kind = MemoryHandle::Kind::descriptor;
      std::memcpy(handle.payload.data(), &offer_->ticket(), sizeof(DescriptorTicket));
    }
    if (hasFabric_) {
      static_assert(sizeof(fabric_) == sizeof(handle.fabric));
      handle.hasFabric = 1;
      std::memcpy(handle.fabric.data(), &fabric_, sizeof(fabric_));
    }
  }

 private:
  void share(const MemoryHandle& handle) {
    if (!memory_) {
      throw invalidUsage(
          "Memory at {:#x} is of a kind that CUDA shares with no other process (neither cudaMalloc "
          "nor cuMemCreate made it, or it is itself mapped from another process)",
          handle.address)
          .device(handle.device)
          .remedy("Allocate by cudaMalloc or ncclMemAlloc");
    }
    const CUmemAllocationHandleType types = memory_.properties().requestedHandleTypes;
    if ((types & (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC)) == 0) {
      throw invalidUsage(
          "Memory at {:#x} was made by cuMemCreate without the handle types "
          "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and CU_MEM_HANDLE_TYPE_FABRIC, so that no "
          "other process can map it",
          handle.address)
          .device(handle.device)
          .remedy("Ask for one of them, or use ncclMemAlloc or cudaMalloc");
    }
    if ((types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
      int descriptor = -1;
      check(exportTo(&descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            "cuMemExportToShareableHandle", handle.device);
      descriptor_ = UniqueDescriptor(descriptor);
      // A program that this process starts would keep the memory allocated.
      if (::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) throw systemError(errno, "fcntl");
      offer_ = offerDescriptor(descriptor);
    }
    if ((types & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
      CUresult result = exportTo(&fabric_, CU_MEM_HANDLE_TYPE_FABRIC);
      hasFabric_ = result == CUDA_SUCCESS;
      // A descriptor does for this host.
      if (offer_ == nullptr) check(result, "cuMemExportToShareableHandle", handle.device);
    }
  }

  CUresult exportTo(void* handle, CUmemAllocationHandleType type) const {
    return driver().memExportToShareableHandle(handle, memory_.handle(), type, 0);
  }

  PhysicalMemory memory_;
  unsigned long long serial_;
  UniqueDescriptor descriptor_;  // stays open until offer_ ends
  std::unique_ptr<DescriptorOffer> offer_;
  CUmemFabricHandle fabric_{};
  bool hasFabric_ = false;
};

// The offers by the first address of their allocation. An offer stands as long as the mapping there
// is the one that it was made for. Only retain() asks the driver for a reference to memory of the
// application: cuMemRetainAllocationHandle and cuMemUnmap of the same memory on two threads crash
// libcuda.
class OfferCache {
 public:
  // The memory that is mapped at `base` stays mapped during the call.
  void retain(CUdeviceptr base) {
    const unsigned long long serial = serialAt(base);
    std::lock_guard lock(mutex_);
    const auto found = offers_.find(base);
    if (found != offers_.end()) {
      if (found->second.serial() == serial) return;
      offers_.erase(found);
    }
    offers_.emplace(base, VmmOffer(physicalMemory(base), serial));
  }

  // Describes the offer of the memory at handle.base, which was retained.
  void describe(MemoryHandle& handle) {
    std::lock_guard lock(mutex_);
    dropStale();
    const auto found = offers_.find(handle.base);
    if (found == offers_.end()) {
      throw invalidArgument("The memory at {:#x} was freed while it was to be shared", handle.base)
          .device(handle.device);
    }
    found->second.describe(handle);
  }

  void withdrawFreed() {
    std::lock_guard lock(mutex_);
    dropStale();
  }

  void withdraw(CUdeviceptr base) {
    std::lock_guard lock(mutex_);
    offers_.erase(base);
  }

 private:
  void dropStale() {
    std::erase_if(offers_,
                  [](const auto& item) { return serialAt(item.first) != item.second.serial(); });
  }

  std::mutex mutex_;
  std::unordered_map<CUdeviceptr, VmmOffer> offers_;
};

OfferCache& offers() {
  // Never destroyed: memory of static objects may outlive every destructor of ours.
  static auto* cache = new OfferCache;
  return *cache;
}

void exportLegacy(MemoryHandle& handle) {
  cudaIpcMemHandle_t ipc;
  check(cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(handle.base)), "cudaIpcGetMemHandle",
        handle.device);
  static_assert(sizeof(ipc) <= sizeof(handle.payload));
  handle.kind = MemoryHandle::Kind::legacyIpc;
  std::memcpy(handle.payload.data(), &ipc, sizeof(ipc));
}

}  // namespace

void withdrawOffer(const void* base) {
  offers().withdraw(devicePointer(base));
}

void withdrawFreedOffers() {
  offers().withdrawFreed();
}

Allocation findCudaAllocation(const void* address) {
  unsigned type = 0;
  unsigned managed = 0;
  unsigned long long serial = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&type, &managed, &serial};
  CUdeviceptr pointer = devicePointer(address);
  if (!quietly(driver().pointerGetAttributes(3, attributes, values, pointer))) return {};
  if (type != CU_MEMORYTYPE_DEVICE || managed != 0 || serial == 0) return {};
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (!quietly(driver().memGetAddressRange(&base, &bytes, pointer))) return {};
  return {base, bytes, serial};
}

PointerInfo inspectPointer(const void* address) {
  unsigned type = 0;
  unsigned managed = 0;
  int device = -1;
  unsigned legacy = 0;
  CUpointer_attribute attributes[] = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&type, &managed, &device, &legacy};
  PointerInfo info;
  if (!quietly(driver().pointerGetAttributes(4, attributes, values, devicePointer(address)))) {
    return info;
  }
  if (managed != 0) {
    info.kind = PointerInfo::Kind::managed;
    info.device = device;
  } else if (type == CU_MEMORYTYPE_HOST) {
    // Kernels get the address as it is, so the device must know the memory by the same one.
    CUdeviceptr mapped = 0;
    const bool isMapped = quietly(driver().pointerGetAttribute(
        &mapped, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, devicePointer(address)));
    if (isMapped && mapped == devicePointer(address)) info.kind = PointerInfo::Kind::pinned;
  } else if (type == CU_MEMORYTYPE_DEVICE) {
    info.kind = PointerInfo::Kind::device;
    info.device = device;
    // cudaMalloc memory: reachable as soon as peer access is enabled, which connecting does.
    info.openToPeers = legacy != 0;
  }
  return info;
}

void retainCudaMemory(const void* address) {
  const PointerInfo info = inspectPointer(address);
  if (info.kind != PointerInfo::Kind::device) return;
  const CUdeviceptr pointer = devicePointer(address);
  DeviceCallScope scope(info.device);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (isLegacy(pointer) || isPooled(pointer) ||
      !quietly(driver().memGetAddressRange(&base, &bytes, pointer))) {
    return;
  }
  offers().retain(base);
}

MemoryHandle exportCudaMemory(const void* address, size_t bytes) {
  PointerInfo info = inspectPointer(address);
  MemoryHandle handle{};
  if (info.kind == PointerInfo::Kind::pinned && exportSharedMemory(address, bytes, handle)) {
    return handle;
  }
  if (info.kind != PointerInfo::Kind::device) {
    throw invalidArgument("Address {} is {} memory and cannot be shared with other ranks", address,
                          info.kind == PointerInfo::Kind::managed ? "managed" : "host")
        .remedy("Pass memory of the device (cudaMalloc, ncclMemAlloc)");
  }
  CUdeviceptr pointer = devicePointer(address);
  DeviceCallScope scope(info.device);
  if (isPooled(pointer)) {
    throw invalidUsage(
        "Memory at {} is of a stream-ordered pool (cudaMallocAsync), which other processes cannot "
        "map",
        address)
        .device(info.device)
        .remedy(
            "Allocate by cudaMalloc or ncclMemAlloc; in PyTorch, do not set "
            "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync");
  }
  CUdeviceptr base = 0;
  size_t baseBytes = 0;
  check(driver().memGetAddressRange(&base, &baseBytes, pointer), "cuMemGetAddressRange",
        info.device);
  if (bytes > baseBytes - (pointer - base)) {
    throw invalidArgument(
        "{} bytes at {} are not inside one allocation: it is {} bytes long and the address is "
        "{} bytes from its start",
        bytes, address, baseBytes, pointer - base)
        .device(info.device)
        .remedy(
            "Check the count and the pointer; with "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            "one tensor can span several allocations: turn that off, or use ncclMemAlloc");
  }

  handle.device = info.device;
  handle.process = processToken();
  handle.address = pointer;
  handle.bytes = bytes;
  handle.base = base;
  handle.baseBytes = baseBytes;
  if (isLegacy(pointer)) {
    exportLegacy(handle);
    return handle;
  }
  offers().describe(handle);
  return handle;
}

}  // namespace unisono::runtime
