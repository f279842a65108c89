// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <stdexcept>
#include <string>

namespace unisono::test {

// What `body` captures from `origin`, as a graph to launch; destroyed with the object. Throws
// std::runtime_error.
class CudaGraph {
 public:
  CudaGraph(cudaStream_t origin, const std::function<void()>& body) {
    check(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
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

}  // namespace unisono::test
