// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

// Aborts of communicators whose work has not begun, because something else is stuck on the user's
// stream. Simulated devices only: memory that is freed is unmapped at once, so that a kernel that
// touches it crashes the test.
namespace unisono::system_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kForever = seconds(60);
// Larger than what shares a mapping with other buffers.
constexpr size_t kBytes = 4 << 20;

// A call that waits for its peer on `stream` until the end.
class StuckStream {
 public:
  explicit StuckStream(int rank = 0)
      : ranks_(2), buffer_(deviceOf(rank), 1024), stream_(deviceOf(rank)), rank_(rank) {
    onThreads(2, [&](int r) { useOnce(ranks_.comm(r), 64); });
    device::use(deviceOf(rank));
    check(ncclAllReduce(buffer_.as(), buffer_.as(), 64, ncclInt, ncclSum, ranks_.comm(rank),
                        stream_));
  }
  ~StuckStream() { release(); }

  cudaStream_t stream() const { return stream_; }
  ncclComm_t comm() const { return ranks_.comm(rank_); }
  bool isStuck() const { return !device::isIdle(stream_); }
  void release() {
    if (!std::exchange(released_, true)) {
      ncclCommAbort(ranks_.comm(rank_));
      stream_.synchronize();
    }
  }
  void markReleased() { released_ = true; }

 private:
  Ranks ranks_;
  DeviceBuffer buffer_;
  DeviceStream stream_;
  int rank_;
  bool released_ = false;
};

// Returns false, and releases `stuck`, if `call` waits for the stream.
bool returnsAtOnce(StuckStream& stuck, const std::function<void()>& call) {
  auto running = std::async(std::launch::async, call);
  const bool returned = running.wait_for(kForever) == std::future_status::ready;
  if (!returned) stuck.release();
  running.get();
  return returned;
}

struct LateCall {
  const char* name;
  int ranks;
  std::function<ncclResult_t(void* in, void* out, ncclComm_t comm, cudaStream_t stream)> call;
};

const std::vector<LateCall>& lateCalls() {
  static const std::vector<LateCall> calls = {
      {"Ring", 2,
       [](void* in, void* out, ncclComm_t comm, cudaStream_t stream) {
         return ncclAllReduce(in, out, kBytes / 4, ncclInt, ncclSum, comm, stream);
       }},
      {"OneShot", 2,
       [](void* in, void* out, ncclComm_t comm, cudaStream_t stream) {
         return ncclAllReduce(in, out, 256, ncclInt, ncclSum, comm, stream);
       }},
      {"OneShotWithFactor", 2,
       [](void* in, void* out, ncclComm_t comm, cudaStream_t stream) {
         ncclRedOp_t multiply;
         check(ncclRedOpCreatePreMulSum(&multiply, in, ncclFloat, ncclScalarDevice, comm));
         const ncclResult_t result = ncclAllReduce(in, out, 256, ncclFloat, multiply, comm, stream);
         check(ncclRedOpDestroy(multiply, comm));
         return result;
       }},
      {"Send", 2,
       [](void* in, void*, ncclComm_t comm, cudaStream_t stream) {
         return ncclSend(in, kBytes, ncclInt8, 1, comm, stream);
       }},
      {"Receive", 2,
       [](void*, void* out, ncclComm_t comm, cudaStream_t stream) {
         return ncclRecv(out, kBytes, ncclInt8, 1, comm, stream);
       }},
      {"AllToAllInPlace", 2,
       [](void* in, void*, ncclComm_t comm, cudaStream_t stream) {
         return ncclAlltoAll(in, in, kBytes / 2, ncclInt8, comm, stream);
       }},
      {"SendToItself", 1,
       [](void* in, void* out, ncclComm_t comm, cudaStream_t stream) {
         check(ncclGroupStart());
         check(ncclSend(in, kBytes, ncclInt8, 0, comm, stream));
         check(ncclRecv(out, kBytes, ncclInt8, 0, comm, stream));
         return ncclGroupEnd();
       }},
      {"LocalCopy", 1,
       [](void* in, void* out, ncclComm_t comm, cudaStream_t stream) {
         return ncclAllReduce(in, out, kBytes, ncclInt8, ncclSum, comm, stream);
       }},
  };
  return calls;
}

class LateKernels : public ::testing::TestWithParam<size_t> {};

