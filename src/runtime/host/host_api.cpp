// SPDX-License-Identifier: Apache-2.0
// This header's streams are opaque: nothing of CUDA is needed even where it is installed.
#define UNISONO_NO_CUDA_HEADERS
#include "unisono/host.h"

#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/result.h"
#include "runtime/host/host_runtime.h"

namespace unisono::runtime::host {
namespace {

thread_local std::string lastError;

// What C callers own. Never destroyed: they may free in their own static destructors.
struct Owned {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<DeviceMemory>> memory;
  std::map<void*, std::shared_ptr<void>> streams;
  std::map<void*, std::shared_ptr<HostGraph>> graphs;
};
Owned& owned() {
  static auto* instance = new Owned;
  return *instance;
}

HostRuntime& runtime() {
  return HostRuntime::from(Runtime::get());
}

void keepText(const char* text, bool) noexcept {
  try {
    lastError = text;
  } catch (const std::bad_alloc&) {
    lastError.clear();
  }
}

template <typename Body>
ncclResult_t guarded(Body&& body) noexcept {
  return unisono::guarded(keepText, std::forward<Body>(body));
}

template <typename T>
T& checked(T* pointer, const char* name) {
  if (pointer == nullptr) throw invalidArgument("{} is null", name);
  return *pointer;
}

std::shared_ptr<HostGraph> graphOf(unisonoHostGraph_t graph) {
  std::lock_guard lock(owned().mutex);
  const auto entry = owned().graphs.find(graph);
  if (entry == owned().graphs.end()) {
    throw invalidArgument(
        "{} was not made by unisonoHostStreamEndCapture, or was destroyed already",
        static_cast<void*>(graph));
  }
  return entry->second;
}

}  // namespace
}  // namespace unisono::runtime::host

using namespace unisono;
using namespace unisono::runtime;
using namespace unisono::runtime::host;

ncclResult_t unisonoHostGetDeviceCount(int* count) {
  return guarded([&] {
    checked(count, "count") = host::runtime().deviceCount();
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostSetDevice(int device) {
  return guarded([&] {
    host::runtime().makeCurrent(device);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostGetDevice(int* device) {
  return guarded([&] {
    checked(device, "device") = host::runtime().currentDevice();
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostMalloc(void** address, size_t bytes) {
  return guarded([&] {
    checked(address, "address");
    HostRuntime& devices = host::runtime();
    auto memory = devices.allocateForUser(devices.currentDevice(), bytes);
    void* start = memory->address();
    std::lock_guard lock(owned().mutex);
    owned().memory[start] = std::move(memory);
    *address = start;
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostFree(void* address) {
  return guarded([&] {
    if (address == nullptr) return ncclSuccess;
    host::runtime().checkProcess();
    std::lock_guard lock(owned().mutex);
    auto entry = owned().memory.find(address);
    if (entry == owned().memory.end()) {
      throw invalidArgument("{} was not allocated by unisonoHostMalloc, or was freed already",
                            address);
    }
    owned().memory.erase(entry);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostMemcpy(void* destination, const void* source, size_t bytes) {
  return guarded([&] {
    HostRuntime& devices = host::runtime();
    devices.copyAsync(destination, source, bytes, nullptr);
    devices.synchronize(nullptr);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostMemcpyAsync(void* destination, const void* source, size_t bytes,
                                    cudaStream_t stream) {
  return guarded([&] {
    host::runtime().copyAsync(destination, source, bytes, stream);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostMemset(void* destination, int value, size_t bytes) {
  return guarded([&] {
    HostRuntime& devices = host::runtime();
    devices.fillAsync(destination, static_cast<std::byte>(value), bytes, nullptr);
    devices.synchronize(nullptr);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostMemsetAsync(void* destination, int value, size_t bytes,
                                    cudaStream_t stream) {
  return guarded([&] {
    host::runtime().fillAsync(destination, static_cast<std::byte>(value), bytes, stream);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamCreate(cudaStream_t* stream) {
  return guarded([&] {
    checked(stream, "stream");
    HostRuntime& devices = host::runtime();
    std::shared_ptr<void> made = devices.createStream(devices.currentDevice());
    void* handle = made.get();
    std::lock_guard lock(owned().mutex);
    owned().streams[handle] = std::move(made);
    *stream = static_cast<cudaStream_t>(handle);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamDestroy(cudaStream_t stream) {
  return guarded([&] {
    host::runtime().checkProcess();
    std::lock_guard lock(owned().mutex);
    if (owned().streams.erase(stream) == 0) {
      throw invalidArgument("{} was not made by unisonoHostStreamCreate, or was destroyed already",
                            static_cast<void*>(stream));
    }
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamSynchronize(cudaStream_t stream) {
  return guarded([&] {
    host::runtime().synchronize(stream);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamQuery(cudaStream_t stream) {
  return guarded([&] { return host::runtime().query(stream) ? ncclSuccess : ncclInProgress; });
}

ncclResult_t unisonoHostDeviceSynchronize(void) {
  return guarded([&] {
    HostRuntime& devices = host::runtime();
    devices.synchronizeDevice(devices.currentDevice());
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamBeginCapture(cudaStream_t stream) {
  return guarded([&] {
    host::runtime().beginCapture(stream);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostStreamEndCapture(cudaStream_t stream, unisonoHostGraph_t* graph) {
  return guarded([&] {
    checked(graph, "graph");
    std::shared_ptr<HostGraph> made = host::runtime().endCapture(stream);
    void* handle = made.get();
    std::lock_guard lock(owned().mutex);
    owned().graphs[handle] = std::move(made);
    *graph = static_cast<unisonoHostGraph_t>(handle);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostGraphLaunch(unisonoHostGraph_t graph, cudaStream_t stream) {
  return guarded([&] {
    host::runtime().launchGraph(*graphOf(graph), stream);
    return ncclSuccess;
  });
}

ncclResult_t unisonoHostGraphDestroy(unisonoHostGraph_t graph) {
  return guarded([&] {
    graphOf(graph);
    std::lock_guard lock(owned().mutex);
    owned().graphs.erase(graph);
    return ncclSuccess;
  });
}

const char* unisonoHostGetLastError(void) {
  return host::lastError.c_str();
}
