// SPDX-License-Identifier: Apache-2.0
#include "operations.h"

#include <algorithm>
#include <array>

namespace unisono::bench {
namespace {

constexpr std::array<OperationInfo, 9> kOperations = {{
    {BenchOperation::allReduce, "all_reduce", "every rank gets the reduction of all", true, false,
     true},
    {BenchOperation::allGather, "all_gather", "every rank gets the blocks of all", false, false,
     true},
    {BenchOperation::reduceScatter, "reduce_scatter", "every rank gets its block of the reduction",
     true, false, true},
    {BenchOperation::broadcast, "broadcast", "every rank gets the root's data", false, true, true},
    {BenchOperation::reduce, "reduce", "the root gets the reduction of all", true, true, true},
    {BenchOperation::sendReceive, "sendrecv",
     "every rank sends to the next and receives from the previous", false, false, false},
    {BenchOperation::allToAll, "alltoall", "every rank sends a block to every rank", false, false,
     false},
    {BenchOperation::gather, "gather", "the root gets the blocks of all", false, true, true},
    {BenchOperation::scatter, "scatter", "every rank gets its block of the root's data", false,
     true, true},
}};

// Whether the size in the table covers `ranks` blocks of `count` elements.
bool sizeIsAllBlocks(BenchOperation operation) {
  switch (operation) {
    case BenchOperation::allGather:
    case BenchOperation::reduceScatter:
    case BenchOperation::allToAll:
    case BenchOperation::gather:
    case BenchOperation::scatter:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::span<const OperationInfo> operations() {
  return kOperations;
}

const OperationInfo& operationInfo(BenchOperation operation) {
  return kOperations[static_cast<size_t>(operation)];
}

const char* reductionName(BenchReduction reduction) {
  constexpr std::array<const char*, kReductions> kNames = {"sum", "prod", "max",
                                                           "min", "avg",  "mulsum"};
  return kNames[static_cast<size_t>(reduction)];
}

double busFactor(BenchOperation operation, int ranks) {
  double others = static_cast<double>(ranks - 1) / ranks;
  if (operation == BenchOperation::allReduce) return 2 * others;
  return sizeIsAllBlocks(operation) ? others : 1;
}

size_t countForBytes(BenchOperation operation, size_t bytes, size_t elementBytes, int ranks) {
  if (bytes == 0) return 0;
  size_t blocks = sizeIsAllBlocks(operation) ? static_cast<size_t>(ranks) : 1;
  return std::max<size_t>(bytes / elementBytes / blocks, 1);
}

size_t bytesForCount(BenchOperation operation, size_t count, size_t elementBytes, int ranks) {
  return count * elementBytes * (sizeIsAllBlocks(operation) ? static_cast<size_t>(ranks) : 1);
}

RankLayout rankLayout(const CallLayout& shape, int rank) {
  const size_t block = shape.count * shape.elementBytes;
  const size_t all = block * static_cast<size_t>(shape.ranks);
  const size_t mine = block * static_cast<size_t>(rank);
  const bool isRoot = rank == shape.root;
  RankLayout layout;
  layout.bufferBytes = bytesForCount(shape.operation, shape.count, shape.elementBytes, shape.ranks);
  layout.sendBytes = block;
  layout.receiveBytes = block;
  size_t sendInPlace = 0;
  size_t receiveInPlace = 0;
  bool inPlace = shape.inPlace;
  switch (shape.operation) {
    case BenchOperation::allReduce:
      break;
    case BenchOperation::sendReceive:
      inPlace = false;
      break;
    case BenchOperation::broadcast:
      // Only the root's data is read; in place the others have one buffer too.
      if (!isRoot) layout.sendBytes = 0;
      break;
    case BenchOperation::reduce:
      if (!isRoot) layout.receiveBytes = 0;
      break;
    case BenchOperation::allGather:
      layout.receiveBytes = all;
      sendInPlace = mine;
      break;
    case BenchOperation::reduceScatter:
      layout.sendBytes = all;
      receiveInPlace = mine;
      break;
    case BenchOperation::allToAll:
      layout.sendBytes = layout.receiveBytes = all;
      inPlace = false;
      break;
    case BenchOperation::gather:
      layout.receiveBytes = isRoot ? all : 0;
      sendInPlace = mine;
      inPlace = inPlace && isRoot;
      break;
    case BenchOperation::scatter:
      layout.sendBytes = isRoot ? all : 0;
      receiveInPlace = mine;
      inPlace = inPlace && isRoot;
      break;
  }
  if (inPlace) {
    layout.sendBuffer = BufferSegment::Buffer::receive;
    layout.sendOffset = sendInPlace;
    layout.receiveOffset = receiveInPlace;
  }
  return layout;
}

std::vector<BufferSegment> expectedSegments(const CallLayout& shape, int rank) {
  using Content = BufferSegment::Content;
  using Buffer = BufferSegment::Buffer;
  const RankLayout layout = rankLayout(shape, rank);
  const size_t block = shape.count * shape.elementBytes;
  std::vector<BufferSegment> segments;
  auto add = [&](Content content, Buffer buffer, size_t offset, size_t bytes, int source,
                 size_t sourceOffset) {
    if (bytes > 0) segments.push_back({content, buffer, offset, bytes, source, sourceOffset});
  };

  // The result.
  const size_t at = layout.receiveOffset;
  const size_t mine = block * static_cast<size_t>(rank);
  switch (shape.operation) {
    case BenchOperation::allReduce:
    case BenchOperation::reduce:
      add(Content::reduction, Buffer::receive, at, layout.receiveBytes, -1, 0);
      break;
    case BenchOperation::reduceScatter:
      add(Content::reduction, Buffer::receive, at, block, -1, mine);
      break;
    case BenchOperation::broadcast:
      add(Content::input, Buffer::receive, at, block, shape.root, 0);
      break;
    case BenchOperation::scatter:
      add(Content::input, Buffer::receive, at, block, shape.root, mine);
      break;
    case BenchOperation::sendReceive:
      add(Content::input, Buffer::receive, at, block, (rank + shape.ranks - 1) % shape.ranks, 0);
      break;
    case BenchOperation::allGather:
    case BenchOperation::gather:
    case BenchOperation::allToAll: {
      if (layout.receiveBytes == 0) break;
      size_t from = shape.operation == BenchOperation::allToAll ? mine : 0;
      for (int source = 0; source < shape.ranks; source++) {
        add(Content::input, Buffer::receive, at + block * static_cast<size_t>(source), block,
            source, from);
      }
      break;
    }
  }

  // What the call must not modify: its input, and everything else in the receive buffer.
  const size_t end = at + layout.receiveBytes;
  if (layout.sendBuffer == Buffer::send) {
    add(Content::input, Buffer::send, 0, layout.sendBytes, rank, 0);
    add(Content::poison, Buffer::send, layout.sendBytes, layout.bufferBytes - layout.sendBytes, -1,
        0);
    add(Content::poison, Buffer::receive, 0, at, -1, 0);
    add(Content::poison, Buffer::receive, end, layout.bufferBytes - end, -1, 0);
    return segments;
  }
  add(Content::poison, Buffer::send, 0, layout.bufferBytes, -1, 0);
  const size_t sendEnd = layout.sendOffset + layout.sendBytes;
  auto leftAlone = [&](size_t first, size_t last) {  // [first, last) is outside the result
    size_t inputFirst = std::clamp(layout.sendOffset, first, last);
    size_t inputLast = std::clamp(sendEnd, first, last);
    add(Content::poison, Buffer::receive, first, inputFirst - first, -1, 0);
    add(Content::input, Buffer::receive, inputFirst, inputLast - inputFirst, rank,
        inputFirst - layout.sendOffset);
    add(Content::poison, Buffer::receive, inputLast, last - inputLast, -1, 0);
  };
  if (layout.receiveBytes == 0) {
    leftAlone(0, layout.bufferBytes);
  } else {
    leftAlone(0, at);
    leftAlone(end, layout.bufferBytes);
  }
  return segments;
}

}  // namespace unisono::bench
