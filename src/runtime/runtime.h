// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/settings.h"
#include "base/unique_descriptor.h"

// What the rest of the library needs of a device, and nothing more: memory that other processes can
// map, streams that keep order, launches. `cuda` and `host` implement it.
namespace unisono::runtime {

enum class Backend : int { host = 0, cuda = 1 };

// A cudaStream_t on CUDA; a stream of include/unisono/host.h on the host. Null is the legacy
// default stream of the current device on both.
using Stream = void*;

struct DeviceProperties {
  std::string name;
  std::string busId;          // "0000:65:02.0", lower case
  int computeCapability = 0;  // 90 for sm_90
  int multiprocessors = 0;
  std::array<std::byte, 16> uuid{};  // the same in every process that sees this device
};

// Multiprocessors of the largest product of a compute capability, according to the data sheets of
// the products.
constexpr int multiprocessorsOf(int computeCapability) {
  if (computeCapability >= 100) return 148;  // B200
  if (computeCapability >= 90) return 132;   // H100 SXM
  if (computeCapability >= 80) return 108;   // A100
  if (computeCapability >= 70) return 80;    // V100
  return 56;                                 // P100
}

// A range of device memory; freed with the last owner. Zero-filled when allocated.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  void* address() const { return address_; }
  size_t bytes() const { return bytes_; }
  int device() const { return device_; }

 protected:
  DeviceMemory(void* address, size_t bytes, int device)
      : address_(address), bytes_(bytes), device_(device) {}
  void* address_;
  size_t bytes_;
  int device_;
};

// Plain data that lets another rank map a range: in this process, in another one of this host by
// `kind`, in any one of this NVLink domain by `fabric`. Valid while the exported memory lives.
struct MemoryHandle {
  enum class Kind : uint32_t { none, descriptor, legacyIpc, hostMemory };
  Kind kind;
  uint32_t hasFabric;  // 1 if `fabric` is there
  int32_t device;      // ordinal in the exporting process
  uint64_t process;    // processToken() of the exporter
  uint64_t address;    // of the exported range in the exporter's address space
  uint64_t bytes;      // of the exported range
  uint64_t base;       // start of the allocation that holds the range, in the exporter's space
  uint64_t baseBytes;  // size of that allocation
  std::array<std::byte, 64> payload;  // what `kind` needs
  std::array<std::byte, 64> fabric;   // CUmemFabricHandle
};
static_assert(std::is_trivially_copyable_v<MemoryHandle>);

// Checks that each of `handles`, which another process may have sent, names a range inside its
// allocation, and that the ranges follow each other without a gap. Throws Error(invalidArgument).
void checkRun(std::span<const MemoryHandle> handles);

// Device memory as adapters map it: a range of a DMA-BUF.
struct DmaBuf {
  UniqueDescriptor descriptor;
  uint64_t offset = 0;
};

// A range of another rank's memory that this process can address. Unmapped with the last owner.
class MappedMemory {
 public:
  virtual ~MappedMemory() = default;
  void* address() const { return address_; }

 protected:
  explicit MappedMemory(void* address) : address_(address) {}
  void* address_;
};

// Host memory that device code polls (abort flags) and that the CPU writes while a kernel runs.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
  void* hostAddress() const { return hostAddress_; }
  void* deviceAddress() const { return deviceAddress_; }

 protected:
  PinnedMemory(void* host, void* device) : hostAddress_(host), deviceAddress_(device) {}
  void* hostAddress_;
  void* deviceAddress_;
};

// A word that the CPU sets while kernels run or wait to be started, whatever their streams wait
// for. Reading it costs a kernel no more than reading its own memory; a kernel that polls it may
// see the change late.
class LaunchFlag {
 public:
  virtual ~LaunchFlag() = default;
  virtual void raise() = 0;
  const uint32_t* deviceAddress() const { return address_; }

 protected:
  explicit LaunchFlag(uint32_t* address) : address_(address) {}
  uint32_t* address_;
};

