// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace unisono::test {

// What `body` captures from `origin`, as a graph to launch; destroyed with the object. Throws
// std::runtime_error.
class CudaGraph {
 public:
  CudaGraph(cudaStream_t origin, const std::function<void()>& body,
            cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    check(cudaStreamBeginCapture(origin, mode), "cudaStreamBeginCapture");
    body();
    check(cudaStreamEndCapture(origin, &graph_), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~CudaGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch(cudaStream_t stream) const {
    check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }
  // Says whether the dependencies leave one order for all kernels of the graph.
  bool ordersKernels() const {
    std::vector<cudaGraphNode_t> nodes(this->nodes());
    size_t count = nodes.size();
    check(cudaGraphGetNodes(graph_, nodes.data(), &count), "cudaGraphGetNodes");
    std::set<cudaGraphNode_t> kernels;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      if (type == cudaGraphNodeTypeKernel) kernels.insert(node);
    }
    // Kernel i of a chain of n precedes n - 1 - i others.
    std::set<size_t> followers;
    for (cudaGraphNode_t kernel : kernels) {
      std::set<cudaGraphNode_t> reached;
      std::vector<cudaGraphNode_t> open{kernel};
      while (!open.empty()) {
        const cudaGraphNode_t node = open.back();
        open.pop_back();
        size_t edges = 0;
        check(cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &edges),
              "cudaGraphNodeGetDependentNodes");
        std::vector<cudaGraphNode_t> next(edges);
        std::vector<cudaGraphEdgeData> data(edges);
        check(cudaGraphNodeGetDependentNodes(node, next.data(), data.data(), &edges),
              "cudaGraphNodeGetDependentNodes");
        for (cudaGraphNode_t follower : next) {
          if (reached.insert(follower).second) open.push_back(follower);
        }
      }
      size_t after = 0;
      for (cudaGraphNode_t node : reached) after += kernels.count(node);
      followers.insert(after);
    }
    return followers.size() == kernels.size();
  }
  size_t nodes() const {
    size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }

 private:
  static void check(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
  }

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Makes what follows on `stream` part of the capture of `captured`, after the work that it has.
inline void joinCapture(cudaStream_t stream, cudaStream_t captured) {
  cudaEvent_t event = nullptr;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess ||
      cudaEventRecord(event, captured) != cudaSuccess ||
      cudaStreamWaitEvent(stream, event, 0) != cudaSuccess) {
    throw std::runtime_error("a stream could not join a capture");
  }
  cudaEventDestroy(event);
}

}  // namespace unisono::test
