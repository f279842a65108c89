// SPDX-License-Identifier: Apache-2.0
// A small, correct stand-in for the library: the ranks of one process, plain memcpy, streams that
// are done when their calls are. It lets the tests of the bench run without the library, and go
// wrong on purpose: FAKE_NCCL_FAULT is one of
//   element  one bit of one element of rank 1's results is wrong
//   outside  a byte after rank 1's results is written
//   input    a byte of rank 1's input is written
//   error    collectives fail
//   hang     calls never end
//   slow     each call takes a millisecond
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "element_types.h"
#include "nccl.h"
#include "operations.h"
#include "unisono/host.h"

using unisono::bench::BenchOperation;
using unisono::bench::ElementInfo;
using unisono::bench::ElementType;
using unisono::bench::NumberKind;

namespace {

struct Stream {
  std::atomic<int> pending{0};
};

struct Call {
  BenchOperation operation;
  const std::byte* send;
  std::byte* receive;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  double scalar;
  int root;
  Stream* stream;
  size_t bytes() const {
    return count * unisono::bench::elementInfo(static_cast<ElementType>(type)).bytes;
  }
};

std::string_view fault() {
  const char* text = std::getenv("FAKE_NCCL_FAULT");
  return text == nullptr ? "" : text;
}

thread_local std::string lastError;

ncclResult_t fail(const char* text) {
  lastError = text;
  return ncclInvalidUsage;
}

uint64_t bitsOf(const std::byte* data, const ElementInfo& info) {
  uint64_t bits = 0;
  std::memcpy(&bits, data, info.bytes);
  const size_t shift = 64 - 8 * info.bytes;
  if (info.kind != NumberKind::signedInteger) return bits;
  return static_cast<uint64_t>(static_cast<int64_t>(bits << shift) >> shift);
}

template <typename T>
T combine(T a, T b, int op) {
  switch (op) {
    case ncclProd:
      return a * b;
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return a + b;
  }
}

// Element `index` of all inputs, reduced and stored at `out`.
void reduceElement(const std::vector<Call>& calls, size_t index, std::byte* out) {
  const ElementInfo& info = unisono::bench::elementInfo(static_cast<ElementType>(calls[0].type));
  const auto ranks = static_cast<int64_t>(calls.size());
  const bool scaled = calls[0].op >= ncclNumOps;
  const int op = scaled ? ncclSum : calls[0].op;
  uint64_t bits = 0;
  if (info.kind == NumberKind::floating) {
    double result = 0;
    for (size_t rank = 0; rank < calls.size(); rank++) {
      double value = 0;
      unisono::bench::decodeElements(info.type, calls[rank].send + index * info.bytes, 1, &value);
      if (scaled) value *= calls[rank].scalar;
      result = rank == 0 ? value : combine(result, value, op);
    }
    if (op == ncclAvg) result /= static_cast<double>(ranks);
    bits = unisono::bench::encodeElement(info.type, result);
  } else {
    const bool withSign = info.kind == NumberKind::signedInteger;
    for (size_t rank = 0; rank < calls.size(); rank++) {
      uint64_t value = bitsOf(calls[rank].send + index * info.bytes, info);
      if (scaled) value *= static_cast<uint64_t>(static_cast<int64_t>(calls[rank].scalar));
      const bool compares = op == ncclMax || op == ncclMin;
      if (rank == 0) {
        bits = value;
      } else if (withSign && compares) {
        bits = static_cast<uint64_t>(
            combine(static_cast<int64_t>(bits), static_cast<int64_t>(value), op));
      } else {
        bits = combine(bits, value, op);
      }
    }
    if (op == ncclAvg) {
      bits = withSign ? static_cast<uint64_t>(static_cast<int64_t>(bits) / ranks)
                      : bits / static_cast<uint64_t>(ranks);
    }
  }
  std::memcpy(out, &bits, info.bytes);
}

// Elements [first, first + count) of the reduction.
std::vector<std::byte> reduceAll(const std::vector<Call>& calls, size_t first, size_t count) {
  const size_t width = unisono::bench::elementInfo(static_cast<ElementType>(calls[0].type)).bytes;
  std::vector<std::byte> result(count * width);
  for (size_t i = 0; i < count; i++) reduceElement(calls, first + i, &result[i * width]);
  return result;
}

std::vector<std::byte> resultOf(const std::vector<Call>& calls, size_t rank) {
  const Call& mine = calls[rank];
  const size_t block = mine.bytes();
  const auto root = static_cast<size_t>(mine.root);
  std::vector<std::byte> result;
  auto append = [&](const std::byte* from) { result.insert(result.end(), from, from + block); };
  switch (mine.operation) {
    case BenchOperation::allReduce:
      return reduceAll(calls, 0, mine.count);
    case BenchOperation::reduceScatter:
      return reduceAll(calls, rank * mine.count, mine.count);
    case BenchOperation::reduce:
      if (rank == root) return reduceAll(calls, 0, mine.count);
      break;
    case BenchOperation::broadcast:
      append(calls[root].send);
      break;
    case BenchOperation::scatter:
      append(calls[root].send + rank * block);
      break;
    case BenchOperation::gather:
      if (rank != root) break;
      [[fallthrough]];
    case BenchOperation::allGather:
      for (const Call& each : calls) append(each.send);
      break;
    case BenchOperation::allToAll:
      for (const Call& each : calls) append(each.send + rank * block);
      break;
    case BenchOperation::sendReceive:
      break;
  }
  return result;
}

void execute(const std::vector<Call>& calls) {
  std::vector<std::vector<std::byte>> results;
  for (size_t rank = 0; rank < calls.size(); rank++) results.push_back(resultOf(calls, rank));
  for (size_t rank = 0; rank < calls.size(); rank++) {
    std::vector<std::byte>& result = results[rank];
    if (rank == 1 && fault() == "element" && !result.empty()) result.back() ^= std::byte{0x40};
    if (!result.empty()) std::memcpy(calls[rank].receive, result.data(), result.size());
    if (rank == 1 && fault() == "outside") calls[rank].receive[result.size()] = std::byte{0x11};
    if (rank == 1 && fault() == "input") {
      auto* input = const_cast<std::byte*>(calls[rank].send);
      input[0] ^= std::byte{0xff};
    }
    calls[rank].stream->pending--;
  }
}

// The communicators of one unique id.
struct World {
  std::mutex mutex;
  std::vector<std::deque<Call>> collectives;                        // by rank
  std::map<std::pair<int, int>, std::deque<Call>> sends, receives;  // by (from, to)

