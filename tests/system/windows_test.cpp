// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "child_processes.h"
#include "mappings.h"

// Buffers of the application that a rank of another process maps (docs/decisions/0009-windows.md).
// What a process has mapped shows in its address space: buffers of the two have different sizes.
// Of NCCL's header since 2.29.
extern "C" {
ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr);
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr);
}

namespace unisono::system_test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
constexpr size_t kBytes = size_t{9} << 20;  // messages of up to 8 MiB use no windows

// The bytes of receive buffer `number` of a process, a size that nothing else has.
size_t bytesOf(int process, int number = 0) {
  return kBytes + static_cast<size_t>(2 * number + process + 1) * kPage;
}

// One of two ranks, which exchange messages as large as buffers.
class Exchanger {
 public:
  Exchanger(const Pipe& pipe, int process)
      : process_(process), comm_(joinTwo(pipe, process)), stream_(process) {}
  ~Exchanger() { destroy(); }
  void destroy() {
    if (comm_ != nullptr) ncclCommDestroy(std::exchange(comm_, nullptr));
  }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  void synchronize() const { stream_.synchronize(); }

  // Sends other bytes in each call, and throws if what was received is wrong.
  void exchange(const DeviceBuffer& into, size_t offset = 0) {
    const size_t here = into.bytes() - offset;
    const size_t there = here - static_cast<size_t>(process_ == 0 ? -1 : 1) * kPage;
    DeviceBuffer from(process_, there);
    fill(from.as(), there, 1 - process_);
    device::use(process_);
    check(unisonoHostMemset(into.as() + offset, 0xee, here));
    check(ncclGroupStart());
    check(ncclSend(from.as(), there, ncclUint8, 1 - process_, comm_, stream_));
    check(ncclRecv(into.as() + offset, here, ncclUint8, 1 - process_, comm_, stream_));
    check(ncclGroupEnd());
    stream_.synchronize();
    DeviceBuffer expected(process_, here);
    fill(expected.as(), here, process_);
    if (std::memcmp(into.as() + offset, expected.as(), here) != 0) {
      throw std::runtime_error("call " + std::to_string(calls_) + " received something else");
    }
    calls_++;
  }

 private:
  void fill(std::byte* bytes, size_t count, int to) const {
    auto value = static_cast<uint32_t>(calls_ * 2 + to) * 2654435761u;
    for (size_t i = 0; i < count; i++) bytes[i] = static_cast<std::byte>((value += 40503) >> 16);
  }

  int process_;
  int calls_ = 0;
  ncclComm_t comm_;
  DeviceStream stream_;
};

// Runs `body` in two processes whose ranks exchange messages.
void inTwoProcesses(
    const std::function<void(int, Exchanger&, const Meeting&)>& body,
    const std::function<void()>& settings = [] {}) {
  const Pipe pipe;
  const Meeting meeting;
  const std::vector<int> results = runChildren(2, [&](int process) {
    settings();
    Exchanger exchanger(pipe, process);
    body(process, exchanger, meeting);
    meeting.wait(process);
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

TEST(Windows, AreMappedAfterTheFirstCallAndUnmappedSoonAfterTheMemoryIsFreed) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    DeviceBuffer into(process, bytesOf(process));
    exchanger.exchange(into);
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 1));
    for (int i = 0; i < 5; i++) exchanger.exchange(into, static_cast<size_t>(i) * 48);
    EXPECT_EQ(mappingsOf(bytesOf(1 - process)), 1);
    meeting.wait(process);
    into = DeviceBuffer();
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0, kSanitized ? 10s : 1s));
  });
}

// Buffers that span several allocations, as with PyTorch's expandable segments. None of the buffers
// here ends with a whole one.
constexpr size_t kSegmentBytes = size_t{2} << 20;
void useSegments() {
  ::setenv("UNISONO_HOST_SEGMENT_BYTES", std::to_string(kSegmentBytes).c_str(), 1);
}

