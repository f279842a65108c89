// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <functional>
#include <vector>

#include "testing.h"

// Aborts of communicators whose kernels are queued after one that is stuck.
namespace unisono::system_test {
namespace {

constexpr size_t kCount = 1 << 20;
constexpr float kPoison = -7;

struct LateCall {
  const char* name;
  int ranks;
  size_t count;
};

class LateAbort : public ::testing::TestWithParam<LateCall> {};

// Rank 1 makes its call at once, so that the kernel of rank 0 would complete if it did anything.
TEST_P(LateAbort, ReturnsAtOnceAndTheKernelWritesNothing) {
  const LateCall late = GetParam();
  const Ranks stuck(2), ranks(late.ranks);
  std::vector<DeviceBuffer> in, out;
  const std::vector<float> ones(kCount, 1), poison(kCount, kPoison);
  for (int rank = 0; rank < late.ranks; rank++) {
    device::use(deviceOf(rank));
    in.emplace_back(deviceOf(rank), kCount * sizeof(float));
    out.emplace_back(deviceOf(rank), kCount * sizeof(float));
    device::copy(in.back().as(), ones.data(), in.back().bytes());
    device::copy(out.back().as(), poison.data(), out.back().bytes());
  }
  const DeviceBuffer scratch(deviceOf(0), 1024);
  onThreads(2, [&](int rank) { useOnce(stuck.comm(rank), 64); });
  onThreads(late.ranks, [&](int rank) { useOnce(ranks.comm(rank), late.count); });

  const auto call = [&](int rank, cudaStream_t stream) {
    const auto index = static_cast<size_t>(rank);
    device::use(deviceOf(rank));
    check(ncclAllReduce(in[index].as(), out[index].as(), late.count, ncclFloat, ncclSum,
                        ranks.comm(rank), stream));
  };
  const cudaStream_t stream = stuck.stream(0);
  device::use(deviceOf(0));
  check(ncclAllReduce(scratch.as(), scratch.as(), 64, ncclInt, ncclSum, stuck.comm(0), stream));
  call(0, stream);
  if (late.ranks > 1) call(1, ranks.stream(1));
  ASSERT_FALSE(device::isIdle(stream));

  const auto begin = std::chrono::steady_clock::now();
  EXPECT_OK(ncclCommAbort(ranks.comm(0)));
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - begin;
  EXPECT_LT(elapsed.count(), 100);
  EXPECT_FALSE(device::isIdle(stream)) << "the abort ended the kernel of another communicator";

  EXPECT_OK(ncclCommAbort(stuck.comm(0)));
  device::synchronize(stream);
  std::vector<float> result(kCount);
  device::use(deviceOf(0));
  device::copy(result.data(), out[0].as(), out[0].bytes());
  EXPECT_EQ(result, poison);
  if (late.ranks > 1) {
    EXPECT_OK(ncclCommAbort(ranks.comm(1)));
    device::synchronize(ranks.stream(1));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, LateAbort,
                         ::testing::Values(LateCall{"OneShot", 2, 256}, LateCall{"Ring", 2, kCount},
                                           LateCall{"LocalCopy", 1, kCount}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace unisono::system_test
