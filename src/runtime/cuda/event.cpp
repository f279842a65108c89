// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/event.h"

#include <cuda_runtime_api.h>

#include <algorithm>
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
  void makeGraphWait(Stream stream) override;
  void recordInGraph(Stream stream) override;

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;

  // Of the last capture seen.
  unsigned long long captureId_ = 0;
  cudaStream_t captured_ = nullptr;        // the stream of the last recordInGraph
  std::vector<cudaGraphNode_t> recorded_;  // the nodes that precede the point
  cudaGraphNode_t recordNode_ = nullptr;
};

void CudaEvent::makeGraphWait(Stream stream) {
  auto* captured = static_cast<cudaStream_t>(stream);
  const Capture capture(captured);
  if (capture.id != captureId_) {
    check(cudaStreamWaitEvent(captured, event_, cudaEventWaitExternal), "cudaStreamWaitEvent");
    captureId_ = capture.id;
    captured_ = captured;
    recorded_.clear();
    recordNode_ = nullptr;
  } else if (captured != captured_ && !recorded_.empty()) {
    check(cudaStreamUpdateCaptureDependencies(captured, recorded_.data(), nullptr, recorded_.size(),
                                              cudaStreamAddCaptureDependencies),
          "cudaStreamUpdateCaptureDependencies");
  }
}

// One node for a capture, which moves on with the work. It is a leaf, so that work that follows
// does not wait for it.
void CudaEvent::recordInGraph(Stream stream) {
  captured_ = static_cast<cudaStream_t>(stream);
  Capture capture(captured_);
  if (recordNode_ == nullptr) {
    check(cudaGraphAddEventRecordNode(&recordNode_, capture.graph, capture.tail.data(),
                                      capture.tail.size(), event_),
          "cudaGraphAddEventRecordNode");
  } else {
    const std::vector<cudaGraphNode_t> to(std::max(recorded_.size(), capture.tail.size()),
                                          recordNode_);
    check(cudaGraphRemoveDependencies(capture.graph, recorded_.data(), to.data(), nullptr,
                                      recorded_.size()),
          "cudaGraphRemoveDependencies");
    check(cudaGraphAddDependencies(capture.graph, capture.tail.data(), to.data(), nullptr,
                                   capture.tail.size()),
          "cudaGraphAddDependencies");
  }
  recorded_ = std::move(capture.tail);
}

}  // namespace

std::unique_ptr<Event> createCudaEvent(int device) {
  DeviceCallScope scope(device);
  return std::make_unique<CudaEvent>(device);
}

}  // namespace unisono::runtime