// Rank 1 never answers; where it is needed for connecting, it made the same call before.
TEST_P(LateKernels, TouchNoMemoryOfTheUser) {
  const LateCall& late = lateCalls()[GetParam()];
  StuckStream stuck;
  const Ranks ranks(late.ranks);
  {
    std::vector<DeviceBuffer> in, out;
    for (int rank = 0; rank < late.ranks; rank++) {
      in.emplace_back(deviceOf(rank), kBytes);
      out.emplace_back(deviceOf(rank), kBytes);
    }
    const std::string name = late.name;
    onThreads(late.ranks, [&](int rank) {
      const auto index = static_cast<size_t>(rank);
      void *from = in[index].as(), *to = out[index].as();
      const cudaStream_t stream = ranks.stream(rank);
      if (rank == 0) {
        check(late.call(from, to, ranks.comm(0), stream));
      } else if (name == "Send") {
        check(ncclRecv(to, kBytes, ncclInt8, 0, ranks.comm(1), stream));
      } else if (name == "Receive") {
        check(ncclSend(from, kBytes, ncclInt8, 0, ranks.comm(1), stream));
      } else {
        check(late.call(from, to, ranks.comm(1), stream));
      }
      device::synchronize(stream);
    });
    device::use(deviceOf(0));
    check(late.call(in[0].as(), out[0].as(), ranks.comm(0), stuck.stream()));
    ASSERT_TRUE(stuck.isStuck());
    EXPECT_TRUE(returnsAtOnce(stuck, [&] { EXPECT_OK(ncclCommAbort(ranks.comm(0))); }))
        << "the abort waited for the kernel of another communicator";
    EXPECT_TRUE(stuck.isStuck());
  }                 // the user frees the buffers
  stuck.release();  // and now the kernel runs
  if (late.ranks > 1) {
    EXPECT_OK(ncclCommAbort(ranks.comm(1)));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, LateKernels, ::testing::Range<size_t>(0, lateCalls().size()),
                         [](const auto& test) { return lateCalls()[test.param].name; });

TEST(LateAborts, InOneGroupReturnAtOnce) {
  StuckStream stuck;
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank), 64); });
  const DeviceBuffer buffer(deviceOf(0), 1024);
  check(
      ncclAllReduce(buffer.as(), buffer.as(), 64, ncclInt, ncclSum, ranks.comm(0), stuck.stream()));
  EXPECT_TRUE(returnsAtOnce(stuck, [&] {
    EXPECT_OK(ncclGroupStart());
    EXPECT_OK(ncclCommAbort(ranks.comm(0)));
    EXPECT_TRUE(stuck.isStuck());
    EXPECT_OK(ncclCommAbort(stuck.comm()));
    EXPECT_OK(ncclGroupEnd());
  }));
  stuck.markReleased();
  device::synchronize(stuck.stream());
  EXPECT_OK(ncclCommAbort(ranks.comm(1)));
}

TEST(LateAborts, OfACallInTheSameGroupRefuseTheGroup) {
  const Ranks ranks(1);
  const DeviceBuffer buffer(deviceOf(0), 1024);
  device::use(deviceOf(0));
  EXPECT_OK(ncclGroupStart());
  EXPECT_OK(ncclAllReduce(buffer.as(), buffer.as(), 64, ncclInt, ncclSum, ranks.comm(0),
                          ranks.stream(0)));
  EXPECT_OK(ncclCommAbort(ranks.comm(0)));
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("aborted"), std::string::npos);
}

// Every communicator has several descriptors and a thread's worth of memory on the device.
TEST(LateAborts, ReleaseEverythingOnceTheDeviceHasFinished) {
  { StuckStream warmUp; }
  const auto waitForDescriptors = [](int wanted) {
    for (int look = 0; look < 6000 && openDescriptors() > wanted; look++) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    return openDescriptors();
  };
  const int before = openDescriptors();
  {
    StuckStream stuck;
    const DeviceBuffer buffer(deviceOf(0), 1024);
    const int without = openDescriptors();
    {
      const Ranks ranks(2);
      onThreads(2, [&](int rank) { useOnce(ranks.comm(rank), 64); });
      device::use(deviceOf(0));
      check(ncclAllReduce(buffer.as(), buffer.as(), 64, ncclInt, ncclSum, ranks.comm(0),
                          stuck.stream()));
      EXPECT_TRUE(returnsAtOnce(stuck, [&] { EXPECT_OK(ncclCommAbort(ranks.comm(0))); }));
      EXPECT_OK(ncclCommAbort(ranks.comm(1)));
    }
    EXPECT_GT(openDescriptors(), without) << "the memory that the kernel will read is gone";
    stuck.release();
    EXPECT_LE(waitForDescriptors(without), without);
  }
  EXPECT_LE(waitForDescriptors(before), before);
}