TEST(Windows, OfSeveralAllocationsAreMappedAtConsecutiveAddresses) {
  inTwoProcesses(
      [](int process, Exchanger& exchanger, const Meeting& meeting) {
        DeviceBuffer into(process, bytesOf(process));
        const size_t tail = bytesOf(1 - process) % kSegmentBytes;
        exchanger.exchange(into);
        EXPECT_TRUE(waitForMappings(tail, 1));
        const int whole = mappingsOf(kSegmentBytes);
        for (int i = 0; i < 5; i++) exchanger.exchange(into, static_cast<size_t>(i) * 48);
        EXPECT_EQ(mappingsOf(tail), 1);
        EXPECT_EQ(mappingsOf(kSegmentBytes), whole);
        meeting.wait(process);
        into = DeviceBuffer();
        EXPECT_TRUE(waitForMappings(tail, 0));
      },
      useSegments);
}

// Every collective of the two kinds of algorithms, before and after the buffers are mapped.
void testCollectives(bool direct, bool segments = false) {
  const auto body = [=](int process, Exchanger& exchanger, const Meeting& meeting) {
    const auto rank = static_cast<uint32_t>(process);
    const size_t count = kBytes / sizeof(uint32_t) + 8, half = count / 2;
    // What a peer maps, or the last part of it.
    const auto mappedOf = [&](size_t bytes) { return segments ? bytes % kSegmentBytes : bytes; };
    const size_t inputBytes = mappedOf(bytesOf(1 - process, 1));
    const size_t outputBytes = mappedOf(2 * bytesOf(1 - process));
    DeviceBuffer in(process, bytesOf(process, 1)), out(process, 2 * bytesOf(process));
    const auto inputOf = [](uint32_t r, size_t i) {
      return static_cast<uint32_t>(i * 7 + 1) * (r + 1);
    };
    auto* input = reinterpret_cast<uint32_t*>(in.as<std::byte>());
    for (size_t i = 0; i < count; i++) input[i] = inputOf(rank, i);
    const int calls = direct ? 5 : 3;
    for (int round = 0; round < 2 * calls; round++) {
      // Not aligned as the input is.
      auto* output = reinterpret_cast<uint32_t*>(out.as()) + (round % 2 == 0 ? 0 : 1);
      const int call = round % calls;
      check(unisonoHostMemset(output, 0xee, 2 * kBytes + 64));
      const ncclComm_t comm = exchanger.comm();
      const cudaStream_t stream = exchanger.stream();
      if (call == 0) check(ncclAllReduce(input, output, count, ncclUint32, ncclSum, comm, stream));
      if (call == 1) check(ncclAllGather(input, output, count, ncclUint32, comm, stream));
      if (call == 2) check(ncclBroadcast(input, output, count, ncclUint32, 1, comm, stream));
      if (call == 3) {
        check(ncclReduceScatter(input, output, half, ncclUint32, ncclSum, comm, stream));
      }
      if (call == 4) check(ncclReduce(input, output, count, ncclUint32, ncclSum, 0, comm, stream));
      exchanger.synchronize();
      size_t wrong = 0;
      for (size_t i = 0; i < count; i++) {
        const uint32_t first = inputOf(0, i), second = inputOf(1, i);
        const size_t part = rank * half + i;
        wrong += call == 0 && output[i] != first + second ? 1 : 0;
        wrong += call == 1 && (output[i] != first || output[count + i] != second) ? 1 : 0;
        wrong += call == 2 && output[i] != second ? 1 : 0;
        wrong += call == 3 && i < half && output[i] != inputOf(0, part) + inputOf(1, part) ? 1 : 0;
        wrong += call == 4 && rank == 0 && output[i] != first + second ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0u) << "call " << call << " of round " << round;
      // The first call is the only one before an all-gather, which fills the whole buffer.
      EXPECT_TRUE((segments && round == 0) || waitForMappings(outputBytes, 1));
      EXPECT_TRUE(!direct || waitForMappings(inputBytes, 1));
      meeting.wait(process);
    }
  };
  inTwoProcesses(body, [=] {
    if (segments) useSegments();
    ::setenv("NCCL_ALGO", direct ? "Direct,TwoShot" : "Ring", 1);
    ::setenv("NCCL_PROTO", direct ? "LL128" : "Simple", 1);
  });
}
TEST(Windows, TakeTheResultsOfCollectives) {
  testCollectives(false);
}
TEST(Windows, AreUsedByDirectCollectives) {
  testCollectives(true);
}
TEST(Windows, OfSeveralAllocationsTakeTheResultsOfCollectives) {
  testCollectives(false, true);
}
TEST(Windows, OfSeveralAllocationsAreUsedByDirectCollectives) {
  testCollectives(true, true);
}

