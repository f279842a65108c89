// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "bench_options.h"
#include "coordinator.h"
#include "device_api.h"
#include "library_table.h"
#include "operations.h"
#include "reference.h"

// The ranks that one thread drives through one library: their communicators, streams and buffers.
namespace unisono::bench {

// Bytes before and after each buffer that a call must not touch.
inline constexpr size_t kGuardBytes = 512;
// The content of guards and outputs before a call.
inline constexpr std::byte kPoison{0xa7};

struct LocalRank {
  int rank;
  int device;
};

// One call, the same on all ranks.
struct CallSpec {
  CallLayout shape;
  ElementType type;
  BenchReduction reduction;
};

class RankSet {
 public:
  struct Config {
    std::vector<LocalRank> ranks;
    int totalRanks = 0;
    size_t bufferBytes = 0;  // of each of a rank's two buffers, without guards
    int registration = 0;
    bool stopwatch = false;
    double timeoutSeconds = 0;
  };

  // Creates the communicators. All threads of all processes must do so together. `coordinator` ends
  // waits if another worker fails.
  RankSet(const Library& library, DeviceApi& device, Coordinator& coordinator, Config config,
          const ncclUniqueId& id);
  // Destroys the communicators, or aborts them unless finish() was called.
  ~RankSet();
  RankSet(const RankSet&) = delete;
  RankSet& operator=(const RankSet&) = delete;

  // Waits for all work, destroys everything and reports errors. All threads together.
  void finish();

  // Creates the operators that a reference needs (mulsum: one per type and rank).
  void prepareReduction(const Reference& reference, BenchReduction reduction);

  // Writes poison and the inputs of `reference`. verify() then counts the differences from the
  // expected content. `helpers`: number of threads to use.
  void fill(const CallSpec& call, const Reference& reference, int helpers);
  void verify(const CallSpec& call, const Reference& reference, int helpers, Contribution& result);

  // Enqueues the call on the streams of all ranks.
  void enqueue(const CallSpec& call);
  // Waits for all streams. Throws Error for an asynchronous error of a communicator or after the
  // timeout, and Aborted if another worker failed.
  void wait();

  // Runs `iterations` calls and returns the seconds per call. With `graphLaunches` > 0 they are
  // recorded as one graph, which is launched that many times. All threads together.
  double measure(const CallSpec& call, int iterations, bool blocking, int graphLaunches);

 private:
  struct Buffer {
    std::byte* base = nullptr;  // the allocation, guards included
    void* registration = nullptr;
    ncclWindow_t window = nullptr;
    std::byte* data() const { return base + kGuardBytes; }
  };
  struct Rank {
    int rank;
    int device;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    Buffer send;
    Buffer receive;
    ncclRedOp_t scaled{};  // mulsum
    bool hasScaled = false;
    std::unique_ptr<DeviceApi::Stopwatch> stopwatch;
  };

  void create(const ncclUniqueId& id);
  void allocate(Buffer& buffer);
  void registerBuffers();
  void release(bool abort, bool quiet);
  void enqueueRank(const CallSpec& call, Rank& rank);
  const Buffer& buffer(const Rank& rank, BufferSegment::Buffer which) const {
    return which == BufferSegment::Buffer::send ? rank.send : rank.receive;
  }
  void forEachRank(const std::function<void(Rank&)>& body);
  void verifySegment(const Rank& rank, const BufferSegment& segment, const CallSpec& call,
                     const Reference& reference, int helpers, Contribution& result);

  const Library& library_;
  DeviceApi& device_;
  Coordinator& coordinator_;
  Config config_;
  std::vector<Rank> ranks_;
  bool released_ = false;
};

}  // namespace unisono::bench