// A point in a stream that other streams can wait for.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(Stream stream) = 0;
  virtual void makeWait(Stream stream) = 0;  // later work of `stream` waits for the recorded point
  // Whether the stream has come to the recorded point, also when nothing is recorded. May be called
  // from any thread. Throws what the device reports.
  virtual bool isReached() = 0;

  // Around work that is captured into a graph, to keep it in order with work outside and in other
  // graphs. Each launch of the graph waits, before the first such work of a capture, for the point
  // that was recorded last before that launch, and records the point after the last one. Within a
  // capture such work runs in the order of the calls, on whatever streams of it. Backends without
  // graphs have nothing to do.
  virtual void makeGraphWait(Stream stream) { static_cast<void>(stream); }
  virtual void recordInGraph(Stream stream) { static_cast<void>(stream); }
};

// A point in a stream, and the time at which the stream reached it.
class TimedPoint {
 public:
  virtual ~TimedPoint() = default;
  virtual void record(Stream stream) = 0;
  // Nanoseconds of std::chrono::steady_clock; nothing while the stream has not come to the recorded
  // point. May be called from any thread. Throws what the device reports.
  virtual std::optional<int64_t> reachedAt() = 0;
};

struct PointerInfo {
  // host: memory that the device runtime does not know. pinned: host memory that kernels can access
  // under the same address.
  enum class Kind { host, pinned, device, managed };
  Kind kind = Kind::host;
  int device = -1;
  bool openToPeers = false;  // kernels on other devices of this process can reach it
};

// An allocation, or several at consecutive addresses. `serial` tells it from every other one of
// this process, past and future, also from those at the same address; 0: there is none.
struct Allocation {
  uint64_t base = 0;
  uint64_t bytes = 0;
  uint64_t serial = 0;

  bool operator==(const Allocation&) const = default;
};

// Where one group of one block of a launch stands, on the host backend.
struct HostGroupContext {
  int block;
  int blocks;
  int group;  // 0 .. groups - 1 inside the block
  int groups;
  void* blockShared;  // zeroed, LaunchShape::sharedBytes long, one for each block of a launch
  // A group is one task, or one task for each of its roles.
  int role = 0;
  int roles = 1;
  void* groupShared = nullptr;  // of the roles: zeroed, kGroupSharedBytes long
};
inline constexpr size_t kGroupSharedBytes = 128;

// One kernel in its two forms; a backend uses its own.
struct Kernel {
  const char* name;
  const void* cudaFunction;  // a __global__ function of one by-value argument, or null
  void (*hostFunction)(const void* arguments, const HostGroupContext& context);
};

struct LaunchShape {
  int blocks = 1;
  int threadsPerBlock = 32;  // CUDA
  int clusterBlocks = 1;     // CUDA: most blocks of a thread block cluster
  // CUDA: the kernel waits for the earlier ones of its stream itself, if it was compiled for
  // compute capability 9.0 or more, and may then be launched while they end (programmatic dependent
  // launch).
  bool startsEarly = false;
  // CUDA: in the remote memory synchronization domain. Fences wait for stores of their own domain
  // only. Kernels of different domains on one GPU can synchronize at system scope only.
  bool inRemoteDomain = false;
  int groupsPerBlock = 1;  // host: tasks of each block, each may wait on other ranks
  size_t argumentBytes = 0;
  size_t sharedBytes = 0;  // host: block-shared storage (CUDA kernels declare theirs)
};

enum class CaptureState { none, active, invalidated };

class Runtime;

// Enqueues copies that may run at the same time. By one thread at a time.
class ParallelCopies {
 public:
  struct Range {
    void* to;
    const void* from;
    size_t bytes;
  };

  explicit ParallelCopies(Runtime& runtime) : runtime_(runtime) {}
  virtual ~ParallelCopies() = default;
  ParallelCopies(const ParallelCopies&) = delete;
  ParallelCopies& operator=(const ParallelCopies&) = delete;

