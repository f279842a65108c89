// SPDX-License-Identifier: Apache-2.0
/* All-reduce over four simulated GPUs: what the user guide shows. */
#include <nccl.h>
#include <stdio.h>
#include <unisono/host.h>

enum { kDevices = 4, kCount = 1024 };

#define CHECK(call)                                                                            \
  do {                                                                                         \
    if ((call) != ncclSuccess) {                                                               \
      fprintf(stderr, "%s: %s%s\n", #call, ncclGetLastError(NULL), unisonoHostGetLastError()); \
      return 1;                                                                                \
    }                                                                                          \
  } while (0)

int main(void) {
  ncclComm_t comms[kDevices];
  cudaStream_t streams[kDevices];
  void* buffers[kDevices];
  float values[kCount];

  CHECK(ncclCommInitAll(comms, kDevices, NULL));
  for (int d = 0; d < kDevices; d++) {
    CHECK(unisonoHostSetDevice(d));
    CHECK(unisonoHostStreamCreate(&streams[d]));
    CHECK(unisonoHostMalloc(&buffers[d], sizeof(values)));
    for (int i = 0; i < kCount; i++) values[i] = (float)(d + i);
    CHECK(unisonoHostMemcpy(buffers[d], values, sizeof(values)));
  }

  CHECK(ncclGroupStart());
  for (int d = 0; d < kDevices; d++) {
    CHECK(ncclAllReduce(buffers[d], buffers[d], kCount, ncclFloat, ncclSum, comms[d], streams[d]));
  }
  CHECK(ncclGroupEnd());

  for (int d = 0; d < kDevices; d++) {
    CHECK(unisonoHostStreamSynchronize(streams[d]));
    CHECK(unisonoHostMemcpy(values, buffers[d], sizeof(values)));
    for (int i = 0; i < kCount; i++) {
      if (values[i] != (float)(4 * i + 6)) return 1; /* 0 + 1 + 2 + 3 = 6 */
    }
    CHECK(unisonoHostFree(buffers[d]));
    CHECK(unisonoHostStreamDestroy(streams[d]));
    CHECK(ncclCommDestroy(comms[d]));
  }
  printf("the sums are right on %d devices\n", (int)kDevices);
  return 0;
}
