// SPDX-License-Identifier: Apache-2.0
// Memory that crosses devices and processes.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stop_token>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/memory.h"
#include "runtime_cuda_child.h"

namespace unisono::runtime::test {
namespace {

constexpr size_t kBytes = (size_t{3} << 20) + 5;
constexpr size_t kOffset = 12345;

// Memory as applications allocate it, freed with the object.
class ForeignMalloc {
 public:
  ForeignMalloc(Runtime& runtime, int device, size_t bytes) : runtime_(runtime), device_(device) {
    DeviceScope scope(runtime, device);
    check(cudaMalloc(&address_, bytes), "cudaMalloc", device);
    check(cudaMemset(address_, 0x11, bytes), "cudaMemset", device);
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", device);
  }
  ~ForeignMalloc() {
    DeviceScope scope(runtime_, device_);
    cudaFree(address_);
  }
  unsigned char* address() const { return static_cast<unsigned char*>(address_); }

 private:
  Runtime& runtime_;
  int device_;
  void* address_ = nullptr;
};

// A segment as PyTorch's expandable segments make it, with or without a way to share it.
struct ForeignSegment {
  static PhysicalMemory create(int device, size_t bytes, CUmemAllocationHandleType types) {
    CUmemAllocationProp properties = describe(device, types);
    CUmemGenericAllocationHandle handle = 0;
    check(driver().memCreate(&handle, bytes, &properties, 0), "cuMemCreate", device);
    return PhysicalMemory(handle);
  }
  static CUmemAllocationProp describe(int device, CUmemAllocationHandleType types) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.requestedHandleTypes = types;
    return properties;
  }
};

class CudaSharingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpus_ = gpuCount(&why);
    if (gpus_ == 0) GTEST_SKIP() << why;
    runtime_ = makeRuntime();
    runtime_->makeCurrent(0);
  }
  void TearDown() override {
    if (gpus_ > 0) {
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
  }

  // Lets `child` check and overwrite a range, and checks what it wrote.
  void passThrough(ChildProcess& child, Runtime& runtime, int owner, void* address, size_t bytes,
                   int importer) {
    fill(runtime, owner, address, bytes, 0x5a);
    ChildRequest request{ChildRequest::What::importMemory, runtime.exportMemory(address, bytes),
                         importer, 0x5a, 0xc3};
    ChildReply reply = child.ask(request);
    ASSERT_TRUE(reply.succeeded) << reply.text;
    EXPECT_EQ(reply.wrong, 0u);
    EXPECT_EQ(countOther(runtime, owner, address, bytes, 0xc3), 0u);
  }

  int gpus_ = 0;
  std::unique_ptr<Runtime> runtime_;
};

// NCCL_CUMEM_ENABLE of the exporter, and the importer's device.
class CudaProcessTest : public CudaSharingTest,
                        public ::testing::WithParamInterface<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    CudaSharingTest::SetUp();
    if (IsSkipped()) return;
    if (importer() >= gpus_) GTEST_SKIP() << "needs " << importer() + 1 << " GPUs";
    if (!runtime_->canAccessPeer(importer(), 0)) GTEST_SKIP() << "the GPUs have no peer access";
    if (cuMem() == 1 && !sharingSupport(0).descriptors) GTEST_SKIP() << "no VMM descriptors";
  }
  int cuMem() const { return std::get<0>(GetParam()); }
  int importer() const { return std::get<1>(GetParam()); }
};

TEST_P(CudaProcessTest, OurMemoryIsSharedBothWays) {
  auto runtime = makeRuntime(cuMem());
  ChildProcess child;
  auto memory = runtime->allocate(0, kBytes);
  auto* address = static_cast<unsigned char*>(memory->address());
  MemoryHandle handle = runtime->exportMemory(address, kBytes);
  EXPECT_EQ(handle.kind,
            cuMem() == 1 ? MemoryHandle::Kind::descriptor : MemoryHandle::Kind::legacyIpc);
  passThrough(child, *runtime, 0, address, kBytes, importer());
  passThrough(child, *runtime, 0, address + kOffset, kBytes - kOffset, importer());
  EXPECT_EQ(countOther(*runtime, 0, address, kOffset, 0xc3), 0u);

  // The same addresses are likely to be given again; the other process must see the new memory.
  memory.reset();
  for (int round = 0; round < 3; round++) {
    memory = runtime->allocate(0, kBytes);
    passThrough(child, *runtime, 0, memory->address(), kBytes, importer());
    memory.reset();
  }
}