  // What follows on the stream begins when all of the copies are done.
  virtual void enqueue(std::span<const Range> copies, Stream stream);

 protected:
  Runtime& runtime_;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  // The process's runtime, made at the first call from settingsFromEnvironment(): UNISONO_BACKEND,
  // else cuda when it is compiled in and a GPU is there, else host. Throws Error if the one that
  // was asked for cannot be had, and tries again at the next call.
  static Runtime& get();

  virtual Backend backend() const = 0;
  virtual int deviceCount() = 0;
  virtual int currentDevice() = 0;
  // Makes `device` current for this thread, as calls that take a stream of it need, and returns
  // what was current for restoreCurrent: that may be less than a device, and stays so.
  virtual void* makeCurrent(int device) = 0;
  virtual void restoreCurrent(void* before) = 0;
  virtual DeviceProperties properties(int device) = 0;

  // Whether kernels on `device` can load and store memory of `peer` (ordinals of this process).
  virtual bool canAccessPeer(int device, int peer) = 0;

  // Whether an atomic operation of `device` on memory of `peer` is one for kernels on `peer` too.
  virtual bool supportsPeerAtomics(int device, int peer) = 0;

  // Makes the plain memory of `peer` (PointerInfo::openToPeers) reachable for kernels on `device`.
  virtual void openPeer(int device, int peer) = 0;

  virtual std::shared_ptr<DeviceMemory> allocate(int device, size_t bytes) = 0;
  virtual std::shared_ptr<PinnedMemory> allocatePinned(size_t bytes) = 0;
  // Memory of the host that kernels of `device` can use, at the address that they know it by. Other
  // processes of the host map it as they do memory of a device. It is near the calling thread.
  virtual std::shared_ptr<DeviceMemory> allocateShared(int device, size_t bytes) = 0;
  // A flag for kernels of `device`, initially 0.
  virtual std::shared_ptr<LaunchFlag> allocateLaunchFlag(int device) = 0;

  // Any device address of this process, ours or an application's (cudaMalloc, the pool of a
  // framework, cuMemCreate); `bytes` must be inside one allocation. Throws invalidArgument if not.
  // The memory must stay allocated during the call.
  MemoryHandle exportMemory(const void* address, size_t bytes) {
    retain(address);
    return exportRetained(address, bytes);
  }
  // Prepares the allocations that `run` consists of for exportRun(). They must stay allocated
  // during this call: the driver crashes if one is unmapped while a reference to it is taken.
  void retainRun(const Allocation& run);
  // Exports each of the allocations of a run that was retained, in the order of their addresses.
  // The application may free them at any time. Throws Error if it has.
  std::vector<MemoryHandle> exportRun(const Allocation& run);
  // Maps what `handle` names so that kernels on `device` can use it; in the exporter's own process
  // the same address. Throws Error that says why it cannot be mapped.
  std::shared_ptr<MappedMemory> importMemory(const MemoryHandle& handle, int device) {
    return importRun({&handle, 1}, device);
  }
  // Maps what exportRun() returned at consecutive addresses, as importMemory() does. One handle may
  // also name a part of an allocation.
  virtual std::shared_ptr<MappedMemory> importRun(std::span<const MemoryHandle> handles,
                                                  int device) = 0;

  // Whether exportDmaBuf() is there for memory of `device`.
  virtual bool supportsDmaBuf(int device) = 0;
  // `address` and `bytes`, of device memory of this process, are multiples of a page. Throws Error.
  virtual DmaBuf exportDmaBuf(const void* address, size_t bytes) = 0;
  // Whether libraries of adapters register device memory as they do memory of the host, by address.
  virtual bool hasPeerMemory() = 0;

