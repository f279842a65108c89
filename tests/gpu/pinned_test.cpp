// SPDX-License-Identifier: Apache-2.0
// Buffers in pinned host memory, which NCCL accepts too.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "testing.h"

namespace unisono::system_test {
namespace {

constexpr int kRanks = 2;

struct FreePinned {
  void operator()(int* address) const { cudaFreeHost(address); }
};

std::unique_ptr<int, FreePinned> allocatePinned(size_t count) {
  void* address = nullptr;
  if (cudaHostAlloc(&address, count * sizeof(int), cudaHostAllocPortable) != cudaSuccess) {
    throw std::runtime_error("cudaHostAlloc failed");
  }
  return std::unique_ptr<int, FreePinned>(static_cast<int*>(address));
}

void expectAll(const int* values, size_t count, int expected, const char* what) {
  for (size_t i = 0; i < count; i++) {
    if (values[i] != expected) {
      throw std::runtime_error(std::string(what) + ": element " + std::to_string(i) + " is " +
                               std::to_string(values[i]));
    }
  }
}

// One-shot and ring, short and long messages.
class PinnedMemory : public ::testing::TestWithParam<size_t> {};

TEST_P(PinnedMemory, CarriesCollectivesAndMessages) {
  const size_t count = GetParam();
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream stream(deviceOf(rank));
    const auto input = allocatePinned(count), output = allocatePinned(count);
    std::fill_n(input.get(), count, rank + 1);
    check(ncclAllReduce(input.get(), output.get(), count, ncclInt, ncclSum, member.comm, stream));
    stream.synchronize();
    expectAll(output.get(), count, 3, "all-reduce");

    const int peer = 1 - rank;
    check(ncclGroupStart());
    check(ncclSend(input.get(), count, ncclInt, peer, member.comm, stream));
    check(ncclRecv(output.get(), count, ncclInt, peer, member.comm, stream));
    check(ncclGroupEnd());
    stream.synchronize();
    expectAll(output.get(), count, peer + 1, "receive");
  });
}

INSTANTIATE_TEST_SUITE_P(Counts, PinnedMemory, ::testing::Values(1, 1000, 1 << 20));

}  // namespace
}  // namespace unisono::system_test