TEST(Windows, MemoryThatIsAllocatedAgainIsAnotherWindow) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    std::set<void*> addresses;
    int again = 0;
    for (int i = 0; i < (kSanitized ? 6 : 12); i++) {
      DeviceBuffer into(process, bytesOf(process));
      again += addresses.insert(into.as()).second ? 0 : 1;
      exchanger.exchange(into);
      // Sometimes the mapping of the new memory is there, sometimes that of the old memory still
      // is.
      if (i % 3 == 0) waitForMappings(bytesOf(1 - process), 1, 1s);
      meeting.wait(process);
      exchanger.exchange(into);
      exchanger.exchange(into);
    }
    EXPECT_GT(again, 0) << "the allocator does not use addresses again";
  });
}

TEST(Windows, OneSettingTurnsThemOff) {
  for (const bool both : {true, false}) {
    inTwoProcesses(
        [both](int process, Exchanger& exchanger, const Meeting&) {
          if (!both && process == 1) ::unsetenv("UNISONO_ZERO_COPY");
          DeviceBuffer into(process, bytesOf(process));
          for (int i = 0; i < 3; i++) exchanger.exchange(into);
          EXPECT_FALSE(waitForMappings(bytesOf(1 - process), 1, 600ms));
          exchanger.exchange(into);
        },
        [] { ::setenv("UNISONO_ZERO_COPY", "0", 1); });
  }
}

TEST(Windows, AreBounded) {
  const Pipe wasFast[2];  // by the process that reads
  inTwoProcesses(
      [&](int process, Exchanger& exchanger, const Meeting& meeting) {
        const Clock::time_point start = Clock::now();
        std::vector<DeviceBuffer> buffers;
        for (int i = 0; i < 3; i++) {
          buffers.emplace_back(process, bytesOf(process, i));
          exchanger.exchange(buffers.back());
        }
        const int other = 1 - process;
        wasFast[other].write(Clock::now() - start < 1s);
        EXPECT_TRUE(waitForMappings(bytesOf(other, 1), 1));
        // On a busy machine the first window may be idle already and make room for the third.
        if (wasFast[process].read<bool>()) {
          EXPECT_TRUE(waitForMappings(bytesOf(other, 0), 1));
          EXPECT_FALSE(waitForMappings(bytesOf(other, 2), 1, 500ms));
        }
        meeting.wait(process);
        // After a while, the window that was not used for the longest time makes room.
        std::this_thread::sleep_for(1200ms);
        exchanger.exchange(buffers[0]);
        exchanger.exchange(buffers[2]);
        EXPECT_TRUE(waitForMappings(bytesOf(other, 2), 1));
        EXPECT_TRUE(waitForMappings(bytesOf(other, 1), 0));
        EXPECT_TRUE(waitForMappings(bytesOf(other, 0), 1));
        for (const DeviceBuffer& buffer : buffers) exchanger.exchange(buffer);
        meeting.wait(process);
      },
      [] {
        ::setenv("UNISONO_ZERO_COPY_BYTES", std::to_string(2 * kBytes + kBytes / 2).c_str(), 1);
      });
}

