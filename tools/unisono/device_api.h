#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "library_table.h"

// What the bench needs of a device, once for each backend. Calls act on the device that setDevice
// made current for the calling thread. All throw unisono::Error on failure.
namespace unisono::bench {

class DeviceApi {
 public:
  // A recorded sequence of calls that is launched as one.
  class Graph {
   public:
    virtual ~Graph() = default;
    // Before the first launch, once no stream of the thread is being captured.
    virtual void prepare() = 0;
    virtual void launch(cudaStream_t stream) = 0;
  };
  // The time between two points of a stream, taken by the device.
  class Stopwatch {
   public:
    virtual ~Stopwatch() = default;
    virtual void start(cudaStream_t stream) = 0;
    virtual void stop(cudaStream_t stream) = 0;
    virtual double seconds() = 0;  // once the stream has passed both points
  };

  virtual ~DeviceApi() = default;

  virtual int deviceCount() = 0;
  virtual void setDevice(int device) = 0;
  virtual std::string deviceName(int device) = 0;

  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* address) = 0;
  // Both return when the copy is done.
  virtual void copyToDevice(void* destination, const void* source, size_t bytes) = 0;
  virtual void copyToHost(void* destination, const void* source, size_t bytes) = 0;

  virtual cudaStream_t createStream() = 0;
  virtual void destroyStream(cudaStream_t stream) = 0;
  virtual bool streamDone(cudaStream_t stream) = 0;

  // Null where the device has no clock of its own: then the caller measures on the CPU.
  virtual std::unique_ptr<Stopwatch> createStopwatch() = 0;
  // Capture of the calls that the calling thread makes on `stream`; only where hasGraphs().
  virtual bool hasGraphs() const = 0;
  virtual void beginCapture(cudaStream_t stream) = 0;
  virtual std::unique_ptr<Graph> endCapture(cudaStream_t stream) = 0;
};

// The simulated devices of `library`, which must be Unisono. The library must outlive the result.
std::unique_ptr<DeviceApi> createHostDeviceApi(const Library& library);
// Throws unisono::Error when this program was built without CUDA.
std::unique_ptr<DeviceApi> createCudaDeviceApi();

}  // namespace unisono::bench
