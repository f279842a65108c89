// SPDX-License-Identifier: Apache-2.0
// Fills the buffers of a RankSet with inputs and compares them with the expected content.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/math.h"
#include "rank_set.h"

namespace unisono::bench {
namespace {

// The piece of a buffer that one helper handles at a time; a multiple of every element size.
constexpr size_t kChunkBytes = size_t{1} << 20;
// Longer ranges are checked in their first and last chunks and in every kSampleStep-th between.
constexpr size_t kCheckAllBytes = size_t{1} << 30;
constexpr size_t kSampleEdgeChunks = 64;
constexpr size_t kSampleStep = 8;

// Calls body(0) to body(tasks - 1) from up to `helpers` threads; throws the first exception.
void inParallel(size_t tasks, int helpers, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  auto work = [&] {
    try {
      for (size_t task = next++; task < tasks; task = next++) body(task);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  size_t threads = std::min<size_t>(tasks, static_cast<size_t>(std::max(helpers, 1)));
  std::vector<std::jthread> others;
  for (size_t i = 1; i < threads; i++) others.emplace_back(work);
  work();
  others.clear();
  if (failure) std::rethrow_exception(failure);
}

// The first byte that is not poison, or `bytes`.
size_t firstNotPoison(const std::byte* data, size_t bytes) {
  auto* end = data + bytes;
  return static_cast<size_t>(std::find_if(data, end, [](std::byte b) { return b != kPoison; }) -
                             data);
}

size_t countDifferent(const std::byte* a, const std::byte* b, size_t bytes, size_t unit,
                      size_t* first) {
  if (std::memcmp(a, b, bytes) == 0) return 0;
  size_t different = 0;
  for (size_t at = 0; at < bytes; at += unit) {
    if (std::memcmp(a + at, b + at, std::min(unit, bytes - at)) == 0) continue;
    if (different++ == 0) *first = at;
  }
  return different;
}

std::string hexText(const std::byte* data, size_t bytes) {
  std::string text = "0x";
  for (size_t i = bytes; i > 0; i--) text += fmt::format("{:02x}", static_cast<int>(data[i - 1]));
  return text;
}

const char* bufferName(BufferSegment::Buffer buffer) {
  return buffer == BufferSegment::Buffer::send ? "send" : "receive";
}

}  // namespace

void RankSet::fill(const CallSpec& call, const Reference& reference, int helpers) {
  for (Rank& rank : ranks_) {
    const RankLayout layout = rankLayout(call.shape, rank.rank);
    const std::vector<std::byte> poison(std::min(kChunkBytes, layout.bufferBytes + 2 * kGuardBytes),
                                        kPoison);
    device_.setDevice(rank.device);
    for (const Buffer* each : {&rank.send, &rank.receive}) {
      size_t bytes = layout.bufferBytes + 2 * kGuardBytes;
      for (size_t at = 0; at < bytes; at += poison.size()) {
        device_.copyToDevice(each->base + at, poison.data(), std::min(poison.size(), bytes - at));
      }
    }
    std::byte* target = buffer(rank, layout.sendBuffer).data() + layout.sendOffset;
    const size_t chunks = ceilDivide(layout.sendBytes, kChunkBytes);
    inParallel(chunks, helpers, [&](size_t chunk) {
      size_t at = chunk * kChunkBytes;
      std::vector<std::byte> data(std::min(kChunkBytes, layout.sendBytes - at));
      reference.input(rank.rank, at, data.size(), data.data());
      device_.setDevice(rank.device);
      device_.copyToDevice(target + at, data.data(), data.size());
    });
  }
}

void RankSet::verifySegment(const Rank& rank, const BufferSegment& segment, const CallSpec& call,
                            const Reference& reference, int helpers, Contribution& result) {
  const std::byte* source = buffer(rank, segment.buffer).data() + segment.offset;
  const size_t width = call.shape.elementBytes;
  const size_t chunks = ceilDivide(segment.bytes, kChunkBytes);
  const bool sample = segment.bytes > kCheckAllBytes;
  std::mutex mutex;
  auto report = [&](uint64_t wrong, size_t at, std::string text) {
    std::lock_guard lock(mutex);
    if (result.wrong == 0) {
      std::string place = fmt::format("rank {} (device {}), {} buffer, byte {}: {}", rank.rank,
                                      rank.device, bufferName(segment.buffer),
                                      static_cast<ptrdiff_t>(segment.offset + at), text);
      size_t length = std::min(place.size(), sizeof(result.message) - 1);
      std::memcpy(result.message, place.data(), length);
      result.message[length] = '\0';
    }
    result.wrong += wrong;
  };

  std::atomic<uint64_t> checked{0};
  inParallel(chunks, helpers, [&](size_t chunk) {
    if (sample && chunk >= kSampleEdgeChunks && chunk + kSampleEdgeChunks < chunks &&
        chunk % kSampleStep != 0) {
      return;
    }
    const size_t at = chunk * kChunkBytes;
    std::vector<std::byte> actual(std::min(kChunkBytes, segment.bytes - at));
    device_.setDevice(rank.device);
    device_.copyToHost(actual.data(), source + at, actual.size());
    checked += actual.size();
    switch (segment.content) {
      case BufferSegment::Content::poison: {
        size_t first = firstNotPoison(actual.data(), actual.size());
        if (first == actual.size()) return;
        auto wrong = static_cast<uint64_t>(
            std::count_if(actual.begin(), actual.end(), [](std::byte b) { return b != kPoison; }));
        return report((wrong + width - 1) / width, at + first,
                      fmt::format("{} bytes outside the result were written", wrong));
      }
      case BufferSegment::Content::input: {
        std::vector<std::byte> expected(actual.size());
        reference.input(segment.source, segment.sourceOffset + at, expected.size(),
                        expected.data());
        size_t first = 0;
        uint64_t wrong =
            countDifferent(actual.data(), expected.data(), actual.size(), width, &first);
        if (wrong == 0) return;
        const bool own =
            segment.source == rank.rank && segment.buffer == BufferSegment::Buffer::send;
        return report(wrong, at + first,
                      fmt::format("expected {} of rank {}'s input, found {}{}",
                                  hexText(expected.data() + first, width), segment.source,
                                  hexText(actual.data() + first, width),
                                  own ? "; the call overwrote its own input" : ""));
      }
      case BufferSegment::Content::reduction: {
        size_t firstElement = (segment.sourceOffset + at) / width;
        size_t first = 0;
        uint64_t wrong =
            reference.countWrong(firstElement, actual.size() / width, actual.data(), &first);
        if (wrong == 0) return;
        Reference::Expectation expected = reference.expectation(firstElement + first);
        double found = 0;
        decodeElements(call.type, actual.data() + first * width, 1, &found);
        return report(wrong, at + first * width,
                      fmt::format("element {}: expected {:.17g} within {:.3g}, found {:.17g}",
                                  firstElement + first, expected.value, expected.tolerance, found));
      }
    }
  });
  result.checked += checked;
  result.sampled = result.sampled || (sample && chunks > 2 * kSampleEdgeChunks);
}

void RankSet::verify(const CallSpec& call, const Reference& reference, int helpers,
                     Contribution& result) {
  for (const Rank& rank : ranks_) {
    for (const BufferSegment& segment : expectedSegments(call.shape, rank.rank)) {
      verifySegment(rank, segment, call, reference, helpers, result);
    }
    const size_t end = rankLayout(call.shape, rank.rank).bufferBytes;
    for (BufferSegment::Buffer which :
         {BufferSegment::Buffer::send, BufferSegment::Buffer::receive}) {
      // Before the buffer's start: an offset that wraps around to -kGuardBytes.
      BufferSegment before{BufferSegment::Content::poison, which, size_t{0} - kGuardBytes,
                           kGuardBytes};
      BufferSegment after{BufferSegment::Content::poison, which, end, kGuardBytes};
      verifySegment(rank, before, call, reference, helpers, result);
      verifySegment(rank, after, call, reference, helpers, result);
    }
  }
}

}  // namespace unisono::bench