// Another thread is inside ncclCommFinalize, which waits for the same stream.
TEST(LateAborts, EndAFinalizeOfAnotherThread) {
  StuckStream stuck;
  const Ranks ranks(2);
  onThreads(2, [&](int rank) { useOnce(ranks.comm(rank), 64); });
  const DeviceBuffer buffer(deviceOf(0), 1024);
  device::use(deviceOf(0));
  check(
      ncclAllReduce(buffer.as(), buffer.as(), 64, ncclInt, ncclSum, ranks.comm(0), stuck.stream()));
  auto finalizing = std::async(std::launch::async, [&] { return ncclCommFinalize(ranks.comm(0)); });
  EXPECT_EQ(finalizing.wait_for(milliseconds(100)), std::future_status::timeout);
  EXPECT_TRUE(returnsAtOnce(stuck, [&] { EXPECT_OK(ncclCommAbort(ranks.comm(0))); }));
  EXPECT_EQ(finalizing.wait_for(kForever), std::future_status::ready)
      << "ncclCommFinalize still waits for the stream";
  EXPECT_TRUE(stuck.isStuck());
  stuck.release();
  EXPECT_EQ(finalizing.get(), ncclInvalidUsage);
  EXPECT_OK(ncclCommAbort(ranks.comm(1)));
}

// Threads abort communicators in a random order, in groups and alone, while others are stuck.
TEST(LateAborts, OfManyCommunicatorsInAnyOrder) {
  constexpr int kPairs = 32;
  const char* given = std::getenv("UNISONO_TEST_SEED");
  const auto seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  SCOPED_TRACE("UNISONO_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::deque<Ranks> pairs;
  const DeviceBuffer first(deviceOf(0), kBytes), second(deviceOf(1), kBytes);
  for (int pair = 0; pair < kPairs; pair++) {
    pairs.emplace_back(2);
    onThreads(2, [&](int rank) { useOnce(pairs.back().comm(rank), 64); });
  }
  // Calls of all pairs share two streams, so that nearly all of them wait for another pair's.
  const DeviceStream streams[] = {DeviceStream(deviceOf(0)), DeviceStream(deviceOf(1))};
  std::vector<ncclComm_t> comms;
  for (const Ranks& ranks : pairs) {
    const int rank = static_cast<int>(random() % 2);
    const size_t count = random() % 2 == 0 ? 64 : kBytes / sizeof(int);
    void* buffer = rank == 0 ? first.as() : second.as();
    device::use(deviceOf(rank));
    if (count == 64) {
      check(
          ncclAllReduce(buffer, buffer, count, ncclInt, ncclSum, ranks.comm(rank), streams[rank]));
    }
    comms.push_back(ranks.comm(0));
    comms.push_back(ranks.comm(1));
  }
  std::shuffle(comms.begin(), comms.end(), random);
  std::atomic<size_t> next{0};
  onThreads(4, [&](int thread) {
    for (size_t i = next++; i < comms.size(); i = next++) {
      const bool inGroup = (i + static_cast<size_t>(thread)) % 3 == 0;
      if (inGroup) check(ncclGroupStart());
      check(ncclCommAbort(comms[i]));
      if (inGroup) check(ncclGroupEnd());
    }
  });
  for (const DeviceStream& stream : streams) stream.synchronize();
}

// A receiver that offered its buffer is aborted and frees it; then the sender comes, whose kernel
// was queued before.
TEST(Offers, OfAnAbortedReceiverAreNotTaken) {
  const Setting grace("UNISONO_FAILURE_GRACE", "60000");
  const Ranks ranks(2);
  const DeviceBuffer from(deviceOf(1), kBytes);
  StuckStream stuck(1);
  {
    const DeviceBuffer to(deviceOf(0), kBytes);
    onThreads(2, [&](int rank) {
      for (int call = 0; call < 2; call++) {
        if (rank == 0) {
          check(ncclRecv(to.as(), kBytes, ncclInt8, 1, ranks.comm(0), ranks.stream(0)));
        }
        if (rank == 1) {
          check(ncclSend(from.as(), kBytes, ncclInt8, 0, ranks.comm(1),
                         call == 0 ? ranks.stream(1) : stuck.stream()));
        }
      }
    });
    device::synchronize(ranks.stream(1));
    EXPECT_OK(ncclCommAbort(ranks.comm(0)));
    device::synchronize(ranks.stream(0));
  }
  check(ncclCommAbort(stuck.comm()));
  stuck.markReleased();
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(stuck.isStuck()) << "the message went somewhere";
  EXPECT_OK(ncclCommAbort(ranks.comm(1)));
  device::synchronize(stuck.stream());
}

// The process exits while memory of an aborted communicator is still to be released.
TEST(LateAbortsDeathTest, DoNotHoldUpAnExit) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        auto* stuck = new StuckStream;
        auto* ranks = new Ranks(2);
        onThreads(2, [&](int rank) { useOnce(ranks->comm(rank), 64); });
        auto* buffer = new DeviceBuffer(deviceOf(0), 1024);
        device::use(deviceOf(0));
        check(ncclAllReduce(buffer->as(), buffer->as(), 64, ncclInt, ncclSum, ranks->comm(0),
                            stuck->stream()));
        check(ncclCommAbort(ranks->comm(0)));
        std::exit(stuck->isStuck() ? 7 : 1);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace unisono::system_test
