// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/share.h"
#include "runtime/cuda/shared_memory.h"
#include "runtime/descriptor_service.h"

namespace unisono::runtime {
namespace {

// An allocation of another process, mapped here.
class Mapping {
 public:
  virtual ~Mapping() = default;
  virtual std::byte* base() const = 0;
  // Makes it accessible to `device` as well.
  virtual void allow(int device) = 0;
};

class VmmMapping final : public Mapping {
 public:
  VmmMapping(std::span<const AddressRange::Part> parts, int owner, int device)
      : range_(parts, 0, device), owner_(owner) {}
  std::byte* base() const override { return static_cast<std::byte*>(range_.address()); }
  void allow(int device) override { grantAccess(range_.address(), range_.bytes(), device, owner_); }

 private:
  AddressRange range_;
  int owner_;  // as OpenedMemory::owner
};

class LegacyMapping final : public Mapping {
 public:
  LegacyMapping(const MemoryHandle& handle, int device) : device_(device) {
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, handle.payload.data(), sizeof(ipc));
    cudaError_t status = cudaIpcOpenMemHandle(&base_, ipc, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return;
    Error error = cudaFailure(status, "cudaIpcOpenMemHandle", device);
    if (status == cudaErrorPeerAccessUnsupported || status == cudaErrorTooManyPeers ||
        status == cudaErrorInvalidDevice) {
      throw peerUnreachable(device, handle.device,
                            fmt::format("it belongs to another process, and {}", error.what()));
    }
    error.remedy(
        "Legacy CUDA IPC needs both processes in one IPC and PID namespace of one host; "
        "NCCL_CUMEM_ENABLE=1 shares by file descriptor instead");
    throw error;
  }
  ~LegacyMapping() override {
    releaseOn(device_, [this] { quietly(cudaIpcCloseMemHandle(base_)); });
  }
  std::byte* base() const override { return static_cast<std::byte*>(base_); }
  void allow(int) override {}  // opened in the context of its device, and for that one alone

 private:
  void* base_ = nullptr;
  int device_;
};

class HostMapping final : public Mapping {
 public:
  HostMapping(const MemoryHandle& handle, int device)
      : registered_(importSharedMemory(handle, device)) {}
  std::byte* base() const override { return registered_->address(); }
  void allow(int) override {}

 private:
  std::unique_ptr<RegisteredSegment> registered_;
};

// The descriptor that `handle` offers; none where only the fabric handle can help. `why` says why.
UniqueDescriptor descriptorOf(const MemoryHandle& handle, std::string& why) {
  if (handle.kind != MemoryHandle::Kind::descriptor) return UniqueDescriptor();
  DescriptorTicket ticket;
  std::memcpy(&ticket, handle.payload.data(), sizeof(ticket));
  try {
    return fetchDescriptor(ticket);
  } catch (const Error& error) {
    if (handle.hasFabric == 0) throw;
    why = error.what();
    return UniqueDescriptor();
  }
}

struct OpenedMemory {
  PhysicalMemory memory;
  int owner;  // ordinal here; that of the importer for a GPU of another host
};

OpenedMemory openFabric(const MemoryHandle& handle, int device, const std::string& why) {
  CUmemFabricHandle fabric;
  std::memcpy(&fabric, handle.fabric.data(), sizeof(fabric));
  CUmemGenericAllocationHandle physical = 0;
  CUresult result =
      driver().memImportFromShareableHandle(&physical, &fabric, CU_MEM_HANDLE_TYPE_FABRIC);
  if (result != CUDA_SUCCESS) {
    Error error = cudaFailure(result, "cuMemImportFromShareableHandle of a fabric handle", device);
    std::string remedy =
        "Both processes need the same channel in /dev/nvidia-caps-imex-channels and, on different "
        "hosts, GPUs of one NVLink domain whose nvidia-imex service runs; NCCL_MNNVL_ENABLE=0 does "
        "without";
    if (!why.empty()) remedy += fmt::format(". There was no descriptor either: {}", why);
    error.remedy(remedy);
    throw error;
  }
  return {PhysicalMemory(physical), device};
}

OpenedMemory openVmm(const MemoryHandle& handle, int device) {
  std::string why;
  UniqueDescriptor descriptor = descriptorOf(handle, why);
  if (!descriptor) return openFabric(handle, device, why);
  CUmemGenericAllocationHandle physical = 0;
  CUresult result = driver().memImportFromShareableHandle(
      &physical, reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.get())),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) {
    Error error = cudaFailure(result, "cuMemImportFromShareableHandle", device);
    error.remedy(
        fmt::format("The memory is of device {} of another process. If its GPU is hidden here "
                    "(CUDA_VISIBLE_DEVICES), NCCL_CUMEM_ENABLE=0 shares by legacy CUDA IPC instead",
                    handle.device));
    throw error;
  }
  PhysicalMemory memory(physical);
  const int owner = memory.properties().location.id;
  return {std::move(memory), owner};
}

