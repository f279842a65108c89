// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

// The data movement of each operation: buffer sizes, where the result comes from, and the factor
// between algorithm and bus bandwidth. Pure arithmetic.
namespace unisono::bench {

enum class BenchOperation {
  allReduce,
  allGather,
  reduceScatter,
  broadcast,
  reduce,
  sendReceive,
  allToAll,
  gather,
  scatter,
};

// Numbered as ncclRedOp_t; preMulSum is created per communicator.
enum class BenchReduction : int { sum = 0, prod = 1, max = 2, min = 3, avg = 4, preMulSum = 5 };
inline constexpr int kReductions = 6;

struct OperationInfo {
  BenchOperation operation;
  const char* name;
  const char* meaning;
  bool reduces;
  bool hasRoot;
  bool hasInPlace;
};

std::span<const OperationInfo> operations();
const OperationInfo& operationInfo(BenchOperation operation);

// "sum", "prod", "max", "min", "avg", "mulsum".
const char* reductionName(BenchReduction reduction);

// Bus bandwidth over algorithm bandwidth with `ranks` ranks, as nccl-tests defines it
// (doc/PERFORMANCE.md there): 2(n-1)/n for all-reduce, (n-1)/n if a rank's own share is not
// transferred (all-gather, reduce-scatter, all-to-all, gather, scatter), 1 for the others.
double busFactor(BenchOperation operation, int ranks);

// The count argument of the call for a message of `bytes` per rank as nccl-tests defines it: the
// larger of the amounts that a rank sends and receives. At least one element, unless `bytes` is 0.
size_t countForBytes(BenchOperation operation, size_t bytes, size_t elementBytes, int ranks);
// The inverse: the size that the table shows.
size_t bytesForCount(BenchOperation operation, size_t count, size_t elementBytes, int ranks);

// A range of the send or receive buffer of a rank and its expected content after the call.
struct BufferSegment {
  enum class Content {
    input,      // bytes of the input of rank `source`, from `sourceOffset`
    reduction,  // the reduction over all ranks' inputs, from byte `sourceOffset` of each
    poison,     // the content before the call
  };
  enum class Buffer { send, receive };
  Content content;
  Buffer buffer;
  size_t offset;  // bytes from the start of the buffer
  size_t bytes;
  int source = -1;
  size_t sourceOffset = 0;
};

// Where a rank's call reads and writes. In place, everything is in the receive buffer.
struct RankLayout {
  BufferSegment::Buffer sendBuffer = BufferSegment::Buffer::send;
  size_t sendOffset = 0;
  size_t sendBytes = 0;
  size_t receiveOffset = 0;  // in the receive buffer
  size_t receiveBytes = 0;   // 0: this rank receives nothing
  size_t bufferBytes = 0;    // the size of each of the two buffers
};

struct CallLayout {
  BenchOperation operation;
  int ranks;
  int root;  // ignored by operations without a root
  size_t count;
  size_t elementBytes;
  bool inPlace;
};

RankLayout rankLayout(const CallLayout& shape, int rank);

// The expected content of both buffers of `rank` after the call, without their guards.
std::vector<BufferSegment> expectedSegments(const CallLayout& shape, int rank);

}  // namespace unisono::bench