  // Whether kernels on `device` can use multicast addresses.
  virtual bool supportsMulticast(int device) {
    static_cast<void>(device);
    return false;
  }
  // Makes a multicast address for kernels on `device`: it stands for the `bytes` bytes at each of
  // `members`, memory of all ranks of a node that is mapped for this device and must live longer.
  // Only where supportsMulticast().
  virtual std::shared_ptr<MappedMemory> mapMulticast(int device,
                                                     std::span<std::byte* const> members,
                                                     size_t bytes) {
    static_cast<void>(device), static_cast<void>(members), static_cast<void>(bytes);
    return nullptr;
  }

  virtual PointerInfo inspect(const void* address) = 0;

  // The allocation of device memory that `address` is in, ours or an application's.
  virtual Allocation findAllocation(const void* address) = 0;
  // The allocations that hold a range, where they follow each other without a gap: a buffer in
  // PyTorch's expandable segments spans several of 20 MiB. None if a part of the range is not
  // allocated, or if there are more than kLongestRun: sharing takes a descriptor for each.
  Allocation findRun(const void* address, size_t bytes);
  static constexpr int kLongestRun = 128;
  // Drops the references that retainRun() and exportMemory() keep to memory that was freed since.
  virtual void releaseFreedExports() {}

  // Allocates what readWords() needs, as allocating may wait for kernels that run.
  virtual void prepareToReadWords(int /*device*/) {}
  // Reads words that kernels may be writing, while these run. False if the device does not answer
  // within a moment (it may still be busy with that at the next call), or is not prepared.
  virtual bool readWords(int device, std::span<const uint64_t* const> addresses,
                         std::span<uint64_t> values) = 0;

  virtual void copyAsync(void* destination, const void* source, size_t bytes, Stream stream) = 0;
  // Loads `kernel` onto `device`, so that its first launch need not: loading can wait for kernels
  // that run already, and these may wait for the launch.
  virtual void prepare(const Kernel& kernel, int device) {
    static_cast<void>(kernel);
    static_cast<void>(device);
  }
  virtual void launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
                      Stream stream) = 0;
  // A stream that does not wait for the default stream.
  virtual std::shared_ptr<void> createStream(int device) = 0;
  // The same with the highest priority: copies on it do not wait for work of the user.
  virtual std::shared_ptr<void> createUrgentStream(int device) { return createStream(device); }
  // No other stream has the same number while work of this one is left, not even one that was made
  // after its end.
  virtual uint64_t streamNumber(Stream stream) = 0;
  virtual std::unique_ptr<Event> createEvent(int device) = 0;
  virtual std::unique_ptr<TimedPoint> createTimedPoint(int device) = 0;
  virtual std::unique_ptr<ParallelCopies> createParallelCopies(int device);
  virtual void synchronize(Stream stream) = 0;
  // Whether all work of the stream is done; throws as synchronize() does.
  virtual bool query(Stream stream) = 0;
  virtual CaptureState captureState(Stream stream) = 0;

 protected:
  // Of one allocation, see retainRun() and exportMemory(). Does nothing for what cannot be shared.
  virtual void retain(const void* address) = 0;
  virtual MemoryHandle exportRetained(const void* address, size_t bytes) = 0;

 private:
  // Throws Error if a part of the run was freed.
  template <typename Visit>
  void visitRun(const Allocation& run, Visit visit);
};

// A random number that is this process's for its life; tells "same process" from "same host".
uint64_t processToken();

// Makes `device` current for this thread until it goes.
class DeviceScope {
 public:
  explicit DeviceScope(Runtime& runtime, int device)
      : runtime_(runtime), before_(runtime.makeCurrent(device)) {}
  ~DeviceScope() { runtime_.restoreCurrent(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  Runtime& runtime_;
  void* before_;
};

// The backends. createCudaRuntime is there only with UNISONO_CUDA; it throws Error when no driver
// or no GPU is found.
std::unique_ptr<Runtime> createHostRuntime(const Settings& settings);
std::unique_ptr<Runtime> createCudaRuntime(const Settings& settings);

}  // namespace unisono::runtime
