// SPDX-License-Identifier: Apache-2.0
// net_rank RANK RANKS SECONDS: one rank, in a process of its own, that calls ncclAllReduce for so
// long and checks every result. NCCL_COMM_ID says where rank 0 is. Prints "begin" after the first
// call and then "end N", where N is the number of calls, or "error TEXT".
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

namespace unisono::system_test {
namespace {

using Clock = std::chrono::steady_clock;

// Returns whether the communicator still works.
bool sumOnce(ncclComm_t comm, int rank, int ranks, bool goesOn, bool& othersGoOn) {
  constexpr size_t kCount = 1'000'003;
  static const DeviceBuffer buffer(0, kCount * sizeof(int));
  static const DeviceStream stream(0);
  static int round = 0;
  round++;
  // The last element counts the ranks that want another call.
  std::vector<int> values(kCount, (rank + 1) * (round % 1000));
  values.back() = goesOn ? 1 : 0;
  device::copy(buffer.as(), values.data(), buffer.bytes());
  if (ncclAllReduce(buffer.as(), buffer.as(), kCount, ncclInt, ncclSum, comm, stream) !=
      ncclSuccess) {
    return false;
  }
  ncclResult_t state = ncclSuccess;
  while (!device::isIdle(stream)) {
    check(ncclCommGetAsyncError(comm, &state));
    if (state != ncclSuccess) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  check(ncclCommGetAsyncError(comm, &state));
  if (state != ncclSuccess) return false;
  device::copy(values.data(), buffer.as(), buffer.bytes());
  for (size_t i = 0; i + 1 < kCount; i++) {
    if (values[i] == ranks * (ranks + 1) / 2 * (round % 1000)) continue;
    std::printf("wrong element %zu of call %d is %d\n", i, round, values[i]);
    std::fflush(stdout);
    std::_Exit(2);
  }
  othersGoOn = values.back() == ranks;
  return true;
}

int run(int rank, int ranks, double seconds) {
  ncclComm_t comm = nullptr;
  ncclUniqueId id{};
  check(ncclGetUniqueId(&id));
  device::use(0);
  if (ncclCommInitRank(&comm, ranks, id, rank) != ncclSuccess) {
    std::printf("error %s\n", ncclGetLastError(nullptr));
    return 1;
  }
  const auto start = Clock::now();
  bool goesOn = true;
  for (int calls = 1; goesOn; calls++) {
    const bool enough = std::chrono::duration<double>(Clock::now() - start).count() > seconds;
    if (!sumOnce(comm, rank, ranks, !enough, goesOn)) {
      std::printf("error %s\n", ncclGetLastError(comm));
      std::fflush(stdout);
      check(ncclCommAbort(comm));
      return 1;
    }
    if (calls == 1) std::printf("begin\n");
    if (!goesOn) std::printf("end %d\n", calls);
    std::fflush(stdout);
  }
  check(ncclCommDestroy(comm));
  return 0;
}

}  // namespace
}  // namespace unisono::system_test

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    return unisono::system_test::run(std::atoi(argv[1]), std::atoi(argv[2]), std::atof(argv[3]));
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 1;
  }
}
