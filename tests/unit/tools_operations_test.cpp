// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "operations.h"

namespace unisono::bench {
namespace {

using Content = BufferSegment::Content;
using Buffer = BufferSegment::Buffer;

constexpr int kRanks = 4;
constexpr size_t kWidth = 4;

CallLayout makeLayout(BenchOperation operation, bool inPlace, int root = 2) {
  return {operation, kRanks, root, 10, kWidth, inPlace};
}

TEST(Operations, BusFactors) {
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::allReduce, 8), 1.75);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::allGather, 8), 0.875);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::reduceScatter, 2), 0.5);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::allToAll, 4), 0.75);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::gather, 4), 0.75);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::scatter, 4), 0.75);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::broadcast, 8), 1);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::reduce, 8), 1);
  EXPECT_DOUBLE_EQ(busFactor(BenchOperation::sendReceive, 8), 1);
}

TEST(Operations, CountsRoundDownButNotToNothing) {
  EXPECT_EQ(countForBytes(BenchOperation::allReduce, 1024, 4, 8), 256u);
  EXPECT_EQ(countForBytes(BenchOperation::allGather, 1024, 4, 8), 32u);
  EXPECT_EQ(countForBytes(BenchOperation::allGather, 8, 4, 8), 1u);
  EXPECT_EQ(countForBytes(BenchOperation::allReduce, 7, 4, 8), 1u);
  EXPECT_EQ(countForBytes(BenchOperation::allReduce, 0, 4, 8), 0u);
  EXPECT_EQ(bytesForCount(BenchOperation::allGather, 32, 4, 8), 1024u);
  EXPECT_EQ(bytesForCount(BenchOperation::broadcast, 32, 4, 8), 128u);
}

// Every byte of both buffers is accounted for exactly once, whatever the call.
TEST(Operations, SegmentsCoverBothBuffersOnce) {
  for (const OperationInfo& info : operations()) {
    for (bool inPlace : {false, true}) {
      if (inPlace && !info.hasInPlace) continue;
      for (int rank = 0; rank < kRanks; rank++) {
        CallLayout shape = makeLayout(info.operation, inPlace);
        RankLayout layout = rankLayout(shape, rank);
        std::vector<int> covered[2];
        covered[0].resize(layout.bufferBytes);
        covered[1].resize(layout.bufferBytes);
        for (const BufferSegment& segment : expectedSegments(shape, rank)) {
          auto& bytes = covered[segment.buffer == Buffer::receive ? 1 : 0];
          ASSERT_LE(segment.offset + segment.bytes, bytes.size());
          for (size_t i = 0; i < segment.bytes; i++) bytes[segment.offset + i]++;
        }
        for (const auto& bytes : covered) {
          EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](int times) { return times == 1; }))
              << info.name << (inPlace ? " in place" : "") << " rank " << rank;
        }
      }
    }
  }
}

// Emulates each operation on byte labels and compares with what the segments say.
TEST(Operations, SegmentsNameTheRightSources) {
  auto sourceAt = [](const std::vector<BufferSegment>& segments, size_t offset) {
    for (const BufferSegment& s : segments) {
      if (s.buffer == Buffer::receive && offset >= s.offset && offset < s.offset + s.bytes &&
          s.content == Content::input) {
        return std::pair<int, size_t>(s.source, s.sourceOffset + offset - s.offset);
      }
    }
    return std::pair<int, size_t>(-1, 0);
  };
  using Source = std::pair<int, size_t>;
  for (int rank = 0; rank < kRanks; rank++) {
    const auto at = static_cast<size_t>(rank);
    EXPECT_EQ(
        sourceAt(expectedSegments(makeLayout(BenchOperation::allGather, false), rank), 3 * 40 + 5),
        Source(3, 5));
    EXPECT_EQ(sourceAt(expectedSegments(makeLayout(BenchOperation::broadcast, false), rank), 7),
              Source(2, 7));
    EXPECT_EQ(sourceAt(expectedSegments(makeLayout(BenchOperation::scatter, false), rank), 7),
              Source(2, at * 40 + 7));
    EXPECT_EQ(sourceAt(expectedSegments(makeLayout(BenchOperation::allToAll, false), rank), 40 + 7),
              Source(1, at * 40 + 7));
    EXPECT_EQ(sourceAt(expectedSegments(makeLayout(BenchOperation::sendReceive, false), rank), 7),
              Source((rank + 3) % 4, 7));
    EXPECT_EQ(sourceAt(expectedSegments(makeLayout(BenchOperation::gather, false), rank), 40 + 7),
              rank == 2 ? Source(1, 7) : Source(-1, 0));
  }
}

TEST(Operations, ReductionsLieWhereTheCallPutsThem) {
  std::vector<BufferSegment> segments =
      expectedSegments(makeLayout(BenchOperation::reduceScatter, true), 3);
  ASSERT_EQ(segments[0].content, Content::reduction);
  EXPECT_EQ(segments[0].offset, 120u);
  EXPECT_EQ(segments[0].sourceOffset, 120u);
  EXPECT_EQ(segments[0].bytes, 40u);
  EXPECT_TRUE(std::none_of(segments.begin() + 1, segments.end(),
                           [](const BufferSegment& s) { return s.content == Content::reduction; }));
  for (const BufferSegment& segment :
       expectedSegments(makeLayout(BenchOperation::reduce, false), 0)) {
    EXPECT_NE(segment.content, Content::reduction) << "only the root gets a result";
  }
}

}  // namespace
}  // namespace unisono::bench