  void submit(int rank, Call call) {
    call.stream->pending++;
    if (fault() == "hang") return;
    if (fault() == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(mutex);
    collectives[static_cast<size_t>(rank)].push_back(call);
    std::vector<Call> calls;
    for (auto& queue : collectives) {
      if (queue.empty()) return;
      calls.push_back(queue.front());
    }
    for (auto& queue : collectives) queue.pop_front();
    execute(calls);
  }

  void submitPair(std::pair<int, int> pair, bool isSend, Call call) {
    call.stream->pending++;
    std::lock_guard lock(mutex);
    (isSend ? sends : receives)[pair].push_back(call);
    auto& from = sends[pair];
    auto& to = receives[pair];
    if (from.empty() || to.empty()) return;
    std::memcpy(to.front().receive, from.front().send, from.front().bytes());
    if (pair.second == 1 && fault() == "element") to.front().receive[0] ^= std::byte{0x40};
    from.front().stream->pending--;
    to.front().stream->pending--;
    from.pop_front();
    to.pop_front();
  }
};

std::shared_ptr<World> worldOf(const ncclUniqueId& id, int ranks) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<World>> worlds;
  std::lock_guard lock(mutex);
  auto& slot = worlds[std::string(reinterpret_cast<const char*>(&id), sizeof(id))];
  std::shared_ptr<World> world = slot.lock();
  if (!world) {
    world = std::make_shared<World>();
    world->collectives.resize(static_cast<size_t>(ranks));
    slot = world;
  }
  return world;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<World> world;
  int rank;
  std::vector<double> scalars;
};

namespace {

ncclResult_t submit(ncclComm_t comm, cudaStream_t stream, BenchOperation operation,
                    const void* send, void* receive, size_t count, ncclDataType_t type,
                    ncclRedOp_t op, int root) {
  if (fault() == "error") return fail("the fake was asked to fail");
  Call call{operation,
            static_cast<const std::byte*>(send),
            static_cast<std::byte*>(receive),
            count,
            type,
            op,
            1,
            root,
            reinterpret_cast<Stream*>(stream)};
  if (op >= ncclNumOps) call.scalar = comm->scalars[static_cast<size_t>(op - ncclNumOps)];
  comm->world->submit(comm->rank, call);
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  *version = 22809;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "invalid usage";
}
const char* ncclGetLastError(ncclComm_t) {
  return lastError.c_str();
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<uint64_t> next{1};
  *id = {};
  uint64_t number = next++;
  std::memcpy(id->internal, &number, sizeof(number));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  *comm = new ncclComm{worldOf(id, ranks), rank, {}};
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t comm) {
  double value = 0;
  unisono::bench::decodeElements(static_cast<ElementType>(type),
                                 static_cast<const std::byte*>(scalar), 1, &value);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(comm->scalars.size()));
  comm->scalars.push_back(value);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::allReduce, send, receive, count, type, op, 0);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::reduce, send, receive, count, type, op, root);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::reduceScatter, send, receive, count, type, op, 0);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::broadcast, send, receive, count, type, ncclSum, root);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::allGather, send, receive, count, type, ncclSum, 0);
}
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::allToAll, send, receive, count, type, ncclSum, 0);
}
ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::gather, send, receive, count, type, ncclSum, root);
}
ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                         int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, BenchOperation::scatter, send, receive, count, type, ncclSum, root);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Call call{BenchOperation::sendReceive,
            static_cast<const std::byte*>(send),
            nullptr,
            count,
            type,
            ncclSum,
            1,
            0,
            reinterpret_cast<Stream*>(stream)};
  comm->world->submitPair({comm->rank, peer}, true, call);
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Call call{BenchOperation::sendReceive,
            nullptr,
            static_cast<std::byte*>(receive),
            count,
            type,
            ncclSum,
            1,
            0,
            reinterpret_cast<Stream*>(stream)};
  comm->world->submitPair({peer, comm->rank}, false, call);
  return ncclSuccess;
}

ncclResult_t unisonoHostGetDeviceCount(int* count) {
  *count = 8;
  return ncclSuccess;
}
ncclResult_t unisonoHostSetDevice(int) {
  return ncclSuccess;
}
ncclResult_t unisonoHostMalloc(void** address, size_t bytes) {
  *address = std::malloc(bytes);
  return *address == nullptr ? ncclSystemError : ncclSuccess;
}
ncclResult_t unisonoHostFree(void* address) {
  std::free(address);
  return ncclSuccess;
}
ncclResult_t unisonoHostStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return ncclSuccess;
}
ncclResult_t unisonoHostStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return ncclSuccess;
}
ncclResult_t unisonoHostStreamQuery(cudaStream_t stream) {
  return reinterpret_cast<Stream*>(stream)->pending == 0 ? ncclSuccess : ncclInProgress;
}
const char* unisonoHostGetLastError() {
  return lastError.c_str();
}
