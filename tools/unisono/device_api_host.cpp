// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "base/error.h"
#include "device_api.h"
#include "unisono/host.h"

namespace unisono::bench {
namespace {

// The functions of unisono/host.h in the loaded library.
class HostDeviceApi : public DeviceApi {
 public:
  explicit HostDeviceApi(const Library& library) : library_(library) {
#define UNISONO_BENCH_REQUIRE(name) \
  name = reinterpret_cast<decltype(name)>(library.require("unisonoHost" #name));
    UNISONO_BENCH_REQUIRE(GetDeviceCount)
    UNISONO_BENCH_REQUIRE(SetDevice)
    UNISONO_BENCH_REQUIRE(Malloc)
    UNISONO_BENCH_REQUIRE(Free)
    UNISONO_BENCH_REQUIRE(StreamCreate)
    UNISONO_BENCH_REQUIRE(StreamDestroy)
    UNISONO_BENCH_REQUIRE(StreamQuery)
    UNISONO_BENCH_REQUIRE(GetLastError)
#undef UNISONO_BENCH_REQUIRE
  }

  int deviceCount() override {
    int count = 0;
    check(GetDeviceCount(&count), "unisonoHostGetDeviceCount");
    return count;
  }
  void setDevice(int device) override {
    check(SetDevice(device), "unisonoHostSetDevice");
  }
  std::string deviceName(int) override {
    return "simulated GPU";
  }
  void* allocate(size_t bytes) override {
    void* address = nullptr;
    check(Malloc(&address, bytes), "unisonoHostMalloc");
    return address;
  }
  void free(void* address) override {
    check(Free(address), "unisonoHostFree");
  }
  // Device memory is ordinary memory of this process (unisono/host.h). Many threads can copy at
  // once, whereas the copy of the library would wait for the default stream.
  void copyToDevice(void* destination, const void* source, size_t bytes) override {
    std::memcpy(destination, source, bytes);
  }
  void copyToHost(void* destination, const void* source, size_t bytes) override {
    std::memcpy(destination, source, bytes);
  }
  cudaStream_t createStream() override {
    cudaStream_t stream = nullptr;
    check(StreamCreate(&stream), "unisonoHostStreamCreate");
    return stream;
  }
  void destroyStream(cudaStream_t stream) override {
    check(StreamDestroy(stream), "unisonoHostStreamDestroy");
  }
  bool streamDone(cudaStream_t stream) override {
    ncclResult_t result = StreamQuery(stream);
    if (result == ncclInProgress) return false;
    check(result, "unisonoHostStreamQuery");
    return true;
  }
  std::unique_ptr<Stopwatch> createStopwatch() override {
    return nullptr;
  }
  bool hasGraphs() const override {
    return false;
  }
  void beginCapture(cudaStream_t) override {
    throw invalidUsage("simulated GPUs do not support graphs");
  }
  std::unique_ptr<Graph> endCapture(cudaStream_t) override {
    throw invalidUsage("simulated GPUs do not support graphs");
  }

 private:
  void check(ncclResult_t result, const char* call) const {
    if (result == ncclSuccess) return;
    throw Error(static_cast<ErrorCode>(result),
                fmt::format("{} failed in {}: {}", call, library_.path(), GetLastError()));
  }

  const Library& library_;
#define UNISONO_BENCH_MEMBER(name) decltype(&::unisonoHost##name) name = nullptr;
  UNISONO_BENCH_MEMBER(GetDeviceCount)
  UNISONO_BENCH_MEMBER(SetDevice)
  UNISONO_BENCH_MEMBER(Malloc)
  UNISONO_BENCH_MEMBER(Free)
  UNISONO_BENCH_MEMBER(StreamCreate)
  UNISONO_BENCH_MEMBER(StreamDestroy)
  UNISONO_BENCH_MEMBER(StreamQuery)
  UNISONO_BENCH_MEMBER(GetLastError)
#undef UNISONO_BENCH_MEMBER
};

}  // namespace

std::unique_ptr<DeviceApi> createHostDeviceApi(const Library& library) {
  return std::make_unique<HostDeviceApi>(library);
}

}  // namespace unisono::bench