// The receiver sees the first bytes come, and kills the sender, which holds its offer. The stream
// ends when the sender's process has ended, not when nothing has come for a long time.
TEST(Windows, EndWithTheProcessThatStoresInThem) {
  constexpr size_t kLarge = size_t{96} << 20;
  constexpr uint8_t kPoison = 0xee;
  const Pipe pipe, toReceiver;
  const Meeting meeting;
  const std::vector<int> results = runChildren(2, [&](int process) {
    ncclComm_t comm = joinTwo(pipe, process);
    const DeviceStream stream(process);
    device::use(process);
    const DeviceBuffer buffer(process, kLarge);
    const auto transfer = [&] {
      check(process == 0 ? ncclRecv(buffer.as(), kLarge, ncclUint8, 1, comm, stream)
                         : ncclSend(buffer.as(), kLarge, ncclUint8, 0, comm, stream));
    };
    transfer();
    stream.synchronize();
    if (process == 1) {
      EXPECT_TRUE(waitForMappings(kLarge, 2)) << "its own buffer and the receiver's";
      toReceiver.write(::getpid());
      meeting.wait(process);
      transfer();
      for (;;) ::pause();
    }
    const auto sender = toReceiver.read<pid_t>();
    check(unisonoHostMemset(buffer.as(), kPoison, kLarge));
    meeting.wait(process);
    transfer();
    const auto* data = buffer.as<volatile uint8_t>();
    while (data[0] == kPoison) ::usleep(10);
    ::kill(sender, SIGKILL);
    const Clock::time_point start = Clock::now();
    EXPECT_OK(unisonoHostStreamSynchronize(stream));
    EXPECT_LT(Clock::now() - start, 2s * (kSanitized ? 3 : 1));
    EXPECT_NE(std::memchr(buffer.as(), kPoison, kLarge), nullptr) << "it was killed too late";
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("Rank 1 (process "), std::string::npos);
    EXPECT_OK(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 100 + SIGKILL}));
}

TEST(Windows, EndWithTheCommunicatorOfTheirOwner) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    DeviceBuffer into(process, bytesOf(process));
    exchanger.exchange(into);
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 1));
    meeting.wait(process);
    if (process == 1) {
      exchanger.destroy();
    } else {
      EXPECT_TRUE(waitForMappings(bytesOf(1), 0));
    }
    meeting.wait(process);
    exchanger.destroy();
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0, 2s));
    EXPECT_EQ(mappingsOf(bytesOf(process)), 1) << "this process's own buffer";
  });
}

TEST(Windows, OfRegisteredBuffersAreMappedBeforeTheFirstCall) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    DeviceBuffer into(process, bytesOf(process));
    void* handles[2] = {};
    check(ncclCommRegister(exchanger.comm(), into.as(), into.bytes(), &handles[0]));
    check(ncclCommRegister(exchanger.comm(), into.as() + 4096, 4096, &handles[1]));
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 1));
    exchanger.exchange(into);
    meeting.wait(process);
    check(ncclCommDeregister(exchanger.comm(), handles[0]));
    EXPECT_FALSE(waitForMappings(bytesOf(1 - process), 0, 400ms)) << "it is registered once more";
    exchanger.exchange(into);
    meeting.wait(process);
    check(ncclCommDeregister(exchanger.comm(), handles[1]));
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0));
    meeting.wait(process);
    exchanger.exchange(into);
    // A handle may outlive its memory.
    check(ncclCommRegister(exchanger.comm(), into.as(), into.bytes(), &handles[0]));
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 1));
    meeting.wait(process);
    into = DeviceBuffer();
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0));
    check(ncclCommDeregister(exchanger.comm(), handles[0]));
  });
}

// Both ranks register two buffers in one group, on the communicator that it gets.
void registerTwo(ncclComm_t comm, const DeviceBuffer (&buffers)[2], ncclWindow_t (&windows)[2]) {
  check(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    check(ncclCommWindowRegister(comm, buffers[i].as(), buffers[i].bytes(), &windows[i],
                                 NCCL_WIN_COLL_SYMMETRIC));
  }
  checkFinished(comm, ncclGroupEnd());
}

