// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/host_runtime.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "runtime/host/devices.h"
#include "runtime/host/multicast.h"

namespace unisono::runtime::host {
namespace {

thread_local int currentDeviceOfThread = 0;

class HostPinned final : public PinnedMemory {
 public:
  explicit HostPinned(size_t bytes)
      : PinnedMemory(nullptr, nullptr), storage_(std::max(bytes, size_t{1})) {
    hostAddress_ = deviceAddress_ = storage_.data();
  }

 private:
  AlignedStorage storage_;
};

class HostLaunchFlag final : public LaunchFlag {
 public:
  HostLaunchFlag() : LaunchFlag(nullptr) { address_ = &flag_; }
  void raise() override { std::atomic_ref(flag_).store(1, std::memory_order_release); }

 private:
  alignas(64) uint32_t flag_ = 0;
};

}  // namespace

// Waiting for an event that was never recorded is nothing.
class HostEvent final : public Event {
 public:
  explicit HostEvent(HostRuntime& runtime) : runtime_(runtime) {}

  void record(Stream stream) override {
    auto point = std::make_shared<EventPoint>();
    runtime_.enqueue(RecordOperation{point}, stream);
    last_->set(std::move(point));
  }
  void makeWait(Stream stream) override {
    if (auto point = last_->get()) runtime_.enqueue(WaitOperation{std::move(point)}, stream);
  }
  bool isReached() override {
    const auto point = last_->get();
    return point == nullptr || point->isReached.load(std::memory_order_acquire);
  }
  void makeGraphWait(Stream stream) override { runtime_.captureOf(stream)->addWait(last_); }
  void recordInGraph(Stream stream) override { runtime_.captureOf(stream)->addRecord(last_); }

 private:
  HostRuntime& runtime_;
  const std::shared_ptr<LastPoint> last_ = std::make_shared<LastPoint>();
};

class HostTimedPoint final : public TimedPoint {
 public:
  explicit HostTimedPoint(HostRuntime& runtime) : runtime_(runtime) {}

  void record(Stream stream) override {
    point_ = std::make_shared<EventPoint>();
    runtime_.enqueue(RecordOperation{point_}, stream);
  }
  std::optional<int64_t> reachedAt() override {
    if (point_ == nullptr || !point_->isReached.load(std::memory_order_acquire))
      return std::nullopt;
    return point_->time.load(std::memory_order_relaxed);
  }

