// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"

// Every call with every type and operator, in and out of place.
namespace unisono::system_test {
namespace {

class Collectives : public ::testing::TestWithParam<int> {};

void run(const Ranks& ranks, const Case& call) {
  try {
    runCase(ranks, call);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

// All, or the first UNISONO_TEST_CALLS of them: the other variants carry the rest the same way.
std::span<const Call> callsToTest() {
  const char* number = std::getenv("UNISONO_TEST_CALLS");
  return std::span(kCalls).first(number == nullptr ? std::size(kCalls) : std::stoul(number));
}

std::vector<Operator> operatorsOf(Call call) {
  if (reduces(call)) return {std::begin(kOperators), std::end(kOperators)};
  return {Operator::sum};
}

TEST_P(Collectives, EveryTypeAndOperator) {
  const Ranks ranks(GetParam());
  for (const Call call : callsToTest()) {
    for (int type = 0; type < bench::kElementTypes; type++) {
      for (Operator op : operatorsOf(call)) {
        for (bool inPlace : {false, true}) {
          if (inPlace && !canBeInPlace(call)) continue;
          // A sanitizer sees nothing new in every pair of type and operator.
          if (kSanitized && (type + static_cast<int>(op) + inPlace) % 4 != 0) continue;
          const int root = (type + static_cast<int>(op)) % ranks.size();
          for (size_t count : {size_t{1}, size_t{977}}) {
            run(ranks, {call, static_cast<bench::ElementType>(type), op, inPlace, count, root,
                        static_cast<size_t>(type % 4)});
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(Collectives, EveryCount) {
  const Ranks ranks(GetParam());
  const std::vector<size_t> counts =
      kSanitized ? std::vector<size_t>{0, 8191}
                 : std::vector<size_t>{0, 2, 3, 7, 8, 9, 31, 255, 256, 257, 4096, 8191, 32771};
  for (const Call call : callsToTest()) {
    for (size_t count : counts) {
      for (bool inPlace : {false, true}) {
        if (inPlace && !canBeInPlace(call)) continue;
        for (int root = 0; root < ranks.size(); root++) {
          const bool hasRoot = call == Call::reduce || call == Call::broadcast ||
                               call == Call::gather || call == Call::scatter;
          if (root > 0 && !hasRoot) break;
          run(ranks,
              {call, bench::ElementType::int32, Operator::sum, inPlace, count, root, count % 3});
          if (HasFailure()) return;
        }
      }
    }
  }
}

// A connection's FIFO holds 256 KiB, all of a rank's half a MiB.
TEST_P(Collectives, LargerThanEveryBuffer) {
  const Ranks ranks(GetParam());
  const size_t count = static_cast<size_t>(scaled(400'001, 70'001));
  for (const Call call : callsToTest()) {
    for (auto type : {bench::ElementType::float32, bench::ElementType::uint8}) {
      run(ranks, {call, type, Operator::sum, false, count, ranks.size() - 1, 1});
      if (HasFailure()) return;
    }
  }
}

// What is sent to one rank is more than lines of LL carry and less than peers' buffers are used
// for.
TEST_P(Collectives, OfMiddleSizes) {
  const Ranks ranks(GetParam());
  for (const Call call : callsToTest()) {
    for (const size_t count : {size_t{66'001}, size_t{70'000}, size_t{150'004}}) {
      for (bool inPlace : {false, true}) {
        // The others differ in length and alignment alone, which a sanitizer sees in smaller calls.
        if ((inPlace && !canBeInPlace(call)) || (kSanitized && count != 66'001)) continue;
        run(ranks, {call, bench::ElementType::int32, Operator::sum, inPlace, count,
                    ranks.size() / 2, count % 2});
        if (HasFailure()) return;
      }
    }
  }
}

// Calls follow each other on one stream without a wait in between: what one leaves in the buffers
// must not meet the next.
TEST_P(Collectives, ManyInARow) {
  const Ranks ranks(GetParam());
  std::vector<std::vector<std::unique_ptr<CaseBuffers>>> calls;
  for (int i = 0; i < scaled(120, 40); i++) {
    Case call;
    call.call = callsToTest()[static_cast<size_t>(i) % callsToTest().size()];
    call.count = static_cast<size_t>(1) << (i * 7 % 15);
    call.root = i % ranks.size();
    call.op = kOperators[static_cast<size_t>(i) % 4];
    auto& buffers = calls.emplace_back();
    for (int rank = 0; rank < ranks.size(); rank++) {
      buffers.push_back(std::make_unique<CaseBuffers>(call, rank, ranks.size(), rank));
    }
    ranks.inGroup([&](int rank) {
      check(buffers[static_cast<size_t>(rank)]->enqueue(ranks.comm(rank), ranks.stream(rank)));
    });
  }
  ranks.synchronize();
  for (const auto& buffers : calls) {
    for (const auto& buffer : buffers) EXPECT_NO_THROW(buffer->verify());
  }
}

// Of the simulated devices in this process.
size_t mappedDeviceBytes() {
  size_t bytes = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("unisono-device") == std::string::npos) continue;
    size_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) == 2) bytes += end - begin;
  }
  return bytes;
}

// The copies that all-to-alls in place need are held in memory of the device.
TEST(AllToAllInPlace, OfGrowingSizesHoldsASmallMultipleOfTheLargest) {
  constexpr size_t kSteps = 32, kStep = scaled(512 << 10, 128 << 10), kLargest = kSteps * kStep;
  const Ranks ranks(2);
  std::vector<DeviceBuffer> buffers;
  std::mt19937 random(1);
  std::vector<unsigned char> pattern(kLargest);
  std::generate(pattern.begin(), pattern.end(),
                [&] { return static_cast<unsigned char>(random()); });
  for (int rank = 0; rank < 2; rank++) {
    buffers.emplace_back(rank, kLargest);
    std::copy(pattern.begin(), pattern.end(), buffers.back().as<unsigned char>());
  }
  auto exchange = [&](size_t bytes) {
    ranks.inGroup([&](int rank) {
      void* data = buffers[static_cast<size_t>(rank)].as();
      check(ncclAlltoAll(data, data, bytes / 2, ncclInt8, ranks.comm(rank), ranks.stream(rank)));
    });
  };
  constexpr size_t kStaged = (512 << 10) + 2;   // direct ones need no copy
  for (int i = 0; i < 2; i++) exchange(kStep);  // connects what direct ones use
  exchange(kStaged);
  exchange(kStaged);
  ranks.synchronize();
  const size_t before = mappedDeviceBytes();
  ASSERT_GT(before, 2 * kLargest);
  for (size_t step = 1; step <= kSteps; step++) {
    // Twice: the second one takes every block back to where it was.
    for (int i = 0; i < 2; i++) exchange(step * kStep);
    ranks.synchronize();
  }
  // The last of the smaller buffers may be released a moment later.
  const size_t allowed = before + 2 * kLargest * 3 / 2;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (mappedDeviceBytes() > allowed && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_LE(mappedDeviceBytes(), allowed);
  for (const DeviceBuffer& buffer : buffers) {
    EXPECT_TRUE(std::equal(pattern.begin(), pattern.end(), buffer.as<unsigned char>()));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::ValuesIn(numbersOfRanks()));

}  // namespace
}  // namespace unisono::system_test
