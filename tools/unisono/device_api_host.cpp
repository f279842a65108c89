#include "base/error.h"
#include "device_api.h"
#include "unisono/host.h"

namespace unisono::bench {
namespace {

// The functions of unisono/host.h as the loaded library has them.
class HostDeviceApi : public DeviceApi {
 public:
  explicit HostDeviceApi(const Library& library) : library_(library) {
#define UNISONO_BENCH_REQUIRE(name) \
  name = reinterpret_cast<decltype(name)>(library.require("unisonoHost" #name));
    UNISONO_BENCH_REQUIRE(GetDeviceCount)
    UNISONO_BENCH_REQUIRE(SetDevice)
    UNISONO_BENCH_REQUIRE(Malloc)
    UNISONO_BENCH_REQUIRE(Free)
    UNISONO_BENCH_REQUIRE(Memcpy)
    UNISONO_BENCH_REQUIRE(StreamCreate)
    UNISONO_BENCH_REQUIRE(StreamDestroy)
    UNISONO_BENCH_REQUIRE(StreamQuery)
#undef UNISONO_BENCH_REQUIRE
  }

  int deviceCount() override {
    int count = 0;
    library_.check(GetDeviceCount(&count), "unisonoHostGetDeviceCount");
    return count;
  }
  void setDevice(int device) override {
    library_.check(SetDevice(device), "unisonoHostSetDevice");
  }
  std::string deviceName(int) override {
    return "simulated GPU";
  }
  void* allocate(size_t bytes) override {
    void* address = nullptr;
    library_.check(Malloc(&address, bytes), "unisonoHostMalloc");
    return address;
  }
  void free(void* address) override {
    library_.check(Free(address), "unisonoHostFree");
  }
  void copyToDevice(void* destination, const void* source, size_t bytes) override {
    library_.check(Memcpy(destination, source, bytes), "unisonoHostMemcpy");
  }
  void copyToHost(void* destination, const void* source, size_t bytes) override {
    library_.check(Memcpy(destination, source, bytes), "unisonoHostMemcpy");
  }
  cudaStream_t createStream() override {
    cudaStream_t stream = nullptr;
    library_.check(StreamCreate(&stream), "unisonoHostStreamCreate");
    return stream;
  }
  void destroyStream(cudaStream_t stream) override {
    library_.check(StreamDestroy(stream), "unisonoHostStreamDestroy");
  }
  bool streamDone(cudaStream_t stream) override {
    ncclResult_t result = StreamQuery(stream);
    if (result == ncclInProgress) return false;
    library_.check(result, "unisonoHostStreamQuery");
    return true;
  }
  std::unique_ptr<Stopwatch> createStopwatch() override {
    return nullptr;
  }
  bool hasGraphs() const override {
    return false;
  }
  void beginCapture(cudaStream_t) override {
    throw invalidUsage("simulated GPUs have no graphs");
  }
  std::unique_ptr<Graph> endCapture(cudaStream_t) override {
    throw invalidUsage("simulated GPUs have no graphs");
  }

 private:
  const Library& library_;
#define UNISONO_BENCH_MEMBER(name) decltype(&::unisonoHost##name) name = nullptr;
  UNISONO_BENCH_MEMBER(GetDeviceCount)
  UNISONO_BENCH_MEMBER(SetDevice)
  UNISONO_BENCH_MEMBER(Malloc)
  UNISONO_BENCH_MEMBER(Free)
  UNISONO_BENCH_MEMBER(Memcpy)
  UNISONO_BENCH_MEMBER(StreamCreate)
  UNISONO_BENCH_MEMBER(StreamDestroy)
  UNISONO_BENCH_MEMBER(StreamQuery)
#undef UNISONO_BENCH_MEMBER
};

}  // namespace

std::unique_ptr<DeviceApi> createHostDeviceApi(const Library& library) {
  return std::make_unique<HostDeviceApi>(library);
}

}  // namespace unisono::bench