 private:
  HostRuntime& runtime_;
  std::shared_ptr<EventPoint> point_;
};

HostRuntime::HostRuntime(const Settings& settings)
    : forks_(forkCount()),
      segmentBytes_(static_cast<size_t>(settings.hostSegmentBytes)),
      executor_(createExecutor(settings)) {
  const std::string& broken = settings.hostBrokenLink;
  int end = -1;
  if (!broken.empty() &&
      (std::sscanf(broken.c_str(), "%d-%d%n", &brokenLink_.first, &brokenLink_.second, &end) != 2 ||
       end != static_cast<int>(broken.size()))) {
    throw invalidArgument("UNISONO_HOST_BROKEN_LINK is {}", broken)
        .remedy("Name two simulated devices, such as 0-1");
  }
  for (DeviceProperties& properties : simulatedDevices(settings)) {
    auto device = std::make_unique<Device>();
    device->properties = std::move(properties);
    device->defaultStream = std::make_shared<HostStream>(
        *executor_, static_cast<int>(devices_.size()), device->virtualClock);
    devices_.push_back(std::move(device));
  }
}

HostRuntime::~HostRuntime() {
  executor_.reset();
}

HostRuntime& HostRuntime::from(Runtime& runtime) {
  auto* host = dynamic_cast<HostRuntime*>(&runtime);
  if (host == nullptr) {
    throw invalidUsage("This process uses the CUDA backend, which has no simulated devices")
        .remedy("Set UNISONO_BACKEND=host");
  }
  return *host;
}

HostRuntime::Device& HostRuntime::deviceAt(int device) {
  if (device < 0 || device >= deviceCount()) {
    throw invalidArgument("Device {} does not exist: there are {} simulated devices", device,
                          deviceCount());
  }
  return *devices_[static_cast<size_t>(device)];
}

int HostRuntime::currentDevice() {
  // Another runtime of this process, with more devices, may have set it.
  return std::min(currentDeviceOfThread, deviceCount() - 1);
}

void* HostRuntime::makeCurrent(int device) {
  deviceAt(device);
  const intptr_t before = std::exchange(currentDeviceOfThread, device);
  return reinterpret_cast<void*>(before);
}

void HostRuntime::restoreCurrent(void* before) {
  currentDeviceOfThread = static_cast<int>(reinterpret_cast<intptr_t>(before));
}

DeviceProperties HostRuntime::properties(int device) {
  return deviceAt(device).properties;
}

bool HostRuntime::canAccessPeer(int device, int peer) {
  deviceAt(device);
  deviceAt(peer);
  return true;
}

std::shared_ptr<DeviceMemory> HostRuntime::allocate(int device, size_t bytes) {
  checkProcess();
  deviceAt(device);
  return memory_->allocate(device, bytes);
}

std::shared_ptr<DeviceMemory> HostRuntime::allocateForUser(int device, size_t bytes) {
  checkProcess();
  deviceAt(device);
  if (segmentBytes_ == 0) return memory_->allocate(device, bytes);
  return memory_->allocateSegmented(device, bytes, segmentBytes_);
}

std::shared_ptr<PinnedMemory> HostRuntime::allocatePinned(size_t bytes) {
  return std::make_shared<HostPinned>(bytes);
}

std::shared_ptr<DeviceMemory> HostRuntime::allocateShared(int device, size_t bytes) {
  checkProcess();
  deviceAt(device);
  return memory_->allocateShared(device, bytes);
}

std::shared_ptr<LaunchFlag> HostRuntime::allocateLaunchFlag(int device) {
  deviceAt(device);
  return std::make_shared<HostLaunchFlag>();
}

void HostRuntime::retain(const void* address) {
  checkProcess();
  memory_->retain(address);
}

MemoryHandle HostRuntime::exportRetained(const void* address, size_t bytes) {
  checkProcess();
  return memory_->exportRetained(address, bytes);
}

std::shared_ptr<MappedMemory> HostRuntime::importRun(std::span<const MemoryHandle> handles,
                                                     int device) {
  checkProcess();
  deviceAt(device);
  checkRun(handles);
  const MemoryHandle &handle = handles.front(), &last = handles.back();
  if (handle.process != processToken() &&
      executor_->schedule().memory != Schedule::Memory::machine) {
    throw invalidUsage(
        "A rank of another process cannot be reached: UNISONO_HOST_EXECUTOR=weak keeps account of "
        "memory within one process")
        .remedy("Run all ranks as threads of one process, or unset UNISONO_HOST_EXECUTOR");
  }
  auto mapped = memory_->importRun(handles);
  if (std::pair(device, handle.device) == brokenLink_ ||
      std::pair(handle.device, device) == brokenLink_) {
    const auto begin = reinterpret_cast<uintptr_t>(mapped->address());
    const std::lock_guard lock(brokenMutex_);
    broken_.push_back({begin, begin + (last.address + last.bytes - handle.address), device});
  }
  return mapped;
}

bool HostRuntime::passesBrokenLink(const void* address, size_t bytes, int device) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(brokenMutex_);
  return std::any_of(broken_.begin(), broken_.end(), [&](const BrokenRange& range) {
    return range.device == device && range.begin < begin + bytes && begin < range.end;
  });
}