TEST_P(CudaProcessTest, ManyRangesAreOfferedAtOnce) {
  auto runtime = makeRuntime(cuMem());
  ChildProcess child;
  std::vector<std::shared_ptr<DeviceMemory>> ranges;
  std::vector<MemoryHandle> handles;
  for (int i = 0; i < 8; i++) {
    ranges.push_back(runtime->allocate(0, 4096));
    fill(*runtime, 0, ranges.back()->address(), 4096, static_cast<unsigned char>(i + 1));
    handles.push_back(runtime->exportMemory(ranges.back()->address(), 4096));
  }
  for (int i = 7; i >= 0; --i) {
    ChildReply reply = child.ask({ChildRequest::What::importMemory, handles[i], importer(),
                                  static_cast<unsigned char>(i + 1), 0x77});
    ASSERT_TRUE(reply.succeeded) << reply.text;
    EXPECT_EQ(reply.wrong, 0u);
  }
}

TEST_P(CudaProcessTest, MemoryOfCudaMallocIsSharedWithItsOffset) {
  ChildProcess child;
  ForeignMalloc foreign(*runtime_, 0, 3 * kBytes);
  MemoryHandle handle = runtime_->exportMemory(foreign.address() + kOffset, kBytes);
  EXPECT_EQ(handle.kind, MemoryHandle::Kind::legacyIpc);
  EXPECT_EQ(handle.address - handle.base, kOffset);
  passThrough(child, *runtime_, 0, foreign.address() + kOffset, kBytes, importer());
  EXPECT_EQ(countOther(*runtime_, 0, foreign.address(), kOffset, 0x11), 0u);
  EXPECT_EQ(countOther(*runtime_, 0, foreign.address() + kOffset + kBytes, kBytes, 0x11), 0u);
}

// cudaMalloc puts small ranges into one block, which legacy IPC shares as a whole.
TEST_P(CudaProcessTest, SmallRangesOfCudaMallocAreNotMixedUp) {
  ChildProcess child;
  ForeignMalloc first(*runtime_, 0, 1000), second(*runtime_, 0, 1000), third(*runtime_, 0, 1000);
  passThrough(child, *runtime_, 0, second.address() + 10, 900, importer());
  EXPECT_EQ(countOther(*runtime_, 0, first.address(), 1000, 0x11), 0u);
  EXPECT_EQ(countOther(*runtime_, 0, third.address(), 1000, 0x11), 0u);
}

INSTANTIATE_TEST_SUITE_P(VmmAndLegacy, CudaProcessTest,
                         ::testing::Combine(::testing::Values(1, 0), ::testing::Values(0, 1)));

