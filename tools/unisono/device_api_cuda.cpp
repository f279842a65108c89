// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"
#include "device_api.h"

#ifdef UNISONO_CUDA
#include <cuda_runtime.h>
#endif

namespace unisono::bench {

#ifdef UNISONO_CUDA
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::unhandledCudaError,
              fmt::format("{} failed: {}", call, cudaGetErrorString(error)));
}

class CudaGraph : public DeviceApi::Graph {
 public:
  explicit CudaGraph(cudaGraph_t graph) : graph_(graph) {}
  ~CudaGraph() override {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  void prepare() override {
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  void launch(cudaStream_t stream) override {
    check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_;
  cudaGraphExec_t executable_ = nullptr;
};

class CudaStopwatch : public DeviceApi::Stopwatch {
 public:
  CudaStopwatch() {
    check(cudaEventCreate(&start_), "cudaEventCreate");
    cudaError_t error = cudaEventCreate(&stop_);
    if (error != cudaSuccess) {
      cudaEventDestroy(start_);
      check(error, "cudaEventCreate");
    }
  }
  ~CudaStopwatch() override {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  CudaStopwatch(const CudaStopwatch&) = delete;
  CudaStopwatch& operator=(const CudaStopwatch&) = delete;
  void start(cudaStream_t stream) override {
    check(cudaEventRecord(start_, stream), "cudaEventRecord");
  }
  void stop(cudaStream_t stream) override {
    check(cudaEventRecord(stop_, stream), "cudaEventRecord");
  }
  double seconds() override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start_, stop_), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

class CudaDeviceApi : public DeviceApi {
 public:
  int deviceCount() override {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  }
  void setDevice(int device) override { check(cudaSetDevice(device), "cudaSetDevice"); }
  std::string deviceName(int device) override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return fmt::format("{} {:04x}:{:02x}:{:02x}.0", properties.name, properties.pciDomainID,
                       properties.pciBusID, properties.pciDeviceID);
  }
  void* allocate(size_t bytes) override {
    void* address = nullptr;
    check(cudaMalloc(&address, bytes), "cudaMalloc");
    return address;
  }
  void free(void* address) override { check(cudaFree(address), "cudaFree"); }
  void copyToDevice(void* destination, const void* source, size_t bytes) override {
    check(cudaMemcpy(destination, source, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    // From pageable memory the call may return before the copy is complete, and our streams do not
    // wait for the default stream.
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  void copyToHost(void* destination, const void* source, size_t bytes) override {
    check(cudaMemcpy(destination, source, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  cudaStream_t createStream() override {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  void destroyStream(cudaStream_t stream) override {
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
  bool streamDone(cudaStream_t stream) override {
    cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady) return false;
    check(error, "cudaStreamQuery");
    return true;
  }
  std::unique_ptr<Stopwatch> createStopwatch() override {
    return std::make_unique<CudaStopwatch>();
  }
  bool hasGraphs() const override { return true; }
  void beginCapture(cudaStream_t stream) override {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
  }
  std::unique_ptr<Graph> endCapture(cudaStream_t stream) override {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    return std::make_unique<CudaGraph>(graph);
  }
};

}  // namespace

std::unique_ptr<DeviceApi> createCudaDeviceApi() {
  return std::make_unique<CudaDeviceApi>();
}

#else

std::unique_ptr<DeviceApi> createCudaDeviceApi() {
  throw invalidUsage("this program was built without CUDA")
      .remedy("Use --backend host, or build with scripts/build cuda");
}

#endif

}  // namespace unisono::bench