std::shared_ptr<Mapping> mapVmm(std::span<const MemoryHandle> handles, int device) {
  std::vector<OpenedMemory> opened;
  std::vector<AddressRange::Part> parts;
  for (const MemoryHandle& handle : handles) {
    opened.push_back(openVmm(handle, device));
    parts.push_back({opened.back().memory.handle(), handle.baseBytes});
  }
  return std::make_shared<VmmMapping>(parts, opened.front().owner, device);
}

// The mappings that are in use, so that ranges of one allocation, or of one run of allocations,
// share one. Each payload is unique to an allocation: a ticket holds a random token, and CUDA never
// gives a handle twice.
class ImportCache {
 public:
  std::shared_ptr<Mapping> get(std::span<const MemoryHandle> handles, int device) {
    bool legacy = handles.front().kind == MemoryHandle::Kind::legacyIpc;
    std::string key;
    auto append = [&key](const auto& value) {
      key.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    for (const MemoryHandle& handle : handles) {
      append(handle.payload);
      append(handle.fabric);
      append(handle.process);
      append(handle.base);
    }
    append(legacy ? device : -1);  // legacy IPC maps for one device at a time
    if (std::shared_ptr<Mapping> mapping = find(key)) return mapping;
    // Opened without the lock, since the other process may be slow to answer. Two threads may both
    // open; CUDA allows that, and one mapping is kept.
    return keep(key, open(handles, device));
  }

 private:
  static std::shared_ptr<Mapping> open(std::span<const MemoryHandle> handles, int device) {
    switch (handles.front().kind) {
      case MemoryHandle::Kind::legacyIpc:
        return std::make_shared<LegacyMapping>(handles.front(), device);
      case MemoryHandle::Kind::hostMemory:
        return std::make_shared<HostMapping>(handles.front(), device);
      default:
        return mapVmm(handles, device);
    }
  }

  std::shared_ptr<Mapping> find(const std::string& key) {
    std::lock_guard lock(mutex_);
    auto found = mappings_.find(key);
    return found == mappings_.end() ? nullptr : found->second.lock();
  }

  std::shared_ptr<Mapping> keep(const std::string& key, std::shared_ptr<Mapping> opened) {
    std::lock_guard lock(mutex_);
    std::erase_if(mappings_, [](const auto& item) { return item.second.expired(); });
    auto [entry, inserted] = mappings_.try_emplace(key, opened);
    if (inserted) return opened;
    std::shared_ptr<Mapping> earlier = entry->second.lock();
    if (earlier != nullptr) return earlier;
    entry->second = opened;
    return opened;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<Mapping>> mappings_;
};

ImportCache& mappings() {
  // Never destroyed: memory of static objects may outlive every destructor of ours.
  static auto* cache = new ImportCache;
  return *cache;
}

class ForeignRange final : public MappedMemory {
 public:
  ForeignRange(std::shared_ptr<Mapping> mapping, size_t offset)
      : MappedMemory(mapping->base() + offset), mapping_(std::move(mapping)) {}

 private:
  std::shared_ptr<Mapping> mapping_;
};

// Memory of this process: the same address, and nothing to unmap.
class LocalRange final : public MappedMemory {
 public:
  explicit LocalRange(void* address) : MappedMemory(address) {}
};

void makeAccessible(const MemoryHandle& handle, int device) {
  if (handle.device == device || handle.kind == MemoryHandle::Kind::hostMemory) return;
  if (!peerReachable(device, handle.device)) throw peerUnreachable(device, handle.device, "");
  if (handle.kind == MemoryHandle::Kind::legacyIpc) {
    enablePeer(device, handle.device);
  } else {
    grantAccess(reinterpret_cast<void*>(handle.base), handle.baseBytes, device, handle.device);
  }
}

}  // namespace

std::shared_ptr<MappedMemory> importCudaMemory(std::span<const MemoryHandle> handles, int device) {
  checkRun(handles);
  for (const MemoryHandle& handle : handles) {
    const bool isVmm = handle.kind == MemoryHandle::Kind::descriptor || handle.hasFabric != 0;
    if (handle.kind > MemoryHandle::Kind::hostMemory ||
        (handle.kind == MemoryHandle::Kind::none && !isVmm)) {
      throw invalidArgument("A memory handle of kind {} cannot be mapped by CUDA",
                            static_cast<uint32_t>(handle.kind))
          .device(device);
    }
    if (handles.size() > 1 && !isVmm) {
      throw invalidArgument(
          "The {} bytes at {:#x} go beyond their allocation, which is not memory of cuMemCreate",
          handle.bytes, handle.address)
          .device(device)
          .remedy("Check the count and the pointer of the call");
    }
  }
  DeviceCallScope scope(device);
  const MemoryHandle& first = handles.front();
  if (first.process == processToken()) {
    for (const MemoryHandle& handle : handles) makeAccessible(handle, device);
    return std::make_shared<LocalRange>(reinterpret_cast<void*>(first.address));
  }
  std::shared_ptr<Mapping> mapping = mappings().get(handles, device);
  mapping->allow(device);
  return std::make_shared<ForeignRange>(std::move(mapping), first.address - first.base);
}

}  // namespace unisono::runtime