std::shared_ptr<MappedMemory> HostRuntime::mapMulticast(int device,
                                                        std::span<std::byte* const> members,
                                                        size_t bytes) {
  checkProcess();
  deviceAt(device);
  return host::mapMulticast(members, bytes);
}

std::shared_ptr<HostStream> HostRuntime::streamOf(Stream stream) {
  if (stream == nullptr) return deviceAt(currentDevice()).defaultStream;
  std::lock_guard lock(streamsMutex_);
  auto entry = streams_.find(stream);
  std::shared_ptr<HostStream> found = entry != streams_.end() ? entry->second.lock() : nullptr;
  if (found == nullptr) {
    throw invalidArgument("{} is not a stream of a simulated device", stream)
        .remedy("Make streams with unisonoHostStreamCreate, and keep them while they are used");
  }
  return found;
}

int HostRuntime::deviceOf(Stream stream) {
  return streamOf(stream)->device();
}

void HostRuntime::checkProcess() const {
  if (forks_ == forkCount()) return;
  throw invalidUsage("This process was forked after its parent used the simulated devices")
      .remedy("Fork first, or start processes by exec (Python: the start method spawn)");
}

void HostRuntime::enqueue(Operation operation, Stream stream) {
  checkProcess();
  if (captureOf(stream) != nullptr) {
    throw invalidUsage("A stream that is being captured records or waits for an event")
        .remedy("Capture calls of one stream: the simulated devices have no graphs of several");
  }
  streamOf(stream)->enqueue(std::move(operation));
}

// Of each launch of the graph, if the stream is being captured.
void HostRuntime::enqueueOrCapture(HostGraph::MakeOperation make, Stream stream) {
  checkProcess();
  if (const auto capture = captureOf(stream)) return capture->add(std::move(make));
  streamOf(stream)->enqueue(make());
}

std::shared_ptr<HostGraph> HostRuntime::captureOf(Stream stream) {
  const auto found = streamOf(stream);
  const std::lock_guard lock(streamsMutex_);
  const auto entry = captures_.find(found.get());
  return entry == captures_.end() ? nullptr : entry->second;
}

void HostRuntime::beginCapture(Stream stream) {
  checkProcess();
  if (stream == nullptr) throw invalidUsage("The default stream cannot be captured");
  const auto found = streamOf(stream);
  const std::lock_guard lock(streamsMutex_);
  if (!captures_.try_emplace(found.get(), std::make_shared<HostGraph>()).second) {
    throw invalidUsage("The stream is being captured already");
  }
}

std::shared_ptr<HostGraph> HostRuntime::endCapture(Stream stream) {
  const auto found = streamOf(stream);
  const std::lock_guard lock(streamsMutex_);
  auto capture = captures_.extract(found.get());
  if (capture.empty()) throw invalidUsage("The stream is not being captured");
  return std::move(capture.mapped());
}

void HostRuntime::launchGraph(const HostGraph& graph, Stream stream) {
  checkProcess();
  refuseCapture(stream);
  const auto found = streamOf(stream);
  graph.launch([&](Operation operation) { found->enqueue(std::move(operation)); });
}

void HostRuntime::refuseCapture(Stream stream) {
  if (captureOf(stream) == nullptr) return;
  throw invalidUsage("The stream is being captured").remedy("End its capture first");
}

void HostRuntime::copyAsync(void* destination, const void* source, size_t bytes, Stream stream) {
  if (bytes > 0 && (destination == nullptr || source == nullptr)) {
    throw invalidArgument("A copy of {} bytes has a null address", bytes);
  }
  bool isBroken = false;
  if (brokenLink_.first >= 0 && bytes > 0) {
    const int device = streamOf(stream)->device();
    isBroken =
        passesBrokenLink(destination, bytes, device) || passesBrokenLink(source, bytes, device);
  }
  const CopyOperation copy{destination, source, bytes, isBroken};
  enqueueOrCapture([copy]() -> Operation { return copy; }, stream);
}

