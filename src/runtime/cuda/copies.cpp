// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/copies.h"

#include <vector>

#include "runtime/cuda/capture.h"
#include "runtime/cuda/cuda_check.h"

namespace unisono::runtime {
namespace {

// The last copy has a stream of its own: it is the one inside the device, which would take as long
// as a quarter of a copy to a peer. Copies to peers share the links, so that one after another they
// are as fast as together. A batch (cudaMemcpyBatchAsync) runs them all one after another.
class CudaParallelCopies final : public ParallelCopies {
 public:
  CudaParallelCopies(Runtime& runtime, int device)
      : ParallelCopies(runtime),
        second_(runtime.createStream(device)),
        fork_(runtime.createEvent(device)),
        join_(runtime.createEvent(device)) {}

  void enqueue(std::span<const Range> copies, Stream stream) override {
    if (runtime_.captureState(stream) != CaptureState::none) return capture(copies, stream);
    if (copies.size() < 2) return ParallelCopies::enqueue(copies, stream);
    fork_->record(stream);
    fork_->makeWait(second_.get());
    ParallelCopies::enqueue(copies.last(1), second_.get());
    join_->record(second_.get());
    ParallelCopies::enqueue(copies.first(copies.size() - 1), stream);
    join_->makeWait(stream);
  }

 private:
  // The nodes depend on the work captured so far, and not on each other.
  static void capture(std::span<const Range> copies, Stream stream) {
    if (copies.empty()) return;
    auto* captured = static_cast<cudaStream_t>(stream);
    const Capture before(captured);
    std::vector<cudaGraphNode_t> nodes;
    for (const Range& copy : copies) {
      check(cudaGraphAddMemcpyNode1D(&nodes.emplace_back(), before.graph, before.tail.data(),
                                     before.tail.size(), copy.to, copy.from, copy.bytes,
                                     cudaMemcpyDefault),
            "cudaGraphAddMemcpyNode1D");
    }
    check(cudaStreamUpdateCaptureDependencies(captured, nodes.data(), nullptr, nodes.size(),
                                              cudaStreamSetCaptureDependencies),
          "cudaStreamUpdateCaptureDependencies");
  }

  const std::shared_ptr<void> second_;
  const std::unique_ptr<Event> fork_, join_;
};

}  // namespace

std::unique_ptr<ParallelCopies> createCudaParallelCopies(Runtime& runtime, int device) {
  return std::make_unique<CudaParallelCopies>(runtime, device);
}

}  // namespace unisono::runtime
