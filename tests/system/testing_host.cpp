// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "testing.h"

// Simulated devices: 8 of them unless the environment says otherwise.
namespace unisono::system_test::device {
namespace {

// Before the library reads them; the environment of the test goes first.
const bool settingsMade = [] {
  ::setenv("UNISONO_BACKEND", "host", 0);
  ::setenv("UNISONO_BOOTSTRAP_TIMEOUT", "60", 0);
  return true;
}();

}  // namespace

int count() {
  int devices = 0;
  check(unisonoHostGetDeviceCount(&devices));
  return devices;
}

void use(int device) {
  check(unisonoHostSetDevice(device));
}

void* allocate(size_t bytes) {
  void* address = nullptr;
  check(unisonoHostMalloc(&address, bytes));
  return address;
}

void release(void* address) {
  unisonoHostFree(address);
}

void copy(void* to, const void* from, size_t bytes) {
  check(unisonoHostMemcpy(to, from, bytes));
}

cudaStream_t createStream() {
  cudaStream_t stream = nullptr;
  check(unisonoHostStreamCreate(&stream));
  return stream;
}

void destroyStream(cudaStream_t stream) {
  unisonoHostStreamDestroy(stream);
}

void synchronize(cudaStream_t stream) {
  check(unisonoHostStreamSynchronize(stream));
}

bool isIdle(cudaStream_t stream) {
  const ncclResult_t state = unisonoHostStreamQuery(stream);
  if (state != ncclInProgress) check(state);
  return state == ncclSuccess;
}

}  // namespace unisono::system_test::device
