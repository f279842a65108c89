// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/log.h"
#include "runtime/cuda/copies.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/event.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/share.h"
#include "runtime/cuda/shared_memory.h"
#include "runtime/cuda/word_reader.h"
#include "runtime/runtime.h"

namespace unisono::runtime {
namespace {

cudaStream_t cudaStream(Stream stream) {
  return static_cast<cudaStream_t>(stream);
}

class CudaRuntime final : public Runtime {
 public:
  explicit CudaRuntime(const Settings& settings) : settings_(settings) {
    driver();
    devices_ = countDevices();
    for (int device = 0; device < devices_; device++) {
      support_.push_back(sharingSupport(device));
      support_.back().fabric &= settings.multiNodeNvlink != 0;
    }
    logInfo("CUDA runtime with {} devices", devices_);
  }

  Backend backend() const override { return Backend::cuda; }
  int deviceCount() override { return devices_; }

  int currentDevice() override {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
  }

  void* makeCurrent(int device) override { return makeContextCurrent(device); }
  void restoreCurrent(void* before) override {
    quietly(driver().contextSetCurrent(static_cast<CUcontext>(before)));
  }
  DeviceProperties properties(int device) override;

  bool canAccessPeer(int device, int peer) override {
    checkOrdinal(device);
    checkOrdinal(peer);
    return peerReachable(device, peer);
  }

  std::shared_ptr<DeviceMemory> allocate(int device, size_t bytes) override;
  std::shared_ptr<PinnedMemory> allocatePinned(size_t bytes) override {
    return allocatePinnedMemory(bytes);
  }

  std::shared_ptr<DeviceMemory> allocateShared(int device, size_t bytes) override {
    checkOrdinal(device);
    return allocateSharedMemory(device, bytes);
  }

  std::shared_ptr<LaunchFlag> allocateLaunchFlag(int device) override {
    checkOrdinal(device);
    return runtime::allocateLaunchFlag(device);
  }

  std::shared_ptr<MappedMemory> importRun(std::span<const MemoryHandle> handles,
                                          int device) override {
    return importCudaMemory(handles, device);
  }
  bool supportsDmaBuf(int device) override;
  DmaBuf exportDmaBuf(const void* address, size_t bytes) override;
  bool hasPeerMemory() override;
  bool supportsPeerAtomics(int device, int peer) override {
    checkOrdinal(device);
    checkOrdinal(peer);
    int supported = device == peer ? 1 : 0;
    if (device != peer) {
      check(
          cudaDeviceGetP2PAttribute(&supported, cudaDevP2PAttrNativeAtomicSupported, device, peer),
          "cudaDeviceGetP2PAttribute", device);
    }
    return supported != 0;
  }
  void openPeer(int device, int peer) override { enablePeer(device, peer); }
  PointerInfo inspect(const void* address) override { return inspectPointer(address); }
  Allocation findAllocation(const void* address) override { return findCudaAllocation(address); }
  void releaseFreedExports() override { withdrawFreedOffers(); }

  void copyAsync(void* destination, const void* source, size_t bytes, Stream stream) override {
    check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, cudaStream(stream)),
          "cudaMemcpyAsync");
  }

  void prepareToReadWords(int device) override {
    checkOrdinal(device);
    wordReader_.prepare(device);
  }
  bool readWords(int device, std::span<const uint64_t* const> addresses,
                 std::span<uint64_t> values) override {
    checkOrdinal(device);
    return wordReader_.read(device, addresses, values);
  }
  void prepare(const Kernel& kernel, int device) override;
  void launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
              Stream stream) override;

  std::shared_ptr<void> createStream(int device) override;
  std::shared_ptr<void> createUrgentStream(int device) override;
  uint64_t streamNumber(Stream stream) override;
  std::unique_ptr<Event> createEvent(int device) override { return createCudaEvent(device); }
  std::unique_ptr<TimedPoint> createTimedPoint(int device) override {
    return createCudaTimedPoint(device);
  }
  std::unique_ptr<ParallelCopies> createParallelCopies(int device) override {
    return createCudaParallelCopies(*this, device);
  }
  void synchronize(Stream stream) override;
  bool query(Stream stream) override;
  CaptureState captureState(Stream stream) override;

 protected:
  void retain(const void* address) override { retainCudaMemory(address); }
  MemoryHandle exportRetained(const void* address, size_t bytes) override {
    return exportCudaMemory(address, bytes);
  }

 private:
  void checkOrdinal(int device) const {
    if (device >= 0 && device < devices_) return;
    throw invalidArgument("Device {} does not exist: this process sees {}", device, devices_)
        .remedy("Use a smaller ordinal, or let the process see more GPUs (CUDA_VISIBLE_DEVICES)");
  }

  const Settings settings_;
  WordReader wordReader_;
  int devices_ = 0;
  std::vector<SharingSupport> support_;
  std::atomic<bool> vmmRefused_{false};
  std::atomic<bool> fabricRefused_{false};  // channels are the process's, so for all devices
};