TEST_F(CudaSharingTest, AnApplicationsVmmMemoryIsSharedAndItsOfferEndsWithIt) {
  if (!sharingSupport(0).descriptors) GTEST_SKIP() << "no VMM descriptors";
  ChildProcess child;
  constexpr auto kTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t granularity = allocationGranularity(ForeignSegment::describe(0, kTypes), 0);
  // Two segments side by side in one reservation, the second one replaced by another.
  CUdeviceptr reserved = 0;
  ASSERT_EQ(driver().memAddressReserve(&reserved, 2 * granularity, 0, 0, 0), CUDA_SUCCESS);
  auto map = [&](int index) {
    PhysicalMemory memory = ForeignSegment::create(0, granularity, kTypes);
    CUdeviceptr at = reserved + index * granularity;
    check(driver().memMap(at, granularity, 0, memory.handle(), 0), "cuMemMap", 0);
    grantAccess(reinterpret_cast<void*>(at), granularity, 0, 0);
    return reinterpret_cast<unsigned char*>(at);
  };
  unsigned char* first = map(0);
  unsigned char* second = map(1);
  passThrough(child, *runtime_, 0, first + kOffset, 4096, 0);
  passThrough(child, *runtime_, 0, second + kOffset, 4096, 0);
  MemoryHandle earlier = runtime_->exportMemory(second, 64);
  EXPECT_EQ(earlier.base, reserved + granularity);
  EXPECT_EQ(earlier.payload, runtime_->exportMemory(second + 64, 64).payload);

  bool spans = false;
  try {
    runtime_->exportMemory(first, 2 * granularity);
  } catch (const Error& error) {
    spans = error.code() == ErrorCode::invalidArgument;
  }
  EXPECT_TRUE(spans) << "a range over two allocations was exported as one";

  // Together they are mapped at consecutive addresses.
  const auto passRun = [&](unsigned char expected, unsigned char written) {
    const Allocation run = runtime_->findRun(first + kOffset, 2 * granularity - kOffset);
    ASSERT_EQ(run.base, reserved);
    ASSERT_EQ(run.bytes, 2 * granularity);
    fill(*runtime_, 0, first, 2 * granularity, expected);
    runtime_->retainRun(run);
    const std::vector<MemoryHandle> handles = runtime_->exportRun(run);
    ASSERT_EQ(handles.size(), 2u);
    const ChildReply reply =
        child.ask({ChildRequest::What::importMemory, handles[0], 0, expected, written, handles[1]});
    ASSERT_TRUE(reply.succeeded) << reply.text;
    EXPECT_EQ(reply.wrong, 0u);
    EXPECT_EQ(countOther(*runtime_, 0, first, 2 * granularity, written), 0u);
    const std::vector<MemoryHandle> swapped{handles[1], handles[0]};
    EXPECT_THROW(runtime_->importRun(swapped, 0), Error);
  };
  passRun(0x21, 0x42);
  const Allocation before = runtime_->findRun(first, 2 * granularity);

  ASSERT_EQ(driver().memUnmap(reserved + granularity, granularity), CUDA_SUCCESS);
  EXPECT_EQ(runtime_->findRun(first, 2 * granularity), Allocation());
  ASSERT_EQ(map(1), second);
  EXPECT_NE(runtime_->findRun(first, 2 * granularity).serial, before.serial);
  passRun(0x63, 0x84);
  passThrough(child, *runtime_, 0, second, 4096, 0);
  EXPECT_NE(earlier.payload, runtime_->exportMemory(second, 64).payload);
  ChildReply reply = child.ask({ChildRequest::What::importMemory, earlier, 0, 0, 0});
  EXPECT_FALSE(reply.succeeded) << "an offer outlived its memory";

  driver().memUnmap(reserved, granularity);
  driver().memUnmap(reserved + granularity, granularity);
  driver().memAddressFree(reserved, 2 * granularity);
}

// As a background thread does while the application frees memory.
TEST_F(CudaSharingTest, MemoryIsOfferedAndWithdrawnWhileItIsUnmapped) {
  if (!sharingSupport(0).descriptors) GTEST_SKIP() << "no VMM descriptors";
  constexpr auto kTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  constexpr int kSegments = 16, kRounds = 300;
  const size_t granularity = allocationGranularity(ForeignSegment::describe(0, kTypes), 0);
  CUdeviceptr reserved = 0;
  ASSERT_EQ(driver().memAddressReserve(&reserved, kSegments * granularity, 0, 0, 0), CUDA_SUCCESS);
  std::atomic<int> exports{0};
  std::jthread background([&](const std::stop_token& stop) {
    const DeviceScope scope(*runtime_, 0);
    while (!stop.stop_requested()) {
      runtime_->releaseFreedExports();
      runtime_->findRun(reinterpret_cast<void*>(reserved), kSegments * granularity);
      for (size_t i = 0; i < kSegments; i++) {
        try {
          const auto* address = reinterpret_cast<const void*>(reserved + i * granularity);
          exports += runtime_->exportRun(runtime_->findAllocation(address)).empty() ? 0 : 1;
        } catch (const Error&) {
          // It is not retained yet, or already unmapped.
        }
      }
    }
  });
  for (int round = 0; round < kRounds; round++) {
    for (int i = 0; i < kSegments; i++) {
      const CUdeviceptr at = reserved + static_cast<size_t>(i) * granularity;
      const PhysicalMemory memory = ForeignSegment::create(0, granularity, kTypes);
      ASSERT_EQ(driver().memMap(at, granularity, 0, memory.handle(), 0), CUDA_SUCCESS);
      grantAccess(reinterpret_cast<void*>(at), granularity, 0, 0);
      runtime_->retainRun(runtime_->findAllocation(reinterpret_cast<const void*>(at)));
    }
    for (int i = 0; i < kSegments; i++) {
      driver().memUnmap(reserved + static_cast<size_t>(i) * granularity, granularity);
    }
  }
  background.request_stop();
  background.join();
  EXPECT_GT(exports, 0);
  driver().memAddressFree(reserved, kSegments * granularity);
}

