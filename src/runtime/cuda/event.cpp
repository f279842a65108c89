// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/event.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"

namespace unisono::runtime {
namespace {

// The capture that a stream is in, and the nodes that its next work will depend on.
struct Capture {
  explicit Capture(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t* nodes = nullptr;
    const cudaGraphEdgeData* edges = nullptr;
    size_t count = 0;
    check(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &edges, &count),
          "cudaStreamGetCaptureInfo");
    if (status != cudaStreamCaptureStatusActive) {
      throw invalidUsage("A stream whose work was to go into a graph is not being captured");
    }
    tail.assign(nodes, nodes + count);
  }

  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  std::vector<cudaGraphNode_t> tail;
};

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
    check(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
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

}  // namespace

std::unique_ptr<Event> createCudaEvent(int device) {
  DeviceCallScope scope(device);
  return std::make_unique<CudaEvent>(device);
}

}  // namespace unisono::runtime
