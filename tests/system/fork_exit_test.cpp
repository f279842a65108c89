// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

// Children that are forked while the library is in use, and processes that exit in the middle of a
// call.
namespace unisono::system_test {
namespace {

// Runs `body` in a child, which then ends by exit() with all its destructors. Returns what `body`
// finds wrong, or an empty text; nothing if the child does not end.
std::optional<std::string> tryInChild(const std::function<std::string()>& body) {
  constexpr int kMilliseconds = 120'000;
  std::fflush(nullptr);
  int ends[2];
  if (::pipe(ends) != 0) return "pipe failed";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string wrong = body();
    const bool written =
        ::write(ends[1], wrong.data(), wrong.size()) == static_cast<ssize_t>(wrong.size());
#ifdef __SANITIZE_ADDRESS__
    // The threads of the parent do not exist here, so LeakSanitizer takes their memory for leaked.
    ::_exit(written ? 0 : 1);
#else
    std::exit(written ? 0 : 1);
#endif
  }
  ::close(ends[1]);
  std::string wrong;
  char buffer[512];
  pollfd end{.fd = ends[0], .events = POLLIN, .revents = 0};
  bool ended = false;
  while (!ended && ::poll(&end, 1, kMilliseconds) == 1) {
    const ssize_t bytes = ::read(ends[0], buffer, sizeof(buffer));
    ended = bytes <= 0;  // the child keeps its end open
    if (!ended) wrong.append(buffer, static_cast<size_t>(bytes));
  }
  ::close(ends[0]);
  if (!ended && child > 0) ::kill(child, SIGKILL);
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return wrong + " no child";
  if (!ended) return std::nullopt;
  if (status != 0) wrong += " the child ended with status " + std::to_string(status);
  return wrong;
}

std::string inChild(const std::function<std::string()>& body) {
#ifdef __SANITIZE_THREAD__
  // The runtime of ThreadSanitizer in GCC 12 does not take the lock of its allocator of stack
  // traces before a fork. If another thread holds it then, the child spins for it forever.
  constexpr int kAttempts = 3;
#else
  constexpr int kAttempts = 1;
#endif
  for (int attempt = 0; attempt < kAttempts; attempt++) {
    const std::optional<std::string> wrong = tryInChild(body);
    if (wrong) return *wrong;
  }
  return "the child does not end";
}

std::string expectRefused(const char* what, ncclResult_t result, const std::string& error) {
  if (result == ncclInvalidUsage && error.find("forked") != std::string::npos) return "";
  return std::string(what) + " returned " + std::to_string(result) + ": " + error + "\n";
}

bool holds(const void* memory, size_t bytes, std::byte value) {
  const auto* first = static_cast<const std::byte*>(memory);
  return std::all_of(first, first + bytes, [value](std::byte byte) { return byte == value; });
}

TEST(Fork, AChildCannotHarmDeviceMemory) {
  constexpr size_t kSmall = 16 << 10, kLarge = 4 << 20;
  const DeviceBuffer small(0, kSmall), large(0, kLarge);
  void* allocated = nullptr;
  ASSERT_OK(ncclMemAlloc(&allocated, kSmall));
  const std::vector<std::pair<void*, size_t>> buffers = {
      {small.as(), kSmall}, {large.as(), kLarge}, {allocated, kSmall}};
  for (const auto& [address, bytes] : buffers) {
    std::fill_n(static_cast<std::byte*>(address), bytes, std::byte{7});
  }
  EXPECT_EQ(inChild([&] {
              const ncclResult_t first = unisonoHostFree(small.as());
              const std::string firstError = unisonoHostGetLastError();
              const ncclResult_t second = unisonoHostFree(large.as());
              const std::string secondError = unisonoHostGetLastError();
              const ncclResult_t third = ncclMemFree(allocated);
              const std::string thirdError = ncclGetLastError(nullptr);
              return expectRefused("unisonoHostFree of few bytes", first, firstError) +
                     expectRefused("unisonoHostFree of many bytes", second, secondError) +
                     expectRefused("ncclMemFree", third, thirdError);
            }),
            "");
  for (const auto& [address, bytes] : buffers) EXPECT_TRUE(holds(address, bytes, std::byte{7}));
  EXPECT_OK(ncclMemFree(allocated));
}

// The ranks connect only after the child has ended, over the sockets that it shared.
TEST(Fork, ACommunicatorBelongsToItsProcess) {
  const Ranks ranks(2);
  const DeviceBuffer buffer(deviceOf(0), 1024);
  EXPECT_EQ(inChild([&] {
              const ncclComm_t comm = ranks.comm(0);
              const auto refused = [](const char* what, ncclResult_t result) {
                return expectRefused(what, result, ncclGetLastError(nullptr));
              };
              int count = 0;
              ncclResult_t state = ncclSuccess;
              return refused("ncclCommCount", ncclCommCount(comm, &count)) +
                     refused("ncclCommGetAsyncError", ncclCommGetAsyncError(comm, &state)) +
                     refused("ncclAllReduce", ncclAllReduce(buffer.as(), buffer.as(), 64, ncclInt,
                                                            ncclSum, comm, ranks.stream(0))) +
                     refused("ncclCommFinalize", ncclCommFinalize(comm)) +
                     refused("ncclCommDestroy", ncclCommDestroy(comm)) +
                     refused("ncclCommAbort", ncclCommAbort(ranks.comm(1)));
            }),
            "");
  onThreads(2, [&](int rank) {
    useOnce(ranks.comm(rank), 64);
    useOnce(ranks.comm(rank), 1 << 20);
  });
}

// Wherever the threads are that make communicators. Each process is a new one.
TEST(ExitDeathTest, DuringInitializationIsHarmless) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer no longer sees threads being joined once exit() has begun";
#endif
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  for (int attempt = 0; attempt < 50 && !HasFailure(); attempt++) {
    EXPECT_EXIT(
        {
          for (int thread = 0; thread < 3; thread++) {
            std::thread([] {
              while (true) {
                ncclComm_t comms[4];
                if (ncclCommInitAll(comms, 4, nullptr) != ncclSuccess) continue;
                for (ncclComm_t comm : comms) ncclCommDestroy(comm);
              }
            }).detach();
          }
          std::this_thread::sleep_for(std::chrono::microseconds(400) * attempt);
          std::exit(0);
        },
        ::testing::ExitedWithCode(0), "")
        << "attempt " << attempt;
  }
}

// Destructors of static objects run after those of the thread-local objects of the main thread.
TEST(ExitDeathTest, LateCallsOfStaticObjectsGetErrors) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  struct LateCaller {
    static void call() {
      if (ncclCommFinalize(reinterpret_cast<ncclComm_t>(1)) != ncclInvalidArgument) std::_Exit(1);
      if (std::strlen(ncclGetLastError(nullptr)) < 20) std::_Exit(2);
      if (ncclGroupStart() != ncclSuccess || ncclGroupEnd() != ncclSuccess) std::_Exit(3);
    }
    ~LateCaller() { call(); }
  };
  EXPECT_EXIT(
      {
        static const LateCaller late;
        LateCaller::call();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace unisono::system_test