TEST(Windows, OfTheApiAreMappedWhenTheCallReturns) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    const DeviceBuffer into[2] = {{process, bytesOf(process)}, {process, bytesOf(process, 1)}};
    const int other = 1 - process;
    for (int round = 0; round < 3; round++) {
      ncclWindow_t windows[2] = {};
      const Clock::time_point start = Clock::now();
      registerTwo(exchanger.comm(), into, windows);
      EXPECT_LT(Clock::now() - start, 4s);
      for (int i = 0; i < 2; i++) {
        EXPECT_EQ(mappingsOf(bytesOf(other, i)), 1) << "buffer " << i << " of round " << round;
        void* address = nullptr;
        check(ncclWinGetUserPtr(exchanger.comm(), windows[i], &address));
        EXPECT_EQ(address, into[i].as());
      }
      meeting.wait(process);
      exchanger.exchange(into[0]);
      check(ncclCommWindowDeregister(exchanger.comm(), windows[0]));
      EXPECT_TRUE(waitForMappings(bytesOf(other, 0), 0));
      EXPECT_EQ(mappingsOf(bytesOf(other, 1)), 1);
      meeting.wait(process);
      exchanger.exchange(into[1]);
      check(ncclCommWindowDeregister(exchanger.comm(), windows[1]));
      EXPECT_TRUE(waitForMappings(bytesOf(other, 1), 0));
      meeting.wait(process);
    }
  });
}

// Where byte `offset` of a rank's buffer is.
std::byte* addressOf(ncclWindow_t window, size_t offset, int rank) {
  void* address = nullptr;
  check(ncclGetPeerDevicePointer(window, offset, rank, &address));
  return static_cast<std::byte*>(address);
}

TEST(Windows, OfTheApiGiveTheAddressesOfPeers) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    constexpr std::byte kRead[2] = {std::byte{0x11}, std::byte{0x22}};
    constexpr std::byte kStored[2] = {std::byte{0x33}, std::byte{0x44}};
    constexpr size_t kOffset = kPage + 8;
    const int other = 1 - process;
    ncclWindow_t window = nullptr;
    {
      const DeviceBuffer buffer(process, bytesOf(process));
      buffer.as()[kOffset] = kRead[process];
      check(ncclCommWindowRegister(exchanger.comm(), buffer.as(), buffer.bytes(), &window, 0));
      EXPECT_EQ(addressOf(window, kOffset, process), buffer.as() + kOffset);
      std::byte* const there = addressOf(window, kOffset, other);
      ASSERT_NE(there, nullptr);
      meeting.wait(process);
      EXPECT_EQ(*there, kRead[other]);
      there[1] = kStored[process];
      meeting.wait(process);
      EXPECT_EQ(buffer.as()[kOffset + 1], kStored[other]);
      meeting.wait(process);
    }
    // The address holds even if the peer has freed its buffer too early.
    std::this_thread::sleep_for(500ms);
    EXPECT_EQ(*addressOf(window, kOffset, other), kRead[other]);
    check(ncclCommWindowDeregister(exchanger.comm(), window));
    EXPECT_TRUE(waitForMappings(bytesOf(other), 0));
  });
}

TEST(Windows, OfTheApiAreUnmappedWithTheirCommunicator) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    const DeviceBuffer buffer(process, bytesOf(process));
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(exchanger.comm(), buffer.as(), buffer.bytes(), &window, 0));
    EXPECT_NE(addressOf(window, 0, 1 - process), nullptr);
    exchanger.exchange(buffer);
    meeting.wait(process);
    exchanger.destroy();
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0)) << "nobody has deregistered the window";
    void* untouched = buffer.as();
    EXPECT_NE(ncclGetPeerDevicePointer(window, 0, 1 - process, &untouched), ncclSuccess);
    EXPECT_EQ(untouched, buffer.as());
  });
}

TEST(Windows, OfTheApiWorkWhereNothingIsMapped) {
  for (const char* bytes : {"0", "1000000"}) {
    inTwoProcesses(
        [](int process, Exchanger& exchanger, const Meeting&) {
          const DeviceBuffer into[2] = {{process, bytesOf(process)},
                                        {process, bytesOf(process, 1)}};
          ncclWindow_t windows[2] = {};
          registerTwo(exchanger.comm(), into, windows);
          EXPECT_EQ(mappingsOf(bytesOf(1 - process)), 0);
          for (int i = 0; i < 2; i++) {
            exchanger.exchange(into[i]);
            EXPECT_EQ(addressOf(windows[i], 0, process), into[i].as());
            EXPECT_EQ(addressOf(windows[i], 0, 1 - process), nullptr);
            check(ncclCommWindowDeregister(exchanger.comm(), windows[i]));
          }
        },
        [bytes] {
          ::setenv(bytes[0] == '0' ? "UNISONO_ZERO_COPY" : "UNISONO_ZERO_COPY_BYTES", bytes, 1);
        });
  }
}

