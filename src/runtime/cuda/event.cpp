// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/event.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/cuda/capture.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"

namespace unisono::runtime {
namespace {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(int device) : device_(device) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags",
          device);
  }
  ~CudaEvent() override {
    releaseOn(device_, [this] { quietly(cudaEventDestroy(event_)); });
  }

  void record(Stream stream) override {
    check(driver().eventRecord(event_, static_cast<cudaStream_t>(stream)), "cuEventRecord");
  }
  void makeWait(Stream stream) override {
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0), "cudaStreamWaitEvent");
  }
  bool isReached() override {
    const CaptureRelaxedScope relaxed;
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
    return status == cudaSuccess;
  }
  void makeGraphWait(Stream stream) override;
  void recordInGraph(Stream stream) override;

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;

  // The point as it moves through one capture.
  struct PointInCapture {
    unsigned long long id;                  // of the capture, unique in the process
    cudaStream_t stream;                    // the stream of the last recordInGraph
    std::vector<cudaGraphNode_t> recorded;  // the nodes that precede the point
    cudaGraphNode_t recordNode = nullptr;
  };
  // Returns the point of a capture, or null if this event has not been used in it.
  PointInCapture* find(unsigned long long id);

  // Several captures may be open at once. Nothing tells when one ends, so the oldest are dropped.
  static constexpr size_t kMaxCaptures = 256;
  std::deque<PointInCapture> captures_;
};

CudaEvent::PointInCapture* CudaEvent::find(unsigned long long id) {
  const auto point =
      std::find_if(captures_.rbegin(), captures_.rend(),
                   [id](const PointInCapture& candidate) { return candidate.id == id; });
  return point == captures_.rend() ? nullptr : &*point;
}

void CudaEvent::makeGraphWait(Stream stream) {
  auto* captured = static_cast<cudaStream_t>(stream);
  const Capture capture(captured);
  const PointInCapture* point = find(capture.id);
  if (point == nullptr) {
    check(cudaStreamWaitEvent(captured, event_, cudaEventWaitExternal), "cudaStreamWaitEvent");
    if (captures_.size() == kMaxCaptures) captures_.pop_front();
    captures_.push_back({capture.id, captured, {}});
  } else if (captured != point->stream && !point->recorded.empty()) {
    auto* nodes = const_cast<cudaGraphNode_t*>(point->recorded.data());
    check(cudaStreamUpdateCaptureDependencies(captured, nodes, nullptr, point->recorded.size(),
                                              cudaStreamAddCaptureDependencies),
          "cudaStreamUpdateCaptureDependencies");
  }
}

// One node for a capture, which moves on with the work. It is a leaf, so that work that follows
// does not wait for it.
void CudaEvent::recordInGraph(Stream stream) {
  auto* captured = static_cast<cudaStream_t>(stream);
  Capture capture(captured);
  PointInCapture* point = find(capture.id);
  if (point == nullptr) throw internalError("A capture was recorded in before it was waited for");
  point->stream = captured;
  if (point->recordNode == nullptr) {
    check(cudaGraphAddEventRecordNode(&point->recordNode, capture.graph, capture.tail.data(),
                                      capture.tail.size(), event_),
          "cudaGraphAddEventRecordNode");
  } else {
    const std::vector<cudaGraphNode_t> to(std::max(point->recorded.size(), capture.tail.size()),
                                          point->recordNode);
    check(cudaGraphRemoveDependencies(capture.graph, point->recorded.data(), to.data(), nullptr,
                                      point->recorded.size()),
          "cudaGraphRemoveDependencies");
    check(cudaGraphAddDependencies(capture.graph, capture.tail.data(), to.data(), nullptr,
                                   capture.tail.size()),
          "cudaGraphAddDependencies");
  }
  point->recorded = std::move(capture.tail);
}

// Turns the times of CUDA events into those of the steady clock. CUDA tells only the time between
// two events, as a float, so that one event whose time is known is recorded again every second.
class EventClock {
 public:
  // Of a device of this process.
  static EventClock& of(int device) {
    static auto* mutex = new std::mutex;
    static auto* clocks = new std::map<int, EventClock>;
    const std::lock_guard lock(*mutex);
    return clocks->try_emplace(device, device).first->second;
  }
  explicit EventClock(int device) : device_(device) {}

  // When `event`, which its stream has come to, was reached.
  int64_t timeOf(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    if (known_ == nullptr || now() - knownTime_ > kSecond) renew();
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, known_, event), "cudaEventElapsedTime", device_);
    return knownTime_ + static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

 private:
  static constexpr int64_t kSecond = 1'000'000'000;
  // The event is reached between two looks at the clock. When the GPU is busy, that takes longer.
  static constexpr int64_t kExact = 50'000;
  static constexpr int kAttempts = 5;

  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  void renew() {
    if (known_ == nullptr) {
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
            device_);
      check(cudaEventCreate(&known_), "cudaEventCreate", device_);
    }
    for (int i = 0; i < kAttempts; i++) {
      const int64_t before = now();
      check(cudaEventRecord(known_, stream_), "cudaEventRecord", device_);
      check(cudaEventSynchronize(known_), "cudaEventSynchronize", device_);
      const int64_t after = now();
      knownTime_ = before + (after - before) / 2;
      if (after - before < kExact) return;
    }
  }

  const int device_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t known_ = nullptr;
  int64_t knownTime_ = 0;
};

class CudaTimedPoint final : public TimedPoint {
 public:
  explicit CudaTimedPoint(int device) : device_(device) {
    check(cudaEventCreate(&event_), "cudaEventCreate", device);
  }
  ~CudaTimedPoint() override {
    releaseOn(device_, [this] { quietly(cudaEventDestroy(event_)); });
  }
  void record(Stream stream) override {
    check(driver().eventRecord(event_, static_cast<cudaStream_t>(stream)), "cuEventRecord");
  }
  std::optional<int64_t> reachedAt() override {
    const DeviceCallScope scope(device_);
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      quietly(status);
      return std::nullopt;
    }
    check(status, "cudaEventQuery", device_);
    return EventClock::of(device_).timeOf(event_);
  }

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace

std::unique_ptr<TimedPoint> createCudaTimedPoint(int device) {
  DeviceCallScope scope(device);
  return std::make_unique<CudaTimedPoint>(device);
}

std::unique_ptr<Event> createCudaEvent(int device) {
  DeviceCallScope scope(device);
  return std::make_unique<CudaEvent>(device);
}

cudaStream_t createUrgentStream(int device) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange",
        device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
        "cudaStreamCreateWithPriority", device);
  return stream;
}

}  // namespace unisono::runtime
