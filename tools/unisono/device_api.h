// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "library_table.h"

// The device operations of the bench, implemented for each backend. Calls act on the device that
// setDevice selected for the calling thread. All throw unisono::Error on failure.
namespace unisono::bench {

class DeviceApi {
 public:
  // A recorded sequence of calls, launched as one.
  class Graph {
   public:
    virtual ~Graph() = default;
    // Call before the first launch, while no stream of the thread is being captured.
    virtual void prepare() = 0;
    virtual void launch(cudaStream_t stream) = 0;
  };
  // Measures the time between two points of a stream on the device.
  class Stopwatch {
   public:
    virtual ~Stopwatch() = default;
    virtual void start(cudaStream_t stream) = 0;
    virtual void stop(cudaStream_t stream) = 0;
    virtual double seconds() = 0;  // call after the stream has passed both points
  };

  virtual ~DeviceApi() = default;

  virtual int deviceCount() = 0;
  virtual void setDevice(int device) = 0;
  virtual std::string deviceName(int device) = 0;

  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* address) = 0;
  // Both return when the copy is complete.
  virtual void copyToDevice(void* destination, const void* source, size_t bytes) = 0;
  virtual void copyToHost(void* destination, const void* source, size_t bytes) = 0;

  virtual cudaStream_t createStream() = 0;
  virtual void destroyStream(cudaStream_t stream) = 0;
  virtual bool streamDone(cudaStream_t stream) = 0;

  // Null if the device has no clock; the caller then measures on the CPU.
  virtual std::unique_ptr<Stopwatch> createStopwatch() = 0;
  // Captures the calls of this thread on `stream`. Only if hasGraphs().
  virtual bool hasGraphs() const = 0;
  virtual void beginCapture(cudaStream_t stream) = 0;
  virtual std::unique_ptr<Graph> endCapture(cudaStream_t stream) = 0;
};

// The simulated devices of `library`, which must be Unisono. The library must outlive the result.
std::unique_ptr<DeviceApi> createHostDeviceApi(const Library& library);
// Throws unisono::Error if this program was built without CUDA.
std::unique_ptr<DeviceApi> createCudaDeviceApi();

}  // namespace unisono::bench
