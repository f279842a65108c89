#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

// What each operation moves: sizes of the buffers, where the result comes from, and the factor
// between algorithm and bus bandwidth. Pure arithmetic.
namespace unisono::bench {

enum class Operation {
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

// Numbered as ncclRedOp_t; preMulSum is made per communicator.
enum class Reduction : int { sum = 0, prod = 1, max = 2, min = 3, avg = 4, preMulSum = 5 };
inline constexpr int kReductions = 6;

struct OperationInfo {
  Operation operation;
  const char* name;
  const char* meaning;
  bool reduces;
  bool hasRoot;
  bool hasInPlace;
};

std::span<const OperationInfo> operations();
const OperationInfo& operationInfo(Operation operation);

// "sum", "prod", "max", "min", "avg", "mulsum".
const char* reductionName(Reduction reduction);

// Bus bandwidth over algorithm bandwidth with `ranks` ranks, as nccl-tests defines it
// (doc/PERFORMANCE.md there): 2(n-1)/n for all-reduce, (n-1)/n where a rank's own share does not
// travel (all-gather, reduce-scatter, all-to-all, gather, scatter), 1 for the others.
double busFactor(Operation operation, int ranks);

// The count argument of the call for a message of `bytes` a rank, in the sense of nccl-tests: the
// larger of what a rank sends and receives. At least one element, unless `bytes` is 0.
size_t countForBytes(Operation operation, size_t bytes, size_t elementBytes, int ranks);
// The opposite: the size that the table shows.
size_t bytesForCount(Operation operation, size_t count, size_t elementBytes, int ranks);

// A stretch of one of a rank's two buffers and what it must hold after the call.
struct Segment {
  enum class Content {
    input,      // bytes of the input of rank `source`, from `sourceOffset`
    reduction,  // the reduction over all ranks' inputs, from byte `sourceOffset` of each
    poison,     // what was there before the call
  };
  enum class Buffer { send, receive };
  Content content;
  Buffer buffer;
  size_t offset;  // bytes from the start of the buffer
  size_t bytes;
  int source = -1;
  size_t sourceOffset = 0;
};

// Where a rank's call reads and writes. In place, all of it lies in the receive buffer.
struct RankLayout {
  Segment::Buffer sendBuffer = Segment::Buffer::send;
  size_t sendOffset = 0;
  size_t sendBytes = 0;
  size_t receiveOffset = 0;  // in the receive buffer
  size_t receiveBytes = 0;   // 0: this rank receives nothing
  size_t bufferBytes = 0;    // what both buffers must hold
};

struct Shape {
  Operation operation;
  int ranks;
  int root;  // ignored without roots
  size_t count;
  size_t elementBytes;
  bool inPlace;
};

RankLayout rankLayout(const Shape& shape, int rank);

// What both buffers of `rank` must hold after the call, without the guards around them.
std::vector<Segment> expectedSegments(const Shape& shape, int rank);

}  // namespace unisono::bench
