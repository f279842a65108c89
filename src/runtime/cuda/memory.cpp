// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/math.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/event.h"
#include "runtime/cuda/share.h"

namespace unisono::runtime {
namespace {

using namespace std::chrono_literals;

// cudaMalloc cuts small allocations out of blocks of this size, and legacy IPC shares whole blocks:
// memory that other processes map is rounded up, so that nothing else is in its block (CUDA C++
// Programming Guide, "Interprocess Communication").
constexpr size_t kLegacyShareBytes = size_t{2} << 20;

// A stream for zero-filling, one per device, kept until the process exits. Users do not know it, so
// waiting for it does not wait for their kernels.
cudaStream_t fillStream(int device) {
  static std::mutex mutex;
  static auto* streams = new std::vector<cudaStream_t>(countDevices(), nullptr);
  std::lock_guard lock(mutex);
  cudaStream_t& stream = (*streams)[device];
  if (stream == nullptr) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
          device);
  }
  return stream;
}

void zeroFill(void* address, size_t bytes, int device) {
  cudaStream_t stream = fillStream(device);
  check(cudaMemsetAsync(address, 0, bytes, stream), "cudaMemsetAsync", device);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device);
}

CUmemAccessDesc readWrite(int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

Error outOfMemory(CUresult result, size_t bytes, int device) {
  Error error = cudaFailure(result, "cuMemCreate", device);
  if (result != CUDA_ERROR_OUT_OF_MEMORY) return error;
  size_t available = 0, total = 0;
  if (!quietly(cudaMemGetInfo(&available, &total))) return error;
  return Error(ErrorCode::unhandledCudaError,
               fmt::format("{} bytes of device memory were asked for, {} of {} are free", bytes,
                           available, total))
      .device(device)
      .remedy("Free memory of the device, or lower NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS");
}

class VmmMemory final : public DeviceMemory {
 public:
  VmmMemory(std::unique_ptr<AddressRange> range, size_t bytes, int device)
      : DeviceMemory(range->address(), bytes, device), range_(std::move(range)) {}
  ~VmmMemory() override {
    // The offer holds the physical memory.
    releaseOn(device_, [this] { withdrawOffer(range_->address()); });
  }

 private:
  std::unique_ptr<AddressRange> range_;
};

class MallocMemory final : public DeviceMemory {
 public:
  MallocMemory(size_t bytes, size_t allocatedBytes, int device)
      : DeviceMemory(nullptr, bytes, device) {
    cudaError_t status = cudaMalloc(&address_, allocatedBytes);
    if (status != cudaSuccess) throw cudaFailure(status, "cudaMalloc", device);
  }
  ~MallocMemory() override {
    releaseOn(device_, [this] { quietly(cudaFree(address_)); });
  }
};

class CudaPinnedMemory final : public PinnedMemory {
 public:
  CudaPinnedMemory(size_t bytes, int device) : PinnedMemory(nullptr, nullptr), device_(device) {
    check(cudaHostAlloc(&hostAddress_, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    cudaError_t status = cudaHostGetDevicePointer(&deviceAddress_, hostAddress_, 0);
    if (status != cudaSuccess) {
      quietly(cudaFreeHost(hostAddress_));
      throw cudaFailure(status, "cudaHostGetDevicePointer", device);
    }
    std::memset(hostAddress_, 0, bytes);
  }
  ~CudaPinnedMemory() override {
    releaseOn(device_, [this] { quietly(cudaFreeHost(hostAddress_)); });
  }

 private:
  int device_;
};

// Portable memory belongs to no device, but its call needs a context: the current one, or any that
// the process has, so that a thread without one does not make another on device 0.
int deviceForPinned() {
  CUcontext current = nullptr;
  check(driver().contextGetCurrent(&current), "cuCtxGetCurrent");
  int device = 0;
  if (current == nullptr) {
    for (int candidate = 0; candidate < countDevices(); candidate++) {
      if (hasContext(candidate)) return candidate;
    }
  }
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// A line of a page that is kept for the life of the process. Freeing pinned memory waits for every
// kernel of the device: an aborted communicator would wait for all others.
class PinnedLine final : public PinnedMemory {
 public:
  static constexpr size_t kBytes = 128;  // lines of different owners share no cache line

  PinnedLine() : PinnedMemory(nullptr, nullptr) {
    std::lock_guard lock(mutex());
    if (free().empty()) addPage();
    void* line = free().back();
    const int device = deviceForPinned();
    DeviceCallScope scope(device);
    if (!findOnDevice(line)) {
      // A new page, or one that cudaDeviceReset has unregistered.
      const auto page = reinterpret_cast<uintptr_t>(line) & ~(kPageBytes - 1);
      check(cudaHostRegister(reinterpret_cast<void*>(page), kPageBytes,
                             cudaHostRegisterMapped | cudaHostRegisterPortable),
            "cudaHostRegister");
      check(cudaHostGetDevicePointer(&deviceAddress_, line, 0), "cudaHostGetDevicePointer");
    }
    free().pop_back();
    hostAddress_ = std::memset(line, 0, kBytes);
  }
  ~PinnedLine() override {
    std::lock_guard lock(mutex());
    free().push_back(hostAddress_);
  }

 private:
  static constexpr size_t kPageBytes = 4096;

  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<void*>& free() {
    static auto* lines = new std::vector<void*>;
    return *lines;
  }
  static void addPage() {
    void* page =
        ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw systemError(errno, "mmap");
    // A child that writes first must not take the page that the device reads.
    ::madvise(page, kPageBytes, MADV_DONTFORK);
    for (size_t offset = 0; offset < kPageBytes; offset += kBytes) {
      free().push_back(static_cast<std::byte*>(page) + offset);
    }
  }
  bool findOnDevice(void* line) {
    if (cudaHostGetDevicePointer(&deviceAddress_, line, 0) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
  }
};

// A line of device memory that the CPU sets with a copy on a stream of its own. The copy engine
// runs while kernels occupy every multiprocessor, and the stream has the highest priority, so that
// its copies do not queue after work of the user. Reading host memory instead would cost about a
// microsecond for each block of a launch. Lines are kept until the process exits.
class DeviceFlag final : public LaunchFlag {
 public:
  explicit DeviceFlag(int device) : LaunchFlag(nullptr), device_(device) {
    DeviceCallScope scope(device);
    std::lock_guard lock(mutex());
    PerDevice& own = of(device);
    if (own.stream == nullptr) {
      own.stream = createUrgentStream(device);
      *static_cast<uint32_t*>(own.one.hostAddress()) = 1;
    }
    if (own.free.empty()) addPage(own, device);
    zeroFill(own.free.back(), kLineBytes, device);
    address_ = own.free.back();
    own.free.pop_back();
  }
  ~DeviceFlag() override {
    // A copy that is still queued would mark the next owner of the line as aborted.
    if (pending_) return;
    std::lock_guard lock(mutex());
    of(device_).free.push_back(address_);
  }

  // Waits for the copy, which takes microseconds, but not longer than kPatience: where it shares a
  // hardware queue with work of the user, it may be stuck after that work. While it is stuck, other
  // flags of the device do not wait.
  void raise() override {
    releaseOn(device_, [this] {
      constexpr std::chrono::milliseconds kPatience{20};
      const PerDevice& own = lockedOf(device_);
      const bool wasBusy = cudaStreamQuery(own.stream) == cudaErrorNotReady;
      pending_ = quietly(cudaMemcpyAsync(address_, own.one.hostAddress(), sizeof(uint32_t),
                                         cudaMemcpyHostToDevice, own.stream));
      const auto deadline = std::chrono::steady_clock::now() + (wasBusy ? 0ms : kPatience);
      while (pending_) {
        pending_ = cudaStreamQuery(own.stream) == cudaErrorNotReady;
        if (!pending_ || std::chrono::steady_clock::now() >= deadline) break;
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
      if (pending_) {
        logWarn(
            "Device {} has not stored the abort of a communicator yet, so kernels of that "
            "communicator may still start",
            device_);
      }
    });
  }

 private:
  static constexpr size_t kLineBytes = 128, kPageBytes = 64 << 10;

  struct PerDevice {
    cudaStream_t stream = nullptr;
    PinnedLine one;  // holds a 1, the source of the copies
    std::vector<std::shared_ptr<DeviceMemory>> pages;
    std::vector<uint32_t*> free;
  };

  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  // Never destroyed, because threads may abort communicators until the process has ended.
  static PerDevice& of(int device) {
    static auto* devices = new std::map<int, PerDevice>;
    return (*devices)[device];
  }
  static const PerDevice& lockedOf(int device) {
    std::lock_guard lock(mutex());
    return of(device);
  }
  static void addPage(PerDevice& own, int device) {
    auto page = allocateVmm(device, kPageBytes, sharingSupport(device));
    if (page == nullptr) page = allocateMalloc(device, kPageBytes);
    for (size_t offset = 0; offset < page->bytes(); offset += kLineBytes) {
      own.free.push_back(
          reinterpret_cast<uint32_t*>(static_cast<std::byte*>(page->address()) + offset));
    }
    own.pages.push_back(std::move(page));
  }

  const int device_;
  bool pending_ = false;
};

}  // namespace

PhysicalMemory::~PhysicalMemory() {
  if (owned_) quietly(driver().memRelease(handle_));
}

CUmemAllocationProp PhysicalMemory::properties() const {
  CUmemAllocationProp properties{};
  check(driver().memGetAllocationProperties(&properties, handle_),
        "cuMemGetAllocationPropertiesFromHandle");
  return properties;
}

AddressRange::AddressRange(std::span<const Part> parts, size_t granularity, int device)
    : device_(device) {
  for (const Part& part : parts) bytes_ += part.bytes;
  check(driver().memAddressReserve(&address_, bytes_, granularity, 0, 0), "cuMemAddressReserve",
        device);
  CUdeviceptr address = address_;
  for (const Part& part : parts) {
    const CUresult result = driver().memMap(address, part.bytes, 0, part.memory, 0);
    if (result != CUDA_SUCCESS) {
      release();
      throw cudaFailure(result, "cuMemMap", device);
    }
    mapped_.push_back(part.bytes);
    address += part.bytes;
  }
}

AddressRange::AddressRange(const PhysicalMemory& memory, size_t bytes, size_t granularity,
                           int device)
    : AddressRange(std::array{Part{memory.handle(), bytes}}, granularity, device) {}

AddressRange::~AddressRange() {
  releaseOn(device_, [this] { release(); });
}

// A mapping is unmapped whole, so each by itself.
void AddressRange::release() {
  CUdeviceptr address = address_;
  for (const size_t bytes : mapped_) {
    quietly(driver().memUnmap(address, bytes));
    address += bytes;
  }
  quietly(driver().memAddressFree(address_, bytes_));
}

SharingSupport sharingSupport(int device) {
  auto has = [device](CUdevice_attribute attribute) {
    int value = 0;
    return quietly(driver().deviceGetAttribute(&value, attribute, device)) && value != 0;
  };
  SharingSupport support;
  support.descriptors = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                        has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  support.fabric = has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
  support.directRdma = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  return support;
}

size_t allocationGranularity(const CUmemAllocationProp& properties, int device) {
  size_t granularity = 0;
  check(driver().memGetAllocationGranularity(&granularity, &properties,
                                             CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity", device);
  return granularity;
}

std::shared_ptr<DeviceMemory> allocateVmm(int device, size_t bytes, const SharingSupport& support) {
  DeviceCallScope scope(device);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | (support.fabric ? CU_MEM_HANDLE_TYPE_FABRIC : 0));
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.allocFlags.gpuDirectRDMACapable = support.directRdma ? 1 : 0;
  size_t granularity = allocationGranularity(properties, device);
  size_t mappedBytes = roundUp(std::max<size_t>(bytes, 1), granularity);

  CUmemGenericAllocationHandle handle = 0;
  CUresult result = driver().memCreate(&handle, mappedBytes, &properties, 0);
  if (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED) return nullptr;
  // Drivers refuse fabric handles in more ways; what else may be wrong shows without them.
  if (support.fabric && result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
    return nullptr;
  }
  if (result != CUDA_SUCCESS) throw outOfMemory(result, mappedBytes, device);
  PhysicalMemory memory(handle);
  auto range = std::make_unique<AddressRange>(memory, mappedBytes, granularity, device);
  grantAccess(range->address(), mappedBytes, device, device);
  for (int peer = 0; peer < countDevices(); peer++) {
    if (peer == device || !hasContext(peer) || !peerReachable(peer, device)) continue;
    CUmemAccessDesc access = readWrite(peer);
    // Importing asks again, and reports what is wrong.
    quietly(driver().memSetAccess(reinterpret_cast<CUdeviceptr>(range->address()), mappedBytes,
                                  &access, 1));
  }
  zeroFill(range->address(), mappedBytes, device);
  return std::make_shared<VmmMemory>(std::move(range), bytes, device);
}

std::shared_ptr<DeviceMemory> allocateMalloc(int device, size_t bytes) {
  DeviceCallScope scope(device);
  const size_t allocatedBytes = roundUp(std::max<size_t>(bytes, 1), kLegacyShareBytes);
  auto memory = std::make_shared<MallocMemory>(bytes, allocatedBytes, device);
  zeroFill(memory->address(), allocatedBytes, device);
  return memory;
}

std::shared_ptr<PinnedMemory> allocatePinnedMemory(size_t bytes) {
  if (bytes <= PinnedLine::kBytes) return std::make_shared<PinnedLine>();
  const int device = deviceForPinned();
  DeviceCallScope scope(device);
  return std::make_shared<CudaPinnedMemory>(bytes, device);
}

std::shared_ptr<LaunchFlag> allocateLaunchFlag(int device) {
  return std::make_shared<DeviceFlag>(device);
}

bool peerReachable(int device, int owner) {
  if (device == owner) return true;
  int reachable = 0;
  check(cudaDeviceCanAccessPeer(&reachable, device, owner), "cudaDeviceCanAccessPeer", device);
  return reachable != 0;
}

Error peerUnreachable(int device, int owner, const std::string& why) {
  return Error(ErrorCode::unhandledCudaError,
               fmt::format("GPU {} cannot access memory of GPU {}: {}", device, owner,
                           why.empty() ? "CUDA has no peer-to-peer path between them "
                                         "(cudaDeviceCanAccessPeer says 0)"
                                       : why))
      .device(device)
      .remedy(
          "`nvidia-smi topo -p2p r` shows the paths. Over PCIe, an IOMMU or access control "
          "services (ACS) of the switches can forbid them: turn these off, or in a virtual "
          "machine let the host pass peer-to-peer through");
}

void grantAccess(void* base, size_t bytes, int device, int owner) {
  CUdeviceptr address = reinterpret_cast<CUdeviceptr>(base);
  CUmemAccessDesc access = readWrite(device);
  unsigned long long flags = 0;
  if (quietly(driver().memGetAccess(&flags, &access.location, address)) &&
      flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return;
  }
  CUresult result = driver().memSetAccess(address, bytes, &access, 1);
  if (result == CUDA_SUCCESS) return;
  Error error = cudaFailure(result, "cuMemSetAccess", device);
  if (device == owner || result == CUDA_ERROR_OUT_OF_MEMORY) throw error;
  throw peerUnreachable(device, owner, error.what());
}

void enablePeer(int device, int owner) {
  if (device == owner) return;
  DeviceCallScope scope(device);
  cudaError_t status = cudaDeviceEnablePeerAccess(owner, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  if (status == cudaErrorInvalidDevice) {
    cudaGetLastError();
    throw peerUnreachable(device, owner, "");
  }
  if (status != cudaSuccess) {
    throw peerUnreachable(device, owner,
                          cudaFailure(status, "cudaDeviceEnablePeerAccess", device).what());
  }
}

}  // namespace unisono::runtime
