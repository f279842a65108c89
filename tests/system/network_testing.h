// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "child_processes.h"
#include "collective_case.h"

// What tests of networks between simulated nodes share.
namespace unisono::system_test {

// Makes each of the calls with each count, and checks the results.
template <typename Calls>
void everyCall(const Ranks& ranks, const Calls& calls, std::initializer_list<size_t> counts) {
  for (const Call call : calls) {
    for (const size_t count : counts) {
      Case made;
      made.call = call;
      made.count = count;
      made.root = ranks.size() - 1;
      made.type = bench::ElementType::float32;
      std::vector<std::unique_ptr<CaseBuffers>> buffers;
      for (int rank = 0; rank < ranks.size(); rank++) {
        buffers.push_back(
            std::make_unique<CaseBuffers>(made, rank, ranks.size(), ranks.device(rank)));
      }
      ranks.inGroup([&](int rank) {
        check(buffers[static_cast<size_t>(rank)]->enqueue(ranks.comm(rank), ranks.stream(rank)));
      });
      ranks.synchronize();
      for (const auto& buffer : buffers) buffer->verify();
    }
  }
}

inline void everyCall(const Ranks& ranks, std::initializer_list<size_t> counts) {
  everyCall(ranks, kCalls, counts);
}

// Buffer, stream and communicator of a call that the plug-in does not complete.
struct EndlessCall {
  EndlessCall(ncclComm_t call, int rank)
      : comm(call), buffer(rank, size_t{1} << 20), stream(rank) {}
  ncclResult_t enqueue(size_t count = 1 << 18) const {
    return ncclAllReduce(buffer.as(), buffer.as(), count, ncclInt, ncclSum, comm, stream);
  }
  // The text of the error that the communicator gets.
  std::string awaitError() const {
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess) {
      check(ncclCommGetAsyncError(comm, &state));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return ncclGetLastError(comm);
  }
  void abort() const {
    const auto begin = std::chrono::steady_clock::now();
    check(ncclCommAbort(comm));
    std::printf("abort took %.1f ms\n",
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
                    .count());
    unisonoHostStreamSynchronize(stream);
  }

  const ncclComm_t comm;
  const DeviceBuffer buffer;
  const DeviceStream stream;
};

inline void expectParts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace unisono::system_test
