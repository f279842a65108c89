// SPDX-License-Identifier: Apache-2.0
#include "rank_set.h"

#include <sched.h>

#include <chrono>
#include <exception>
#include <thread>

#include "base/error.h"

namespace unisono::bench {
namespace {

// How long a wait polls without pausing, and how many polls pass between checks of errors and the
// clock.
constexpr double kPollSeconds = 200e-6;
constexpr unsigned kPollsBetweenLooks = 16;

template <typename Function>
Function available(Function function, const Library& library, const char* name) {
  if (function != nullptr) return function;
  throw invalidUsage("{} (version {}) has no {}", library.path(), library.versionText(), name)
      .remedy("Omit the option that needs it, or use a later library");
}

}  // namespace

RankSet::RankSet(const Library& library, DeviceApi& device, Coordinator& coordinator, Config config,
                 const ncclUniqueId& id)
    : library_(library), device_(device), coordinator_(coordinator), config_(std::move(config)) {
  for (const LocalRank& local : config_.ranks) {
    ranks_.emplace_back();
    ranks_.back().rank = local.rank;
    ranks_.back().device = local.device;
  }
  try {
    create(id);
  } catch (...) {
    release(true, true);
    throw;
  }
}

RankSet::~RankSet() {
  release(true, true);
}

void RankSet::forEachRank(const std::function<void(Rank&)>& body) {
  for (Rank& rank : ranks_) {
    device_.setDevice(rank.device);
    body(rank);
  }
}

void RankSet::create(const ncclUniqueId& id) {
  library_.check(library_.ncclGroupStart(), "ncclGroupStart");
  std::exception_ptr failure;
  try {
    forEachRank([&](Rank& rank) {
      library_.check(library_.ncclCommInitRank(&rank.comm, config_.totalRanks, id, rank.rank),
                     "ncclCommInitRank");
    });
  } catch (...) {
    failure = std::current_exception();
  }
  ncclResult_t ended = library_.ncclGroupEnd();
  if (failure) std::rethrow_exception(failure);
  library_.check(ended, "ncclCommInitRank (at ncclGroupEnd)");
  forEachRank([&](Rank& rank) {
    rank.stream = device_.createStream();
    allocate(rank.send);
    allocate(rank.receive);
    if (config_.stopwatch) rank.stopwatch = device_.createStopwatch();
  });
  if (config_.registration > 0) registerBuffers();
}

void RankSet::allocate(Buffer& buffer) {
  size_t bytes = config_.bufferBytes + 2 * kGuardBytes;
  if (config_.registration == 2) {
    void* address = nullptr;
    auto* allocateMemory = available(library_.ncclMemAlloc, library_, "ncclMemAlloc");
    library_.check(allocateMemory(&address, bytes), "ncclMemAlloc");
    buffer.base = static_cast<std::byte*>(address);
  } else {
    buffer.base = static_cast<std::byte*>(device_.allocate(bytes));
  }
}

void RankSet::registerBuffers() {
  const size_t bytes = config_.bufferBytes + 2 * kGuardBytes;
  if (config_.registration == 1) {
    auto* registerBuffer = available(library_.ncclCommRegister, library_, "ncclCommRegister");
    forEachRank([&](Rank& rank) {
      for (Buffer* each : {&rank.send, &rank.receive}) {
        library_.check(registerBuffer(rank.comm, each->base, bytes, &each->registration),
                       "ncclCommRegister");
      }
    });
    return;
  }
  auto* registerWindow =
      available(library_.ncclCommWindowRegister, library_, "ncclCommWindowRegister");
  for (Buffer Rank::*which : {&Rank::send, &Rank::receive}) {
    library_.check(library_.ncclGroupStart(), "ncclGroupStart");
    ncclResult_t result = ncclSuccess;
    forEachRank([&](Rank& rank) {
      Buffer& each = rank.*which;
      if (result != ncclSuccess) return;
      result = registerWindow(rank.comm, each.base, bytes, &each.window, NCCL_WIN_COLL_SYMMETRIC);
    });
    ncclResult_t ended = library_.ncclGroupEnd();
    library_.check(result, "ncclCommWindowRegister");
    library_.check(ended, "ncclCommWindowRegister (at ncclGroupEnd)");
  }
}

void RankSet::finish() {
  wait();
  coordinator_.barrier();
  release(false, false);
}

// Continues after a failure to release as much as possible, then throws the first error unless
// `quiet`.
void RankSet::release(bool abort, bool quiet) {
  if (released_) return;
  released_ = true;
  std::exception_ptr failure;
  auto attempt = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  auto call = [&](ncclResult_t result, const char* name) {
    attempt([&] { library_.check(result, name); });
  };
  // ncclCommAbort releases registrations.
  if (!abort) {
    attempt([&] {
      forEachRank([&](Rank& rank) {
        for (Buffer* each : {&rank.send, &rank.receive}) {
          if (each->registration != nullptr) {
            call(library_.ncclCommDeregister(rank.comm, each->registration), "ncclCommDeregister");
          }
          if (each->window != nullptr) {
            call(library_.ncclCommWindowDeregister(rank.comm, each->window),
                 "ncclCommWindowDeregister");
          }
        }
        if (rank.hasScaled) {
          call(library_.ncclRedOpDestroy(rank.scaled, rank.comm), "ncclRedOpDestroy");
        }
      });
    });
  }
  for (Rank& rank : ranks_) {
    if (rank.comm == nullptr) continue;
    attempt([&] { device_.setDevice(rank.device); });
    if (abort) {
      call(library_.ncclCommAbort(rank.comm), "ncclCommAbort");
    } else {
      call(library_.ncclCommDestroy(rank.comm), "ncclCommDestroy");
    }
  }
  for (Rank& rank : ranks_) {
    attempt([&] { device_.setDevice(rank.device); });
    for (Buffer* each : {&rank.send, &rank.receive}) {
      if (each->base == nullptr) continue;
      if (config_.registration == 2) {
        call(library_.ncclMemFree(each->base), "ncclMemFree");
      } else {
        attempt([&] { device_.free(each->base); });
      }
    }
    rank.stopwatch.reset();
    if (rank.stream != nullptr) attempt([&] { device_.destroyStream(rank.stream); });
  }
  if (failure && !quiet) std::rethrow_exception(failure);
}

void RankSet::prepareReduction(const Reference& reference, BenchReduction reduction) {
  forEachRank([&](Rank& rank) {
    if (rank.hasScaled) {
      rank.hasScaled = false;
      library_.check(library_.ncclRedOpDestroy(rank.scaled, rank.comm), "ncclRedOpDestroy");
    }
    if (reduction != BenchReduction::preMulSum) return;
    auto* create =
        available(library_.ncclRedOpCreatePreMulSum, library_, "ncclRedOpCreatePreMulSum");
    uint64_t scalar = reference.scalarBits(rank.rank);
    library_.check(create(&rank.scaled, &scalar, static_cast<ncclDataType_t>(reference.type()),
                          ncclScalarHostImmediate, rank.comm),
                   "ncclRedOpCreatePreMulSum");
    rank.hasScaled = true;
  });
}

void RankSet::enqueueRank(const CallSpec& call, Rank& rank) {
  const CallLayout& shape = call.shape;
  const RankLayout layout = rankLayout(shape, rank.rank);
  const std::byte* send = buffer(rank, layout.sendBuffer).data() + layout.sendOffset;
  std::byte* receive = rank.receive.data() + layout.receiveOffset;
  const auto type = static_cast<ncclDataType_t>(call.type);
  const ncclRedOp_t op = call.reduction == BenchReduction::preMulSum
                             ? rank.scaled
                             : static_cast<ncclRedOp_t>(call.reduction);
  const size_t count = shape.count;
  const size_t block = count * shape.elementBytes;
  const ncclComm_t comm = rank.comm;
  const cudaStream_t stream = rank.stream;
  auto check = [&](ncclResult_t result, const char* name) { library_.check(result, name); };
  auto sendTo = [&](int peer, size_t offset) {
    check(library_.ncclSend(send + offset, count, type, peer, comm, stream), "ncclSend");
  };
  auto receiveFrom = [&](int peer, size_t offset) {
    check(library_.ncclRecv(receive + offset, count, type, peer, comm, stream), "ncclRecv");
  };

  switch (shape.operation) {
    case BenchOperation::allReduce:
      return check(library_.ncclAllReduce(send, receive, count, type, op, comm, stream),
                   "ncclAllReduce");
    case BenchOperation::allGather:
      return check(library_.ncclAllGather(send, receive, count, type, comm, stream),
                   "ncclAllGather");
    case BenchOperation::reduceScatter:
      return check(library_.ncclReduceScatter(send, receive, count, type, op, comm, stream),
                   "ncclReduceScatter");
    case BenchOperation::broadcast:
      return check(library_.ncclBroadcast(send, receive, count, type, shape.root, comm, stream),
                   "ncclBroadcast");
    case BenchOperation::reduce:
      return check(library_.ncclReduce(send, receive, count, type, op, shape.root, comm, stream),
                   "ncclReduce");
    case BenchOperation::sendReceive:
      sendTo((rank.rank + 1) % shape.ranks, 0);
      return receiveFrom((rank.rank + shape.ranks - 1) % shape.ranks, 0);
    // Libraries before 2.28 lack the last three.
    case BenchOperation::allToAll:
      if (library_.ncclAlltoAll != nullptr) {
        return check(library_.ncclAlltoAll(send, receive, count, type, comm, stream),
                     "ncclAlltoAll");
      }
      for (int peer = 0; peer < shape.ranks; peer++) {
        sendTo(peer, block * static_cast<size_t>(peer));
        receiveFrom(peer, block * static_cast<size_t>(peer));
      }
      return;
    case BenchOperation::gather:
      if (library_.ncclGather != nullptr) {
        return check(library_.ncclGather(send, receive, count, type, shape.root, comm, stream),
                     "ncclGather");
      }
      sendTo(shape.root, 0);
      for (int peer = 0; peer < shape.ranks && rank.rank == shape.root; peer++) {
        receiveFrom(peer, block * static_cast<size_t>(peer));
      }
      return;
    case BenchOperation::scatter:
      if (library_.ncclScatter != nullptr) {
        return check(library_.ncclScatter(send, receive, count, type, shape.root, comm, stream),
                     "ncclScatter");
      }
      for (int peer = 0; peer < shape.ranks && rank.rank == shape.root; peer++) {
        sendTo(peer, block * static_cast<size_t>(peer));
      }
      return receiveFrom(shape.root, 0);
  }
}

void RankSet::enqueue(const CallSpec& call) {
  const BenchOperation operation = call.shape.operation;
  const bool grouped = ranks_.size() > 1 || operation == BenchOperation::sendReceive ||
                       operation == BenchOperation::allToAll ||
                       operation == BenchOperation::gather || operation == BenchOperation::scatter;
  if (!grouped) return forEachRank([&](Rank& rank) { enqueueRank(call, rank); });
  library_.check(library_.ncclGroupStart(), "ncclGroupStart");
  std::exception_ptr failure;
  try {
    forEachRank([&](Rank& rank) { enqueueRank(call, rank); });
  } catch (...) {
    failure = std::current_exception();
  }
  ncclResult_t ended = library_.ncclGroupEnd();
  if (failure) std::rethrow_exception(failure);
  library_.check(ended, "ncclGroupEnd");
}

void RankSet::wait() {
  const Clock::time_point start = Clock::now();
  unsigned polls = 0;
  for (Rank& rank : ranks_) {
    device_.setDevice(rank.device);
    while (!device_.streamDone(rank.stream)) {
      if (++polls % kPollsBetweenLooks != 0) continue;
      if (coordinator_.aborted()) throw Aborted();
      for (const Rank& each : ranks_) {
        ncclResult_t state = ncclSuccess;
        library_.check(library_.ncclCommGetAsyncError(each.comm, &state), "ncclCommGetAsyncError");
        if (state != ncclInProgress) library_.check(state, "a call");
      }
      if (secondsSince(start) > config_.timeoutSeconds) {
        throw Error(ErrorCode::timeout, fmt::format("the calls did not complete within {:.0f} s",
                                                    config_.timeoutSeconds))
            .rank(rank.rank)
            .device(rank.device)
            .remedy("Raise the limit with -T if the machine is that slow");
      }
      // Simulated GPUs need the cores that a busy wait would occupy.
      if (secondsSince(start) < kPollSeconds) {
        ::sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }
}

double RankSet::measure(const CallSpec& call, int iterations, bool blocking, int graphLaunches) {
  std::vector<std::unique_ptr<DeviceApi::Graph>> graphs;
  if (graphLaunches > 0) {
    forEachRank([&](Rank& rank) { device_.beginCapture(rank.stream); });
    std::exception_ptr failure;
    try {
      for (int i = 0; i < iterations; i++) enqueue(call);
    } catch (...) {
      failure = std::current_exception();
    }
    // An open capture would break all later calls of this thread.
    forEachRank([&](Rank& rank) { graphs.push_back(device_.endCapture(rank.stream)); });
    if (failure) std::rethrow_exception(failure);
    // The first launch uploads the graph and is not part of the measurement.
    size_t next = 0;
    forEachRank([&](Rank&) { graphs[next++]->prepare(); });
    next = 0;
    forEachRank([&](Rank& rank) { graphs[next++]->launch(rank.stream); });
    wait();
  }

  coordinator_.barrier();
  const Clock::time_point start = Clock::now();
  forEachRank([&](Rank& rank) {
    if (rank.stopwatch) rank.stopwatch->start(rank.stream);
  });
  if (graphLaunches > 0) {
    for (int launch = 0; launch < graphLaunches; launch++) {
      size_t next = 0;
      forEachRank([&](Rank& rank) { graphs[next++]->launch(rank.stream); });
    }
  } else {
    for (int i = 0; i < iterations; i++) {
      enqueue(call);
      if (blocking) wait();
    }
  }
  forEachRank([&](Rank& rank) {
    if (rank.stopwatch) rank.stopwatch->stop(rank.stream);
  });
  wait();
  double seconds = secondsSince(start);
  if (config_.stopwatch) {
    seconds = 0;
    forEachRank([&](Rank& rank) { seconds = std::max(seconds, rank.stopwatch->seconds()); });
  }
  return seconds / iterations / std::max(graphLaunches, 1);
}

}  // namespace unisono::bench