TEST(Windows, OfANonblockingCommunicatorAreRegisteredInTheBackground) {
  const Pipe pipe;
  const Meeting meeting;
  const std::vector<int> results = runChildren(2, [&](int process) {
    check(unisonoHostSetDevice(process));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    const ncclUniqueId id = sharedId(pipe, process, 2);
    const ncclResult_t started = ncclCommInitRankConfig(&comm, 2, id, process, &config);
    checkFinished(comm, started);
    const DeviceBuffer into[2] = {{process, bytesOf(process)}, {process, bytesOf(process, 1)}};
    ncclWindow_t windows[2] = {};
    registerTwo(comm, into, windows);
    for (int i = 0; i < 2; i++) EXPECT_EQ(mappingsOf(bytesOf(1 - process, i)), 1);
    meeting.wait(process);
    for (ncclWindow_t window : windows) check(ncclCommWindowDeregister(comm, window));
    checkFinished(comm, ncclCommFinalize(comm));
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, std::vector<int>({0, 0}));
}

TEST(Windows, OfTheApiAreNotWaitedForWithoutEndWhenAnotherRankAborts) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    const DeviceBuffer into(process, bytesOf(process));
    meeting.wait(process);
    if (process == 1) {
      check(ncclCommAbort(exchanger.comm()));
    } else {
      ncclWindow_t window = nullptr;
      EXPECT_NE(ncclCommWindowRegister(exchanger.comm(), into.as(), into.bytes(), &window,
                                       NCCL_WIN_COLL_SYMMETRIC),
                ncclSuccess);
      EXPECT_EQ(window, nullptr);
      EXPECT_STRNE(ncclGetLastError(nullptr), "");
      check(ncclCommAbort(exchanger.comm()));
    }
    meeting.wait(process);
    std::_Exit(::testing::Test::HasFailure() ? 1 : 0);  // the communicator was aborted
  });
}

// Rank 1 registers nothing.
TEST(Windows, OfTheApiThatFailDoNotHoldUpTheNextOnes) {
  inChild([] {
    const Setting timeout("UNISONO_BOOTSTRAP_TIMEOUT", "1");
    const Ranks ranks(2);
    const DeviceBuffer into(deviceOf(0), bytesOf(0));
    auto registering = std::async(std::launch::async, [&] {
      device::use(deviceOf(0));
      ncclWindow_t windows[2] = {};
      check(ncclGroupStart());
      for (ncclWindow_t& window : windows) {
        check(ncclCommWindowRegister(ranks.comm(0), into.as(), into.bytes(), &window,
                                     NCCL_WIN_COLL_SYMMETRIC));
      }
      return ncclGroupEnd();
    });
    if (registering.wait_for(std::chrono::seconds(30)) != std::future_status::ready) {
      ADD_FAILURE() << "the second registration waits for the first one, which has failed";
      ncclCommAbort(ranks.comm(0));
    }
    EXPECT_EQ(registering.get(), ncclRemoteError);
  });
}

TEST(Windows, AreLetGoByAnAbort) {
  inTwoProcesses([](int process, Exchanger& exchanger, const Meeting& meeting) {
    DeviceBuffer into(process, bytesOf(process));
    for (int i = 0; i < 3; i++) exchanger.exchange(into);
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 1));
    // A message that its receiver waits for, and its sender never sends.
    DeviceStream stream(process);
    if (process == 0) {
      check(ncclRecv(into.as(), into.bytes(), ncclUint8, 1, exchanger.comm(), stream));
    }
    meeting.wait(process);
    check(ncclCommAbort(exchanger.comm()));
    stream.synchronize();
    EXPECT_TRUE(waitForMappings(bytesOf(1 - process), 0));
    into = DeviceBuffer();
    meeting.wait(process);
    std::_Exit(::testing::Test::HasFailure() ? 1 : 0);  // the communicator was aborted
  });
}

}  // namespace
}  // namespace unisono::system_test