bool CudaRuntime::supportsDmaBuf(int device) {
  checkOrdinal(device);
  int supported = 0;
  return quietly(driver().deviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
                                             device)) &&
         supported != 0;
}

DmaBuf CudaRuntime::exportDmaBuf(const void* address, size_t bytes) {
  int descriptor = -1;
  check(driver().memGetHandleForAddressRange(&descriptor, reinterpret_cast<CUdeviceptr>(address),
                                             bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
        "cuMemGetHandleForAddressRange");
  return {UniqueDescriptor(descriptor), 0};
}

// The kernel module nvidia-peermem, or the one that Mellanox had before.
bool CudaRuntime::hasPeerMemory() {
  for (const char* file :
       {"/sys/module/nvidia_peermem/version", "/sys/kernel/mm/memory_peers/nv_mem/version",
        "/sys/kernel/mm/memory_peers/nv_mem_nc/version"}) {
    if (::access(file, F_OK) == 0) return true;
  }
  return false;
}

DeviceProperties CudaRuntime::properties(int device) {
  checkOrdinal(device);
  DeviceProperties properties;
  char name[256] = {};
  check(driver().deviceGetName(name, sizeof(name), device), "cuDeviceGetName", device);
  properties.name = name;
  char busId[32] = {};
  check(cudaDeviceGetPCIBusId(busId, sizeof(busId), device), "cudaDeviceGetPCIBusId", device);
  properties.busId = busId;
  std::transform(properties.busId.begin(), properties.busId.end(), properties.busId.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute", device);
    return value;
  };
  properties.computeCapability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                                 attribute(cudaDevAttrComputeCapabilityMinor);
  properties.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  CUuuid uuid{};
  check(driver().deviceGetUuid(&uuid, device), "cuDeviceGetUuid", device);
  static_assert(sizeof(uuid.bytes) == sizeof(properties.uuid));
  std::memcpy(properties.uuid.data(), uuid.bytes, sizeof(uuid.bytes));
  return properties;
}

std::shared_ptr<DeviceMemory> CudaRuntime::allocate(int device, size_t bytes) {
  checkOrdinal(device);
  if (settings_.cuMem == 0) return allocateMalloc(device, bytes);
  SharingSupport support = support_[device];
  support.fabric = support.fabric && !fabricRefused_.load(std::memory_order_relaxed);
  if (support.descriptors && !vmmRefused_.load(std::memory_order_relaxed)) {
    if (auto memory = allocateVmm(device, bytes, support)) return memory;
    if (std::exchange(support.fabric, false)) {
      if (!fabricRefused_.exchange(true)) {
        logInfo(
            "Device {} gives no memory with fabric handles, as without a channel in "
            "/dev/nvidia-caps-imex-channels; memory is shared by descriptors alone",
            device);
      }
      if (auto memory = allocateVmm(device, bytes, support)) return memory;
    }
  }
  if (settings_.cuMem == 1) {
    throw invalidUsage("NCCL_CUMEM_ENABLE=1, but the driver allocates no memory with POSIX handles")
        .device(device)
        .remedy("Unset NCCL_CUMEM_ENABLE, or set it to 0 for legacy CUDA IPC");
  }
  if (!vmmRefused_.exchange(true)) {
    logInfo("Device {} has no VMM memory with POSIX handles; legacy CUDA IPC is used", device);
  }
  return allocateMalloc(device, bytes);
}

void CudaRuntime::prepare(const Kernel& kernel, int device) {
  DeviceCallScope scope(device);
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel.cudaFunction);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    const int capability = properties(device).computeCapability;
    throw Error(ErrorCode::unhandledCudaError,
                fmt::format("The library has no code for compute capability {}.{}", capability / 10,
                            capability % 10))
        .device(device)
        .remedy(fmt::format("Build it with -DCMAKE_CUDA_ARCHITECTURES={}", capability));
  }
  if (status != cudaSuccess) {
    throw cudaFailure(status, fmt::format("Loading of kernel {}", kernel.name).c_str(), device);
  }
}