void HostRuntime::fillAsync(void* destination, std::byte value, size_t bytes, Stream stream) {
  if (bytes > 0 && destination == nullptr) {
    throw invalidArgument("{} bytes at a null address cannot be set", bytes);
  }
  const FillOperation fill{destination, value, bytes};
  enqueueOrCapture([fill]() -> Operation { return fill; }, stream);
}

void HostRuntime::launch(const Kernel& kernel, const LaunchShape& shape, const void* arguments,
                         Stream stream) {
  const int roles = executor_->rolesPerGroup();
  if (const auto capture = captureOf(stream)) {
    checkProcess();
    const auto* bytes = static_cast<const std::byte*>(arguments);
    const std::vector<std::byte> kept(bytes, bytes + (bytes == nullptr ? 0 : shape.argumentBytes));
    return capture->add([=]() -> Operation {
      return std::make_unique<Launch>(kernel, shape, kept.empty() ? nullptr : kept.data(), roles);
    });
  }
  enqueue(std::make_unique<Launch>(kernel, shape, arguments, roles), stream);
}

std::shared_ptr<void> HostRuntime::createStream(int device) {
  checkProcess();
  auto stream = std::make_shared<HostStream>(*executor_, device, deviceAt(device).virtualClock);
  std::lock_guard lock(streamsMutex_);
  if (streams_.size() >= sweepAt_) {
    std::erase_if(streams_, [](const auto& entry) { return entry.second.expired(); });
    sweepAt_ = 2 * streams_.size() + 64;
  }
  captures_.erase(stream.get());  // of a stream that ended before its capture
  streams_[stream.get()] = stream;
  return stream;
}

std::unique_ptr<Event> HostRuntime::createEvent(int device) {
  deviceAt(device);
  return std::make_unique<HostEvent>(*this);
}

std::unique_ptr<TimedPoint> HostRuntime::createTimedPoint(int device) {
  deviceAt(device);
  return std::make_unique<HostTimedPoint>(*this);
}

void HostRuntime::synchronize(Stream stream) {
  checkProcess();
  refuseCapture(stream);
  streamOf(stream)->synchronize();
}

bool HostRuntime::query(Stream stream) {
  checkProcess();
  refuseCapture(stream);
  return streamOf(stream)->query();
}

void HostRuntime::synchronizeDevice(int device) {
  checkProcess();
  std::vector<std::shared_ptr<HostStream>> streams{deviceAt(device).defaultStream};
  {
    std::lock_guard lock(streamsMutex_);
    for (const auto& [address, weak] : streams_) {
      std::shared_ptr<HostStream> stream = weak.lock();
      if (stream != nullptr && stream->device() == device) streams.push_back(std::move(stream));
    }
  }
  std::exception_ptr first;
  for (const auto& stream : streams) {
    try {
      stream->synchronize();
    } catch (const Error&) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

namespace {

// As a copy of a GPU does: kernels may be storing the word, also with plain stores, and what is
// read is for reports only.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"), noinline))
#endif
uint64_t
copyWord(const volatile uint64_t* word) {
  return *word;
}

}  // namespace

bool HostRuntime::readWords(int, std::span<const uint64_t* const> addresses,
                            std::span<uint64_t> values) {
  for (size_t i = 0; i < addresses.size(); i++) values[i] = copyWord(addresses[i]);
  return true;
}

CaptureState HostRuntime::captureState(Stream stream) {
  return captureOf(stream) == nullptr ? CaptureState::none : CaptureState::active;
}

uint64_t HostRuntime::virtualNanoseconds(int device) {
  return deviceAt(device).virtualClock.load(std::memory_order_relaxed);
}

}  // namespace unisono::runtime::host

namespace unisono::runtime {

std::unique_ptr<Runtime> createHostRuntime(const Settings& settings) {
  return std::make_unique<host::HostRuntime>(settings);
}

}  // namespace unisono::runtime