TEST_F(CudaSharingTest, MemoryThatCannotBeSharedSaysWhy) {
  auto expectRefused = [this](const void* address, size_t bytes, ErrorCode code,
                              const std::string& text) {
    try {
      runtime_->exportMemory(address, bytes);
      ADD_FAILURE() << "no error; expected one with: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  int local = 0;
  expectRefused(&local, sizeof(local), ErrorCode::invalidArgument, "host memory");
  ForeignMalloc foreign(*runtime_, 0, kBytes);
  expectRefused(foreign.address(), size_t{1} << 40, ErrorCode::invalidArgument, "one allocation");

  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pooled, 4096, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expectRefused(pooled, 4096, ErrorCode::invalidUsage, "cudaMallocAsync");
  cudaFreeAsync(pooled, stream);
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);

  constexpr auto kTypes = CU_MEM_HANDLE_TYPE_NONE;
  size_t granularity = allocationGranularity(ForeignSegment::describe(0, kTypes), 0);
  PhysicalMemory memory = ForeignSegment::create(0, granularity, kTypes);
  AddressRange range(memory, granularity, granularity, 0);
  grantAccess(range.address(), granularity, 0, 0);
  expectRefused(range.address(), 64, ErrorCode::invalidUsage, "POSIX_FILE_DESCRIPTOR");
}

TEST_F(CudaSharingTest, HandlesThatMakeNoSenseAreRefused) {
  auto memory = runtime_->allocate(0, kBytes);
  MemoryHandle handle = runtime_->exportMemory(memory->address(), kBytes);
  MemoryHandle none = handle;
  none.kind = MemoryHandle::Kind::none;
  EXPECT_THROW(runtime_->importMemory(none, 0), Error);
  MemoryHandle outside = handle;
  outside.bytes = handle.baseBytes + 1;
  EXPECT_THROW(runtime_->importMemory(outside, 0), Error);
  MemoryHandle before = handle;
  before.address = handle.base - 1;
  EXPECT_THROW(runtime_->importMemory(before, 0), Error);
  EXPECT_THROW(runtime_->importMemory(handle, gpus_), Error);
}

TEST_F(CudaSharingTest, OneProcessSharesByPointer) {
  if (gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs";
  if (!runtime_->canAccessPeer(1, 0)) GTEST_SKIP() << "the GPUs have no peer access";
  ForeignMalloc foreign(*runtime_, 0, kBytes);
  auto shared = runtime_->allocate(0, kBytes);
  auto local = runtime_->allocate(0, kBytes);
  for (void* address :
       {static_cast<void*>(foreign.address()), shared->address(), local->address()}) {
    auto* start = static_cast<unsigned char*>(address) + kOffset;
    size_t bytes = kBytes - kOffset;
    auto mapped = runtime_->importMemory(runtime_->exportMemory(start, bytes), 1);
    EXPECT_EQ(mapped->address(), start);
    fill(*runtime_, 1, mapped->address(), bytes, 0x42);
    EXPECT_EQ(countOther(*runtime_, 0, start, bytes, 0x42), 0u);
    mapped = runtime_->importMemory(runtime_->exportMemory(start, bytes), 1);  // already enabled
  }
}

TEST_F(CudaSharingTest, OtherDevicesGetNoContext) {
  if (gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs";
  ChildProcess child;
  ChildReply reply = child.ask({ChildRequest::What::contexts, {}, 1, 0, 0});
  EXPECT_TRUE(reply.succeeded) << reply.text;
}

TEST_F(CudaSharingTest, PinnedLinesOutliveAReset) {
  ChildReply reply = ChildProcess().ask({ChildRequest::What::reset, {}, 0, 0, 0});
  EXPECT_TRUE(reply.succeeded) << reply.wrong << " bytes are wrong; " << reply.text;
}

// Whether the driver gives this process memory with fabric handles: needs a channel of IMEX.
bool hasFabricHandles() {
  if (!sharingSupport(0).fabric) return false;
  CUmemAllocationProp properties = ForeignSegment::describe(0, CU_MEM_HANDLE_TYPE_FABRIC);
  CUmemGenericAllocationHandle handle = 0;
  CUresult result =
      driver().memCreate(&handle, allocationGranularity(properties, 0), &properties, 0);
  if (result != CUDA_SUCCESS) return false;
  PhysicalMemory memory(handle);
  CUmemFabricHandle fabric;
  return driver().memExportToShareableHandle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0) ==
         CUDA_SUCCESS;
}

// With a channel our memory has both handles; without one it still has its descriptor.
TEST_F(CudaSharingTest, FabricHandlesAreAddedWhereTheDriverGivesThem) {
  if (!sharingSupport(0).descriptors) GTEST_SKIP() << "no VMM descriptors";
  const bool expected = hasFabricHandles();
  RecordProperty("fabricHandles", expected ? "given" : "refused");
  for (bool multiNodeNvlink : {true, false}) {
    auto runtime = makeRuntime(1, multiNodeNvlink);
    for (int round = 0; round < 2; round++) {  // a refusal is remembered
      ChildProcess child;
      auto memory = runtime->allocate(0, kBytes);
      MemoryHandle handle = runtime->exportMemory(memory->address(), kBytes);
      EXPECT_EQ(handle.kind, MemoryHandle::Kind::descriptor);
      EXPECT_EQ(handle.hasFabric != 0, expected && multiNodeNvlink);
      passThrough(child, *runtime, 0, memory->address(), kBytes, 0);
    }
  }
}

TEST_F(CudaSharingTest, AFabricHandleServesWhereThereIsNoDescriptor) {
  if (!hasFabricHandles()) GTEST_SKIP() << "the driver gives no fabric handles (no IMEX channel)";
  ChildProcess child;
  auto memory = runtime_->allocate(0, kBytes);
  fill(*runtime_, 0, memory->address(), kBytes, 1);
  MemoryHandle unreachable = runtime_->exportMemory(memory->address(), kBytes);
  unreachable.payload[8] ^= std::byte{1};  // in the name of the service, as on another host
  ChildReply reply = child.ask({ChildRequest::What::importMemory, unreachable, 0, 1, 2});
  ASSERT_TRUE(reply.succeeded) << reply.text;
  EXPECT_EQ(reply.wrong, 0u);

  size_t granularity =
      allocationGranularity(ForeignSegment::describe(0, CU_MEM_HANDLE_TYPE_FABRIC), 0);
  PhysicalMemory segment = ForeignSegment::create(0, granularity, CU_MEM_HANDLE_TYPE_FABRIC);
  AddressRange range(segment, granularity, granularity, 0);
  grantAccess(range.address(), granularity, 0, 0);
  EXPECT_EQ(runtime_->exportMemory(range.address(), 64).kind, MemoryHandle::Kind::none);
  passThrough(child, *runtime_, 0, range.address(), granularity, 0);
}

TEST_F(CudaSharingTest, AFabricHandleThatCannotBeMappedSaysWhatElseFailed) {
  if (!sharingSupport(0).descriptors) GTEST_SKIP() << "no VMM descriptors";
  auto memory = runtime_->allocate(0, kBytes);
  MemoryHandle handle = runtime_->exportMemory(memory->address(), kBytes);
  handle.process ^= 1;  // of another process
  handle.payload[8] ^= std::byte{1};
  handle.hasFabric = 1;
  handle.fabric.fill(std::byte{0x5a});
  try {
    runtime_->importMemory(handle, 0);
    ADD_FAILURE() << "a made-up fabric handle was mapped";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("fabric handle"), std::string::npos) << text;
    EXPECT_NE(text.find("has ended"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace unisono::runtime::test
