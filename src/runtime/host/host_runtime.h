// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/host/executor.h"
#include "runtime/host/graph.h"
#include "runtime/host/memory.h"
#include "runtime/host/stream.h"
#include "runtime/runtime.h"

namespace unisono::runtime::host {

// Simulated devices: memory is memfd, streams are queues, the groups of a launch are tasks of an
// executor. Each device has a default stream (null) that is ordered in itself; unlike CUDA's legacy
// default stream it does not wait for other streams, nor they for it.
class HostRuntime final : public Runtime {
 public:
  explicit HostRuntime(const Settings& settings);
  ~HostRuntime() override;

  // `runtime` as a host runtime; throws invalidUsage if it is another backend.
  static HostRuntime& from(Runtime& runtime);

  Backend backend() const override { return Backend::host; }
  int deviceCount() override { return static_cast<int>(devices_.size()); }
  int currentDevice() override;
  void* makeCurrent(int device) override;
  void restoreCurrent(void* before) override;
  DeviceProperties properties(int device) override;
  bool canAccessPeer(int device, int peer) override;
  bool supportsPeerAtomics(int, int) override { return true; }
  void openPeer(int, int) override {}  // one address space

  std::shared_ptr<DeviceMemory> allocate(int device, size_t bytes) override;
  // As allocate(), in segments where UNISONO_HOST_SEGMENT_BYTES says so.
  std::shared_ptr<DeviceMemory> allocateForUser(int device, size_t bytes);
  std::shared_ptr<PinnedMemory> allocatePinned(size_t bytes) override;
  std::shared_ptr<DeviceMemory> allocateShared(int device, size_t bytes) override;
  std::shared_ptr<LaunchFlag> allocateLaunchFlag(int device) override;
  std::shared_ptr<MappedMemory> importRun(std::span<const MemoryHandle> handles,
                                          int device) override;
  bool supportsDmaBuf(int) override { return true; }
  DmaBuf exportDmaBuf(const void* address, size_t bytes) override {
    return memory_->exportDmaBuf(address, bytes);
  }
  bool hasPeerMemory() override { return true; }
  bool supportsMulticast(int) override { return true; }
  std::shared_ptr<MappedMemory> mapMulticast(int device, std::span<std::byte* const> members,
                                             size_t bytes) override;
  PointerInfo inspect(const void* address) override { return memory_->inspect(address); }
  Allocation findAllocation(const void* address) override {
    return memory_->findAllocation(address);
  }

  bool readWords(int device, std::span<const uint64_t* const> addresses,
                 std::span<uint64_t> values) override;
  void copyAsync(void* destination, const void* source, size_t bytes, Stream stream) override;
  void launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
              Stream stream) override;
  std::shared_ptr<void> createStream(int device) override;
  // A stream lives until its work is done.
  uint64_t streamNumber(Stream stream) override { return reinterpret_cast<uint64_t>(stream); }
  std::unique_ptr<Event> createEvent(int device) override;
  std::unique_ptr<TimedPoint> createTimedPoint(int device) override;
  // Throws what a task of the stream threw, once; see HostStream.
  void synchronize(Stream stream) override;
  bool query(Stream stream) override;
  CaptureState captureState(Stream stream) override;

  // Throws Error(invalidUsage) in a child of the process that made this.
  void checkProcess() const;

  // What only simulated devices have.
  // Waits for all work of a device.
  void synchronizeDevice(int device);
  void fillAsync(void* destination, std::byte value, size_t bytes, Stream stream);
  // Graphs of the work of one stream.
  void beginCapture(Stream stream);
  std::shared_ptr<HostGraph> endCapture(Stream stream);
  void launchGraph(const HostGraph& graph, Stream stream);
  // The device that a stream belongs to.
  int deviceOf(Stream stream);

  // The schedule from here on (see Executor). Throws invalidUsage while work is not synchronized.
  void setScheduleSeed(int64_t seed) {
    Schedule schedule = executor_->schedule();
    schedule.seed = seed;
    executor_->setSchedule(schedule);
  }
  void setSchedule(const Schedule& schedule) { executor_->setSchedule(schedule); }
  ScheduleCounts scheduleCounts() const { return executor_->scheduleCounts(); }
  std::string lastSteps() const { return executor_->lastSteps(); }
  void nameMemory(const void* address, size_t bytes, std::string name) {
    executor_->nameMemory(address, bytes, std::move(name));
  }
  uint64_t scheduleHash() const { return executor_->scheduleHash(); }
  // For tests in which one thread enqueues everything and then synchronizes: work that can never
  // move ends, and synchronize() throws Error(internalError) that tells who waits for whom.
  void setDeadlockIsError(bool value) { executor_->setDeadlockIsError(value); }
  // The latest virtual clock of the launches that have ended on a device.
  uint64_t virtualNanoseconds(int device);

 protected:
  void retain(const void* address) override;
  MemoryHandle exportRetained(const void* address, size_t bytes) override;

 private:
  friend class HostEvent;
  friend class HostTimedPoint;
  struct Device {
    DeviceProperties properties;
    std::atomic<uint64_t> virtualClock{0};
    std::shared_ptr<HostStream> defaultStream;
  };

  // Memory of one device of the broken link that the other one has mapped.
  struct BrokenRange {
    uintptr_t begin, end;
    int device;  // that has mapped it
  };

  Device& deviceAt(int device);
  bool passesBrokenLink(const void* address, size_t bytes, int device);
  std::shared_ptr<HostStream> streamOf(Stream stream);
  void enqueue(Operation operation, Stream stream);
  void enqueueOrCapture(HostGraph::MakeOperation make, Stream stream);
  std::shared_ptr<HostGraph> captureOf(Stream stream);  // null if it is not being captured
  void refuseCapture(Stream stream);

  const int forks_;  // of the process that made this
  const size_t segmentBytes_;
  // Destroyed last to first: the executor waits for its tasks, which use the rest.
  std::vector<std::unique_ptr<Device>> devices_;
  std::shared_ptr<MemoryManager> memory_ = std::make_shared<MemoryManager>();
  std::pair<int, int> brokenLink_{-1, -1};  // devices; -1: none
  std::mutex brokenMutex_;
  std::vector<BrokenRange> broken_;
  std::mutex streamsMutex_;
  std::map<void*, std::weak_ptr<HostStream>> streams_;
  size_t sweepAt_ = 64;  // when streams_ has so many, those that have ended are dropped
  std::map<HostStream*, std::shared_ptr<HostGraph>> captures_;  // of streams that are captured
  std::unique_ptr<Executor> executor_;
};

}  // namespace unisono::runtime::host