// A __global__ function as the driver takes it, on every device. Launches and other calls that
// every eager collective makes go to the driver: through the CUDA runtime each takes 0.05 to 0.2 us
// longer.
struct DriverFunction {
  const void* function = nullptr;
  CUfunction handle = nullptr;
  bool awaitsEarlierKernels = false;  // see device/simt/cuda.h
};
const DriverFunction& driverFunction(const void* function) {
  thread_local std::array<DriverFunction, 16> table;
  DriverFunction& known = table[reinterpret_cast<uintptr_t>(function) / 16 % table.size()];
  if (known.function != function) [[unlikely]] {
    cudaKernel_t kernel = nullptr;
    check(cudaGetKernel(&kernel, function), "cudaGetKernel");
    // Code for older GPUs cannot wait, even if it was compiled for this one from PTX.
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
    known = {function, reinterpret_cast<CUfunction>(kernel), attributes.ptxVersion >= 90};
  }
  return known;
}

void CudaRuntime::launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
                         Stream stream) {
  if (kernel.cudaFunction == nullptr) [[unlikely]] {
    throw internalError("Kernel {} has no CUDA form", kernel.name);
  }
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(shape.blocks);
  config.blockDimX = static_cast<unsigned>(shape.threadsPerBlock);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.hStream = cudaStream(stream);
  CUlaunchAttribute attributes[4];
  config.attrs = attributes;
  const auto addAttribute = [&](CUlaunchAttributeID id) -> CUlaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].value;
  };
  // Clusters divide the blocks of a launch.
  if (const int blocks = std::gcd(shape.blocks, shape.clusterBlocks); blocks > 1) {
    addAttribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim = {static_cast<unsigned>(blocks),
                                                                      1, 1};
    addAttribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
        .clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  const DriverFunction& function = driverFunction(kernel.cudaFunction);
  if (shape.startsEarly && function.awaitsEarlierKernels) {
    addAttribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        .programmaticStreamSerializationAllowed = 1;
  }
  if (shape.inRemoteDomain) {
    addAttribute(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN).memSyncDomain =
        CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
  }
  void* parameters[1] = {const_cast<void*>(arguments)};
  const CUresult result = driver().launchKernel(&config, function.handle, parameters, nullptr);
  if (result != CUDA_SUCCESS) [[unlikely]] {
    throw cudaFailure(result, fmt::format("Launch of kernel {}", kernel.name).c_str(), -1);
  }
}

std::shared_ptr<void> owned(cudaStream_t stream, int device) {
  return std::shared_ptr<void>(stream, [device](void* created) {
    releaseOn(device, [created] { quietly(cudaStreamDestroy(cudaStream(created))); });
  });
}

std::shared_ptr<void> CudaRuntime::createStream(int device) {
  DeviceCallScope scope(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
        device);
  return owned(stream, device);
}

std::shared_ptr<void> CudaRuntime::createUrgentStream(int device) {
  DeviceCallScope scope(device);
  return owned(runtime::createUrgentStream(device), device);
}

void CudaRuntime::synchronize(Stream stream) {
  // Waiting for a captured stream would spoil the capture.
  if (captureState(stream) != CaptureState::none) {
    throw invalidUsage("A stream that is being captured cannot be waited for")
        .remedy("Make this call before the capture begins or after it ends");
  }
  CaptureRelaxedScope relaxed;
  check(cudaStreamSynchronize(cudaStream(stream)), "cudaStreamSynchronize");
}

bool CudaRuntime::query(Stream stream) {
  CaptureRelaxedScope relaxed;
  const cudaError_t status = cudaStreamQuery(cudaStream(stream));
  if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
  return status == cudaSuccess;
}

uint64_t CudaRuntime::streamNumber(Stream stream) {
  unsigned long long number = 0;
  check(driver().streamGetId(cudaStream(stream), &number), "cuStreamGetId");
  return number;
}

CaptureState CudaRuntime::captureState(Stream stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver().streamIsCapturing(cudaStream(stream), &capture);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
    throw invalidUsage(
        "The default stream cannot be used while a stream that waits for it is being captured")
        .remedy("Pass the stream that is being captured, or one made by cudaStreamNonBlocking");
  }
  check(result, "cuStreamIsCapturing");
  switch (capture) {
    case CU_STREAM_CAPTURE_STATUS_ACTIVE:
      return CaptureState::active;
    case CU_STREAM_CAPTURE_STATUS_INVALIDATED:
      return CaptureState::invalidated;
    default:
      return CaptureState::none;
  }
}

}  // namespace

std::unique_ptr<Runtime> createCudaRuntime(const Settings& settings) {
  return std::make_unique<CudaRuntime>(settings);
}

}  // namespace unisono::runtime
