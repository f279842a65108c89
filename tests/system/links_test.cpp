// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "child_processes.h"

// Links between GPUs that change data. The device runtime reads the setting once, so every test
// runs in processes of its own.
namespace unisono::system_test {
namespace {

// Runs `body` in a process where the link between devices 0 and 1 changes data.
void withBrokenLink(const std::function<void()>& body) {
  EXPECT_EQ(runChildren(1,
                        [&](int) {
                          ::setenv("UNISONO_HOST_BROKEN_LINK", "0-1", 1);
                          body();
                        }),
            std::vector<int>{0});
}

// The result of an all-reduce and, if it failed, the error text of the communicator.
struct Outcome {
  ncclResult_t result = ncclSuccess;
  std::string text;
};
Outcome sum(ncclComm_t comm, int device, size_t count) {
  const DeviceBuffer buffer(device, count * sizeof(int));
  const DeviceStream stream(device);
  Outcome outcome{ncclAllReduce(buffer.as(), buffer.as(), count, ncclInt, ncclSum, comm, stream),
                  ""};
  if (outcome.result != ncclSuccess) outcome.text = ncclGetLastError(comm);
  return outcome;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Both ranks learn which link it is, whichever of them sees it first.
TEST(BrokenLinks, AreRefusedByName) {
  for (const size_t count : {size_t{10}, size_t{1'000'000}}) {
    withBrokenLink([count] {
      const Ranks ranks(2);
      onThreads(2, [&](int rank) {
        const Outcome outcome = sum(ranks.comm(rank), rank, count);
        EXPECT_NE(outcome.result, ncclSuccess);
        EXPECT_TRUE(has(outcome.text, "The link between two GPUs does not work")) << outcome.text;
        EXPECT_TRUE(has(outcome.text, "(rank 0)") && has(outcome.text, "(rank 1)")) << outcome.text;
        EXPECT_TRUE(has(outcome.text, "NCCL_P2P_DISABLE=1")) << outcome.text;
      });
    });
  }
}

TEST(BrokenLinks, BetweenProcesses) {
  const Pipe pipe;
  const Meeting done;
  const std::vector<int> results = runChildren(2, [&](int process) {
    ::setenv("UNISONO_HOST_BROKEN_LINK", "1-0", 1);
    const ncclComm_t comm = joinTwo(pipe, process);
    const Outcome outcome = sum(comm, process, 10);
    EXPECT_NE(outcome.result, ncclSuccess);
    EXPECT_TRUE(has(outcome.text, "The link between two GPUs does not work")) << outcome.text;
    done.wait(process);
    check(ncclCommAbort(comm));
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

// The first calls of two processes are messages, which they connect in different orders.
TEST(HealthyLinks, AreFoundToBeRight) {
  const Pipe pipe;
  const Meeting done;
  const std::vector<int> results = runChildren(2, [&](int process) {
    const ncclComm_t comm = joinTwo(pipe, process);
    const DeviceBuffer buffer(process, 2000);
    const DeviceStream stream(process);
    const int peer = 1 - process;
    check(ncclGroupStart());
    check(ncclSend(buffer.as(), 1000, ncclInt8, peer, comm, stream));
    check(ncclRecv(buffer.as() + 1000, 1000, ncclInt8, peer, comm, stream));
    check(ncclGroupEnd());
    stream.synchronize();
    useOnce(comm);
    useOnce(comm, 1'000'000);
    done.wait(process);
    check(ncclCommDestroy(comm));
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

// Ranks that do not use it, or that look away, work.
TEST(BrokenLinks, AreNotInTheWayOfOthers) {
  withBrokenLink([] {
    const int devices[] = {0, 2, 3};
    ncclComm_t comms[3];
    check(ncclCommInitAll(comms, 3, devices));
    onThreads(3, [&](int rank) {
      check(unisonoHostSetDevice(devices[rank]));
      useOnce(comms[rank]);
      useOnce(comms[rank], 300'000);
      check(ncclCommDestroy(comms[rank]));
    });
  });
  for (const char* setting : {"NCCL_P2P_DISABLE=1", "UNISONO_VERIFY_LINKS=0"}) {
    withBrokenLink([setting] {
      ::putenv(const_cast<char*>(setting));
      const Ranks ranks(2);
      onThreads(2, [&](int rank) { useOnce(ranks.comm(rank)); });
    });
  }
}

}  // namespace
}  // namespace unisono::system_test
