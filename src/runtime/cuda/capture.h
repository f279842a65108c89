// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "base/error.h"
#include "runtime/cuda/cuda_check.h"

namespace unisono::runtime {

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

}  // namespace unisono::runtime
