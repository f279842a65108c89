// SPDX-License-Identifier: Apache-2.0
// Calls of one communicator on streams that nothing else orders, plain and in CUDA graphs: each
// rank makes them in the same order.
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_graph.h"
#include "testing.h"

namespace unisono::system_test {
namespace {

using test::CudaGraph;

constexpr int kRanks = 2;
constexpr int kInGraph = 3;
constexpr int kRounds = 200;

// The element counts of the calls in graphs and outside: one-shot and ring.
class Graphs : public ::testing::TestWithParam<std::pair<size_t, size_t>> {};

// A sum over all ranks of its own buffers.
class Sum {
 public:
  Sum(int rank, size_t count)
      : rank_(rank),
        input_(deviceOf(rank), count * sizeof(int)),
        output_(deviceOf(rank), count * sizeof(int)),
        values_(count) {}

  void setInput(int value) {
    values_.assign(values_.size(), value + rank_);
    device::copy(input_.as(), values_.data(), input_.bytes());
  }
  void call(ncclComm_t comm, cudaStream_t stream) {
    check(ncclAllReduce(input_.as(), output_.as(), values_.size(), ncclInt, ncclSum, comm, stream));
  }
  void expect(int value, const std::string& what) {
    device::copy(values_.data(), output_.as(), output_.bytes());
    const int sum = kRanks * value + kRanks * (kRanks - 1) / 2;
    for (size_t i = 0; i < values_.size(); i++) {
      if (values_[i] != sum) {
        throw std::runtime_error(what + ": element " + std::to_string(i) + " is " +
                                 std::to_string(values_[i]) + ", not " + std::to_string(sum));
      }
    }
  }

 private:
  int rank_;
  DeviceBuffer input_, output_;
  std::vector<int> values_;
};

TEST_P(Graphs, MixWithPlainCallsAndOtherGraphs) {
  const auto [graphCount, plainCount] = GetParam();
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&, inGraph = graphCount, outside = plainCount](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream streams[] = {DeviceStream(deviceOf(rank)), DeviceStream(deviceOf(rank)),
                                    DeviceStream(deviceOf(rank))};
    Sum first(rank, inGraph), second(rank, inGraph), plain(rank, outside);
    first.setInput(1);
    second.setInput(2);
    plain.setInput(3);
    plain.call(member.comm, streams[2]);  // before any graph was captured
    const CudaGraph firstGraph(streams[0], [&] {
      for (int i = 0; i < kInGraph; i++) first.call(member.comm, streams[0]);
    });
    const CudaGraph secondGraph(streams[1], [&] { second.call(member.comm, streams[1]); });
    for (int round = 0; round < kRounds; round++) {
      firstGraph.launch(streams[0]);
      plain.call(member.comm, streams[2]);
      secondGraph.launch(streams[1]);
      if (round % 3 == 0) firstGraph.launch(streams[1]);
    }
    for (const DeviceStream& stream : streams) stream.synchronize();
    first.expect(1, "first graph");
    second.expect(2, "second graph");
    plain.expect(3, "plain call");
  });
}

// Captures of two graphs are open at once, and the first goes on on a second stream, which only
// depends on the beginning of the capture.
TEST_P(Graphs, KeepTheirOrderInInterleavedCaptures) {
  const size_t count = GetParam().first;
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream first(deviceOf(rank)), forked(deviceOf(rank)), second(deviceOf(rank));
    Sum before(rank, count), between(rank, count), after(rank, count);
    before.setInput(1);
    between.setInput(2);
    after.setInput(3);
    std::optional<CudaGraph> inner;
    const CudaGraph outer(
        first,
        [&] {
          test::joinCapture(forked, first);
          before.call(member.comm, first);
          inner.emplace(second, [&] { between.call(member.comm, second); });
          after.call(member.comm, forked);
          test::joinCapture(first, forked);
        },
        cudaStreamCaptureModeRelaxed);  // so that the inner graph can be instantiated
    if (!outer.ordersKernels()) throw std::runtime_error("the calls of one capture have no order");
    for (int round = 0; round < 20; round++) {
      outer.launch(first);
      inner->launch(second);
    }
    first.synchronize();
    second.synchronize();
    before.expect(1, "call before the other capture");
    between.expect(2, "call of the other capture");
    after.expect(3, "call after the other capture");
  });
}

TEST_P(Graphs, AreWaitedForByDestroy) {
  const size_t count = GetParam().first;
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream stream(deviceOf(rank));
    Sum sum(rank, count);
    sum.setInput(5);
    const CudaGraph graph(stream, [&] { sum.call(member.comm, stream); });
    for (int i = 0; i < 20; i++) graph.launch(stream);
    check(ncclCommDestroy(std::exchange(member.comm, nullptr)));
    sum.expect(5, "graph before ncclCommDestroy");
  });
}

// A new stream may have the handle of one that was destroyed while it had work.
TEST(Streams, MayBeDestroyedAfterTheCall) {
  if (deviceOf(0) == deviceOf(1)) {
    GTEST_SKIP()
        << "on one GPU, streams of both ranks share hardware queues, where the calls of one "
           "rank can wait for those that the other one has yet to begin";
  }
  constexpr size_t kCounts[] = {size_t{1} << 22, 256};
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    std::vector<Sum> sums;
    for (int call = 0; call < 40; call++) {
      sums.emplace_back(rank, kCounts[call % 2]);
      sums.back().setInput(call);
    }
    for (Sum& sum : sums) sum.call(member.comm, DeviceStream(deviceOf(rank)));
    check(ncclCommDestroy(std::exchange(member.comm, nullptr)));
    for (int call = 0; call < 40; call++) {
      sums[static_cast<size_t>(call)].expect(call, "call " + std::to_string(call));
    }
  });
}

constexpr size_t kOneShot = 256, kRing = size_t{1} << 20;
INSTANTIATE_TEST_SUITE_P(Of, Graphs,
                         ::testing::Values(std::pair{kOneShot, kOneShot}, std::pair{kRing, kRing},
                                           std::pair{kOneShot, kRing}, std::pair{kRing, kOneShot}),
                         [](const auto& test) {
                           auto name = [](size_t count) {
                             return count == kOneShot ? "OneShot" : "Ring";
                           };
                           return std::string(name(test.param.first)) + "With" +
                                  name(test.param.second);
                         });

// A call that is not allowed makes a capture fail. The communicator works again afterwards.
TEST(Captures, ThatHaveFailedAreRefused) {
  const ncclUniqueId id = newId();
  onThreads(kRanks, [&](int rank) {
    Member member(id, rank, kRanks);
    const DeviceStream stream(deviceOf(rank));
    Sum sum(rank, 1000);
    sum.setInput(1);
    sum.call(member.comm, stream);
    device::synchronize(stream);
    const DeviceBuffer buffer(deviceOf(rank), sizeof(int));
    const auto succeeds = [](cudaError_t result) { return result == cudaSuccess; };
    EXPECT_TRUE(succeeds(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)));
    EXPECT_FALSE(succeeds(cudaStreamSynchronize(stream)));
    EXPECT_EQ(ncclAllReduce(buffer.as(), buffer.as(), 1, ncclInt, ncclSum, member.comm, stream),
              ncclInvalidUsage);
    cudaGraph_t graph = nullptr;
    EXPECT_FALSE(succeeds(cudaStreamEndCapture(stream, &graph)));
    cudaGetLastError();
    sum.call(member.comm, stream);
    device::synchronize(stream);
    sum.expect(1, "after a failed capture");
  });
}

}  // namespace
}  // namespace unisono::system_test
