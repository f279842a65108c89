// SPDX-License-Identifier: Apache-2.0
// Kernels of the library that start while an earlier kernel of the stream still computes their
// input (UNISONO_EARLY_LAUNCH): each has to wait for it before it reads anything.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_graph.h"
#include "device_clock.cuh"
#include "testing.h"

namespace unisono::system_test {
namespace {

using test::CudaGraph;
using test::deviceNs;

constexpr int kRanks = 2;
constexpr int kRounds = 20;
constexpr unsigned long long kDelayNs = 200'000;

// Lets the next kernel start at once, and increments the buffer late.
__global__ void incrementLate(int* buffer, size_t count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const unsigned long long end = deviceNs() + kDelayNs;
  while (deviceNs() < end) {
  }
  for (size_t i = threadIdx.x; i < count; i += blockDim.x) buffer[i]++;
}

struct Call {
  const char *name, *algorithm, *protocol;
  size_t count;
  bool isMessage;
};

class EarlyLaunch : public ::testing::TestWithParam<Call> {};

TEST_P(EarlyLaunch, WaitsForTheInput) {
  const Call call = GetParam();
  const Setting algorithm("NCCL_ALGO", call.algorithm), protocol("NCCL_PROTO", call.protocol),
      early("UNISONO_EARLY_LAUNCH", "1");
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream stream(deviceOf(rank));
    const DeviceBuffer input(deviceOf(rank), call.count * sizeof(int)),
        output(deviceOf(rank), call.count * sizeof(int));
    std::vector<int> values(call.count, rank);
    device::copy(input.as(), values.data(), input.bytes());
    const auto run = [&] {
      incrementLate<<<1, 512, 0, stream>>>(input.as<int>(), call.count);
      if (!call.isMessage) {
        check(ncclAllReduce(input.as(), output.as(), call.count, ncclInt, ncclSum, member.comm,
                            stream));
        return;
      }
      check(ncclGroupStart());
      check(ncclSend(input.as(), call.count, ncclInt, 1 - rank, member.comm, stream));
      check(ncclRecv(output.as(), call.count, ncclInt, 1 - rank, member.comm, stream));
      check(ncclGroupEnd());
    };
    run();
    stream.synchronize();
    const CudaGraph graph(stream, run);
    for (int round = 2; round < kRounds; round++) {
      if (round % 2 == 0) {
        run();
      } else {
        graph.launch(stream);
      }
      device::synchronize(stream);
      device::copy(values.data(), output.as(), output.bytes());
      const int expected = call.isMessage ? 1 - rank + round : 1 + 2 * round;
      for (size_t i = 0; i < call.count; i++) {
        if (values[i] == expected) continue;
        throw std::runtime_error("round " + std::to_string(round) + ": element " +
                                 std::to_string(i) + " is " + std::to_string(values[i]) + ", not " +
                                 std::to_string(expected));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Of, EarlyLaunch,
                         ::testing::Values(Call{"DirectLl", "Direct", "LL", 300, false},
                                           Call{"DirectLl128", "Direct", "LL128", 40'000, false},
                                           Call{"RingLl", "Ring", "LL", 3000, false},
                                           Call{"RingSimple", "Ring", "Simple", 40'000, false},
                                           Call{"TreeLl128", "Tree", "LL128", 40'000, false},
                                           Call{"SmallMessage", "", "", 300, true},
                                           Call{"LargeMessage", "", "", 400'000, true},
                                           Call{"MessageOverFifos", "", "", 3'000'000, true}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace unisono::system_test
