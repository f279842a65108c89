// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime inside one process: memory, streams, events, capture, errors.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "base/error.h"
#include "cuda_graph.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver.h"
#include "runtime_cuda_child.h"
#include "runtime_cuda_kernels.h"

namespace unisono::runtime::test {
namespace {

using unisono::test::CudaGraph;

constexpr size_t kOddBytes = (size_t{5} << 20) + 3;

class CudaRuntimeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpus_ = gpuCount(&why);
    if (gpus_ == 0) GTEST_SKIP() << why;
    runtime_ = makeRuntime();
    runtime_->makeCurrent(0);
  }
  // No call of ours may leave an error for the next one.
  void TearDown() override {
    if (gpus_ > 0) {
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
  }

  int gpus_ = 0;
  std::unique_ptr<Runtime> runtime_;
};

template <typename Call>
void expectError(Call call, ErrorCode code, const std::string& text) {
  try {
    call();
    FAIL() << "no error; expected one with: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST_F(CudaRuntimeTest, PropertiesNameTheDevice) {
  for (int device = 0; device < gpus_; device++) {
    DeviceProperties properties = runtime_->properties(device);
    EXPECT_FALSE(properties.name.empty());
    EXPECT_EQ(properties.busId.size(), 12u) << properties.busId;
    EXPECT_EQ(properties.busId.find_first_not_of("0123456789abcdef:."), std::string::npos);
    EXPECT_GE(properties.computeCapability, 70);
    EXPECT_GT(properties.multiprocessors, 0);
    EXPECT_NE(properties.uuid, decltype(properties.uuid){});
    EXPECT_TRUE(runtime_->canAccessPeer(device, device));
  }
  expectError([&] { runtime_->properties(gpus_); }, ErrorCode::invalidArgument, "does not exist");
  expectError([&] { runtime_->makeCurrent(-1); }, ErrorCode::invalidArgument, "does not exist");
}

TEST_F(CudaRuntimeTest, AllocationsAreZeroFilledEvenWhenMemoryIsUsedAgain) {
  for (int cuMem : {0, -1}) {
    auto runtime = makeRuntime(cuMem);
    for (size_t bytes : {size_t{1}, size_t{4096}, kOddBytes}) {
      for (int round = 0; round < 3; round++) {
        auto memory = runtime->allocate(0, bytes);
        ASSERT_NE(memory->address(), nullptr);
        EXPECT_EQ(memory->bytes(), bytes);
        EXPECT_EQ(memory->device(), 0);
        EXPECT_EQ(countOther(*runtime, 0, memory->address(), bytes, 0), 0u);
        fill(*runtime, 0, memory->address(), bytes, 0xa5);
        EXPECT_EQ(countOther(*runtime, 0, memory->address(), bytes, 0xa5), 0u);
      }
    }
  }
}

TEST_F(CudaRuntimeTest, MemoryIsExportedAsDmaBufs) {
  if (!runtime_->supportsDmaBuf(0)) GTEST_SKIP() << "the driver or the kernel has no DMA-BUFs";
  for (int cuMem : {0, -1}) {
    auto runtime = makeRuntime(cuMem);
    const DeviceScope scope(*runtime, 0);
    const auto memory = runtime->allocate(0, size_t{4} << 20);
    const auto* page = static_cast<const std::byte*>(memory->address()) + 4096;
    const DmaBuf part = runtime->exportDmaBuf(page, 8192);
    EXPECT_TRUE(part.descriptor);
    EXPECT_EQ(part.offset, 0u);
  }
}

TEST_F(CudaRuntimeTest, FreedMemoryReturnsToTheDevice) {
  size_t before = 0, after = 0, total = 0;
  constexpr size_t kBytes = size_t{256} << 20;
  runtime_->allocate(0, kBytes);  // what the first use of CUDA keeps
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (int round = 0; round < 4; round++) {
    auto memory = runtime_->allocate(0, kBytes);
    runtime_->exportMemory(memory->address(), kBytes);
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_LT(before - std::min(before, after), kBytes / 2);
}

TEST_F(CudaRuntimeTest, TooLargeAnAllocationSaysSo) {
  constexpr size_t kBytes = size_t{1} << 44;
  expectError([&] { runtime_->allocate(0, kBytes); }, ErrorCode::unhandledCudaError, "device 0");
  expectError([&] { makeRuntime(0)->allocate(0, kBytes); }, ErrorCode::unhandledCudaError,
              "cudaMalloc");
}

TEST_F(CudaRuntimeTest, PinnedMemoryIsOneForBothSides) {
  for (const size_t size : {size_t{64}, size_t{4096}, size_t{64}}) {
    auto pinned = runtime_->allocatePinned(size);
    auto* bytes = static_cast<unsigned char*>(pinned->hostAddress());
    for (size_t i = 0; i < size; i++) ASSERT_EQ(bytes[i], 0);
    fill(*runtime_, 0, pinned->deviceAddress(), size, 0x3c);
    for (size_t i = 0; i < size; i++) ASSERT_EQ(bytes[i], 0x3c);
  }
}

TEST_F(CudaRuntimeTest, InspectTellsKindsApart) {
  int local = 0;
  EXPECT_EQ(runtime_->inspect(&local).kind, PointerInfo::Kind::host);
  EXPECT_EQ(runtime_->inspect(nullptr).kind, PointerInfo::Kind::host);
  auto pinned = runtime_->allocatePinned(64);
  EXPECT_EQ(runtime_->inspect(pinned->hostAddress()).kind, PointerInfo::Kind::pinned);
  for (int cuMem : {0, -1}) {
    auto memory = makeRuntime(cuMem)->allocate(gpus_ - 1, kOddBytes);
    PointerInfo info = runtime_->inspect(static_cast<char*>(memory->address()) + 5);
    EXPECT_EQ(info.kind, PointerInfo::Kind::device);
    EXPECT_EQ(info.device, gpus_ - 1);
  }
}

TEST_F(CudaRuntimeTest, AnEventOrdersStreams) {
  auto first = runtime_->createStream(0);
  auto second = runtime_->createStream(0);
  auto event = runtime_->createEvent(0);
  auto source = runtime_->allocate(0, 4096);
  auto target = runtime_->allocate(0, 4096);
  constexpr unsigned long long kDelayNs = 50'000'000;
  FillArguments arguments{static_cast<unsigned char*>(source->address()), 4096, kDelayNs, 7};
  LaunchShape shape;
  shape.threadsPerBlock = 128;
  runtime_->launch(fillKernel(), shape, &arguments, first.get());
  event->record(first.get());
  event->makeWait(second.get());
  runtime_->copyAsync(target->address(), source->address(), 4096, second.get());
  runtime_->synchronize(second.get());
  EXPECT_EQ(countOther(*runtime_, 0, target->address(), 4096, 7), 0u);
}

TEST_F(CudaRuntimeTest, CreatedStreamsDoNotWaitForTheDefaultStream) {
  auto stream = runtime_->createStream(0);
  auto memory = runtime_->allocate(0, 4096);
  auto* bytes = static_cast<unsigned char*>(memory->address());
  constexpr unsigned long long kDelayNs = 500'000'000;
  FillArguments slow{bytes, 1, kDelayNs, 1};
  FillArguments quick{bytes + 1024, 1, 0, 2};
  runtime_->launch(fillKernel(), {}, &quick, stream.get());  // loads the kernel
  runtime_->synchronize(stream.get());
  runtime_->launch(fillKernel(), {}, &slow, nullptr);
  runtime_->launch(fillKernel(), {}, &quick, stream.get());
  runtime_->synchronize(stream.get());
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  cudaGetLastError();
  runtime_->synchronize(nullptr);
}

TEST_F(CudaRuntimeTest, ALaunchThatCannotBeNamesTheKernel) {
  auto stream = runtime_->createStream(0);
  LaunchShape shape;
  shape.threadsPerBlock = 4096;
  FillArguments arguments{nullptr, 0, 0, 0};
  expectError([&] { runtime_->launch(fillKernel(), shape, &arguments, stream.get()); },
              ErrorCode::unhandledCudaError, "test fill");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  expectError(
      [&] {
        runtime_->launch({"none", nullptr, nullptr}, {}, &arguments, nullptr);
      },
      ErrorCode::internalError, "none");
}

TEST_F(CudaRuntimeTest, PreparingWhatIsNoKernelIsAnError) {
  static const int notAKernel = 0;
  EXPECT_NO_THROW(runtime_->prepare(fillKernel(), gpus_ - 1));
  expectError(
      [&] {
        runtime_->prepare({"no kernel", &notAKernel, nullptr}, 0);
      },
      ErrorCode::unhandledCudaError, "no kernel");
}

// Everything that is not work of a stream, as a communicator might do it while another is captured.
void useEverything(Runtime& runtime) {
  auto memory = runtime.allocate(0, 4096);
  auto line = runtime.allocatePinned(64);
  auto pinned = runtime.allocatePinned(4096);
  runtime.importMemory(runtime.exportMemory(memory->address(), memory->bytes()), 0);
  runtime.inspect(memory->address());
  auto event = runtime.createEvent(0);
  auto stream = runtime.createStream(0);
  FillArguments arguments{static_cast<unsigned char*>(memory->address()), 4096, 0, 1};
  runtime.launch(fillKernel(), {}, &arguments, stream.get());
  event->record(stream.get());
  event->makeWait(stream.get());
  runtime.streamNumber(stream.get());
  runtime.synchronize(stream.get());
}

TEST_F(CudaRuntimeTest, ACaptureInGlobalModeSurvivesOurCalls) {
  auto stream = runtime_->createStream(0);
  auto memory = runtime_->allocate(0, 4096);
  FillArguments arguments{static_cast<unsigned char*>(memory->address()), 4096, 0, 9};
  cudaStream_t captured = static_cast<cudaStream_t>(stream.get());
  runtime_->prepare(fillKernel(), 0);
  EXPECT_EQ(runtime_->captureState(stream.get()), CaptureState::none);
  EXPECT_EQ(runtime_->captureState(nullptr), CaptureState::none);

  ASSERT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(runtime_->captureState(stream.get()), CaptureState::active);
  EXPECT_EQ(runtime_->captureState(nullptr), CaptureState::none);
  EXPECT_NO_THROW(useEverything(*runtime_));
  std::thread([this] { EXPECT_NO_THROW(useEverything(*runtime_)); }).join();
  expectError([&] { runtime_->synchronize(stream.get()); }, ErrorCode::invalidUsage, "captured");
  EXPECT_EQ(runtime_->captureState(stream.get()), CaptureState::active);
  LaunchShape shape;
  shape.threadsPerBlock = 64;
  runtime_->launch(fillKernel(), shape, &arguments, stream.get());
  arguments.value = 10;  // a captured launch holds its arguments
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
  EXPECT_EQ(runtime_->captureState(stream.get()), CaptureState::none);
  EXPECT_EQ(countOther(*runtime_, 0, memory->address(), 4096, 0), 0u);

  size_t nodes = 0;
  ASSERT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(nodes, 1u);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, captured), cudaSuccess);
  runtime_->synchronize(stream.get());
  EXPECT_EQ(countOther(*runtime_, 0, memory->address(), 4096, 9), 0u);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

class CudaGraphOrderTest : public CudaRuntimeTest {
 protected:
  static constexpr unsigned long long kDelayNs = 50'000'000;

  void SetUp() override {
    CudaRuntimeTest::SetUp();
    if (IsSkipped()) return;
    runtime_->prepare(fillKernel(), 0);
    for (auto& stream : streams_) stream = runtime_->createStream(0);
    event_ = runtime_->createEvent(0);
    source_ = runtime_->allocate(0, 4096);
    target_ = runtime_->allocate(0, 4096);
  }
  cudaStream_t stream(int index) const { return static_cast<cudaStream_t>(streams_[index].get()); }
  // Sets the source, late.
  void fillSlowly(cudaStream_t stream, unsigned char value) {
    FillArguments arguments{static_cast<unsigned char*>(source_->address()), 4096, kDelayNs, value};
    LaunchShape shape;
    shape.threadsPerBlock = 128;
    runtime_->launch(fillKernel(), shape, &arguments, stream);
  }
  void copy(cudaStream_t stream) {
    runtime_->copyAsync(target_->address(), source_->address(), 4096, stream);
  }
  void captured(cudaStream_t stream, const std::function<void()>& work) {
    event_->makeGraphWait(stream);
    work();
    event_->recordInGraph(stream);
  }
  size_t otherThan(unsigned char value) {
    return countOther(*runtime_, 0, target_->address(), 4096, value);
  }

  std::shared_ptr<void> streams_[3];
  std::unique_ptr<Event> event_;
  std::shared_ptr<DeviceMemory> source_, target_;
};

// The first and the second half of the target, between a slow fill of the source and a copy of both
// halves to another place.
TEST_F(CudaGraphOrderTest, ParallelCopiesFollowAndPrecedeOtherWork) {
  const auto last = runtime_->allocate(0, 4096);
  const auto copies = runtime_->createParallelCopies(0);
  const auto place = [](const std::shared_ptr<DeviceMemory>& memory, size_t offset) {
    return static_cast<std::byte*>(memory->address()) + offset;
  };
  const auto work = [&](cudaStream_t stream, unsigned char value) {
    fillSlowly(stream, value);
    const ParallelCopies::Range halves[] = {{place(target_, 0), place(source_, 0), 2048},
                                            {place(target_, 2048), place(source_, 2048), 2048}};
    copies->enqueue(halves, stream);
    runtime_->copyAsync(last->address(), target_->address(), 4096, stream);
  };
  const auto check = [&](cudaStream_t stream, unsigned char value) {
    runtime_->synchronize(stream);
    EXPECT_EQ(countOther(*runtime_, 0, last->address(), 4096, value), 0u);
  };
  unsigned char value = 20;
  for (cudaStream_t stream : {stream(0), cudaStream_t{}, cudaStreamPerThread}) {
    work(stream, ++value);
    check(stream, value);
  }
  const CudaGraph graph(stream(0), [&] { work(stream(0), ++value); });
  EXPECT_EQ(graph.nodes(), 4u);
  graph.launch(stream(0));
  check(stream(0), value);
}

TEST_F(CudaGraphOrderTest, WorkOutsideWaitsForAGraph) {
  const CudaGraph graph(stream(0), [&] {
    for (unsigned char value : {7, 8}) captured(stream(0), [&] { fillSlowly(stream(0), value); });
  });
  EXPECT_EQ(graph.nodes(), 4u) << "one wait, two kernels, one record";
  for (int round = 0; round < 2; round++) {
    graph.launch(stream(0));
    event_->makeWait(stream(1));
    copy(stream(1));
    runtime_->synchronize(stream(1));
    EXPECT_EQ(otherThan(8), 0u) << "the copy did not wait for the whole graph, round " << round;
    runtime_->synchronize(stream(0));
    fill(*runtime_, 0, source_->address(), 4096, 0);
  }
}

TEST_F(CudaGraphOrderTest, AGraphWaitsForWorkOutside) {
  const CudaGraph graph(stream(0), [&] { captured(stream(0), [&] { copy(stream(0)); }); });
  for (unsigned char value : {9, 10}) {
    fillSlowly(stream(1), value);
    event_->record(stream(1));
    graph.launch(stream(0));
    runtime_->synchronize(stream(0));
    EXPECT_EQ(otherThan(value), 0u) << "the graph did not wait for the fill with " << int{value};
  }
}

TEST_F(CudaGraphOrderTest, AGraphWaitsForAnotherGraph) {
  const CudaGraph first(stream(0),
                        [&] { captured(stream(0), [&] { fillSlowly(stream(0), 11); }); });
  const CudaGraph second(stream(1), [&] { captured(stream(1), [&] { copy(stream(1)); }); });
  first.launch(stream(0));
  second.launch(stream(1));
  runtime_->synchronize(stream(1));
  EXPECT_EQ(otherThan(11), 0u) << "the second graph did not wait for the first";
  runtime_->synchronize(stream(0));
}

// Branches of one graph, which nothing else orders.
TEST_F(CudaGraphOrderTest, BranchesOfAGraphRunInTheOrderOfTheCalls) {
  auto fork = runtime_->createEvent(0), join = runtime_->createEvent(0);
  const CudaGraph graph(stream(0), [&] {
    fork->record(stream(0));
    fork->makeWait(stream(1));
    captured(stream(0), [&] { fillSlowly(stream(0), 12); });
    captured(stream(1), [&] { copy(stream(1)); });
    join->record(stream(1));
    join->makeWait(stream(0));
  });
  graph.launch(stream(2));
  event_->makeWait(stream(1));
  copy(stream(1));
  runtime_->synchronize(stream(1));
  EXPECT_EQ(otherThan(12), 0u) << "the second branch did not wait for the first";
  runtime_->synchronize(stream(2));
}

TEST_F(CudaRuntimeTest, TheDefaultStreamIsRefusedWhileABlockingStreamIsCaptured) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  expectError([&] { runtime_->captureState(nullptr); }, ErrorCode::invalidUsage, "default stream");
  EXPECT_EQ(runtime_->captureState(blocking), CaptureState::active);
  EXPECT_NO_THROW(useEverything(*runtime_));
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaSuccess);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(blocking);
}

TEST_F(CudaRuntimeTest, CallsPutBackWhateverContextWasCurrent) {
  int last = gpus_ - 1;
  std::thread([&] {
    CUcontext current = nullptr;
    runtime_->allocate(last, 4096);
    ASSERT_EQ(driver().contextGetCurrent(&current), CUDA_SUCCESS);
    EXPECT_EQ(current, nullptr);
  }).join();
  if (gpus_ < 2) GTEST_SKIP() << "the rest needs 2 GPUs";
  runtime_->makeCurrent(0);
  runtime_->allocate(last, 4096);
  EXPECT_EQ(runtime_->currentDevice(), 0);
  {
    DeviceScope scope(*runtime_, last);
    EXPECT_EQ(runtime_->currentDevice(), last);
    int seen = -1;
    ASSERT_EQ(cudaGetDevice(&seen), cudaSuccess);
    EXPECT_EQ(seen, last);
  }
  EXPECT_EQ(runtime_->currentDevice(), 0);
}

}  // namespace
}  // namespace unisono::runtime::test

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--child") == 0) {
    return unisono::runtime::test::childMain(3);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
