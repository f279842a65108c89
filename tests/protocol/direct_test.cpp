// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "seeds.h"

// All-reduce of the direct family: the same bits on every rank, those of a reduction in rank order,
// over hundreds of consecutive calls of any size.
namespace unisono::protocol {
namespace {

using device::DataType;
using device::Reduction;
using plan::Call;

constexpr uint64_t kMostBytes = 256 << 10;
constexpr Geometry kDirect{.name = "direct calls",
                           .channels = 2,
                           .slots = 4,
                           .slotBytes = 512,
                           .slicesPerChunk = 2,
                           .peerChannels = 2,
                           .minBytesPerChannel = 1024,
                           .directLineBits = 17};

constexpr Geometry kWide{.name = "direct calls over LL128",
                         .channels = 2,
                         .slots = 4,
                         .directLineBits = 4,
                         .wide = {.blocks = 8, .slotLines = 16},
                         .algorithms = "Direct",
                         .protocols = "LL128"};
constexpr Geometry kTwoShot{.name = "calls in two shots",
                            .channels = 2,
                            .slots = 4,
                            .directLineBits = 4,
                            .wide = {.blocks = 8, .slotLines = 16},
                            .algorithms = "TwoShot",
                            .protocols = "LL128"};
World& directWorld(uint64_t seed) {
  const Geometry* geometries[] = {&kDirect, &kWide, &kTwoShot};
  return worldOf(*geometries[seed / 7 % 3], 2 + static_cast<int>(seed % 7));
}

// One all-reduce of all ranks.
struct Reduced {
  Operator op;
  size_t count;
  std::vector<size_t> outputs;                 // [rank]
  std::vector<std::vector<std::byte>> inputs;  // [rank]
};

// Any value, so that the order of additions and every rounding shows in the result. Factors are
// powers of two: products stay exact, so the order of rounding does not matter.
uint64_t randomElement(DataType type, Random& random) {
  const int bits = 8 * device::elementBytes(type);
  if (!device::isFloatingPoint(type)) return random() >> (64 - bits);
  const double mantissa = static_cast<double>(random() % 4096) / 1024 - 2;
  return fromDouble(type, mantissa * (random() % 8 == 0 ? 16 : 1));
}

Reduced addAllReduce(World& world, Memories& memories, Random& random, DataType type,
                     Reduction reduction, size_t count, std::vector<plan::Task>& tasks) {
  const auto size = device::elementBytes(type);
  const auto ranks = static_cast<size_t>(world.ranks());
  Reduced reduced{{type, reduction, {}, ranks}, count, {}, {}};
  const bool inPlace = below(random, 2) == 0;
  for (size_t r = 0; r < ranks; r++) {
    // Half of a subnormal number is rounded; among the inputs, only types of 8 bits have those.
    const double factors[] = {1, 2, -1, size == 1 ? -2 : 0.5};
    reduced.op.factors.push_back({factors[below(random, 4)], random()});
    std::vector<std::byte> data(count * size);
    for (size_t i = 0; i < count; i++) {
      writeElement(data.data(), i, size, randomElement(type, random));
    }
    const size_t input = memories[r].take(count * size, size, random);
    memories[r].set(input, data.data(), data.size());
    reduced.inputs.push_back(std::move(data));
    reduced.outputs.push_back(inPlace ? input : memories[r].take(count * size, size, random));
    device::ReductionSpec spec{type, reduction, false, 0};
    if (reduction == Reduction::sumPostDivide) spec.scalar = ranks;
    if (reduction == Reduction::preMulSum) spec.scalar = scalarOf(type, reduced.op.factors[r]);
    tasks.push_back({Call::allReduce, memories[r].at(input), memories[r].at(reduced.outputs[r]),
                     count, spec, 0});
  }
  return reduced;
}

// Writes the result of `reduced` into what the memories must hold.
void expect(const Reduced& reduced, Memories& memories) {
  const auto size = device::elementBytes(reduced.op.type);
  std::vector<uint64_t> operands(reduced.inputs.size());
  for (size_t i = 0; i < reduced.count; i++) {
    for (size_t r = 0; r < operands.size(); r++) {
      operands[r] = readElement(reduced.inputs[r].data(), i, size);
    }
    const uint64_t result = reduceInOrder(reduced.op, operands);
    for (size_t r = 0; r < operands.size(); r++) {
      writeElement(memories[r].expected(reduced.outputs[r]), i, size, result);
    }
  }
}

void clear(World& world, Memories& memories, Random& random) {
  for (size_t r = 0; r < static_cast<size_t>(world.ranks()); r++) {
    memories[r].clear(static_cast<std::byte>(below(random, 256)));
  }
}

std::string outcome(World& world, const Memories& memories) {
  std::string wrong;
  const std::vector<std::string> errors = world.synchronize();
  for (size_t r = 0; r < errors.size(); r++) {
    const std::string difference = errors[r].empty() ? memories[r].compare() : errors[r];
    if (!difference.empty()) wrong += fmt::format(" rank {}: {};", r, difference);
  }
  return wrong;
}

std::string runOne(World& world, Random& random, DataType type, Reduction reduction, size_t count) {
  clear(world, memories(), random);
  std::vector<plan::Task> tasks;
  const Reduced reduced = addAllReduce(world, memories(), random, type, reduction, count, tasks);
  for (size_t r = 0; r < tasks.size(); r++) world.enqueue(static_cast<int>(r), {tasks[r]});
  expect(reduced, memories());
  const std::string wrong = outcome(world, memories());
  return wrong.empty()
             ? wrong
             : fmt::format("{} ranks, {} elements of type {}, operator {}:{}", world.ranks(), count,
                           static_cast<int>(type), static_cast<int>(reduction), wrong);
}

TEST(Direct, EveryTypeAndOperatorInRankOrder) {
  forEachSeed(160, "direct types", [](uint64_t seed, Random& random) {
    World& world = directWorld(seed);
    world.reset(random);
    setSchedule(seed);
    std::string wrong;
    for (int t = 0; t < device::kDataTypes; t++) {
      for (int o = 0; o < device::kReductions; o++) {
        const auto type = static_cast<DataType>(t);
        const auto reduction = static_cast<Reduction>(o);
        if (reduction == Reduction::sumPostDivide && device::isFloatingPoint(type)) continue;
        wrong += runOne(world, random, type, reduction, 1 + below(random, 40));
      }
    }
    return wrong;
  });
}

TEST(Direct, AllSizes) {
  forEachSeed(64, "direct sizes", [](uint64_t seed, Random& random) {
    World& world = directWorld(seed);
    world.reset(random);
    setSchedule(seed);
    std::string wrong;
    // Around the sizes at which the number of blocks changes, and the largest.
    static constexpr uint64_t kSizes[] = {1, 7, 8, 9, 4095, 4096, 4097, 8192, 12300, kMostBytes};
    const uint64_t bytes = kSizes[seed % std::size(kSizes)];
    const auto type = bytes % 4 != 0 ? DataType::int8 : DataType::float32;
    const auto size = device::elementBytes(type);
    wrong += runOne(world, random, type, Reduction::sum, bytes / size);
    wrong += runOne(world, random, DataType::bfloat16, Reduction::sum,
                    1 + below(random, 1 << below(random, 14)));
    return wrong;
  });
}

// Hundreds of calls of all sizes in flight, ranks far apart, ring calls in between: the two halves
// of the scratch must never hold what somebody still reads.
TEST(Direct, ManyCallsInFlight) {
  forEachSeed(48, "direct epochs", [](uint64_t seed, Random& random) {
    World& world = directWorld(seed);
    world.reset(random);
    setSchedule(seed);
    clear(world, memories(), random);
    constexpr int kCalls = kSanitized ? 40 : 120;
    std::vector<Reduced> calls;
    std::vector<std::vector<plan::Task>> tasks(kCalls);
    for (auto& ofRanks : tasks) {
      static constexpr DataType kTypes[] = {DataType::float32, DataType::float16, DataType::uint8,
                                            DataType::int64};
      const DataType type = kTypes[below(random, std::size(kTypes))];
      // Mostly a line or a few, which is when the ranks come closest.
      const size_t count = 1 + below(random, uint64_t{1} << below(random, 13));
      calls.push_back(
          addAllReduce(world, memories(), random, type, Reduction::sum, count, ofRanks));
      expect(calls.back(), memories());
    }
    // Now and then one that goes by the ring: a broadcast of nothing that matters.
    std::vector<size_t> scrap;
    for (int r = 0; r < world.ranks(); r++) {
      RankMemory& memory = memories()[static_cast<size_t>(r)];
      scrap.push_back(memory.take(700, 1, random));
      memory.set(scrap.back(), std::vector<std::byte>(700).data(), 700);
    }
    std::vector<int> next(static_cast<size_t>(world.ranks()));
    for (int left = kCalls * world.ranks(); left > 0;) {
      const auto rank = static_cast<size_t>(below(random, next.size()));
      // One rank may be handed many calls before another gets its first.
      for (uint64_t run = 1 + below(random, 30); run > 0 && next[rank] < kCalls; run--, left--) {
        const auto call = static_cast<size_t>(next[rank]++);
        std::vector<plan::Task> group{tasks[call][rank]};
        if (call % 5 == 0) {
          std::byte* buffer = memories()[rank].at(scrap[rank]);
          group.push_back({Call::broadcast,
                           buffer,
                           buffer,
                           700,
                           {DataType::int8, Reduction::sum, false, 0},
                           0});
        }
        if (below(random, 10) == 0) {
          world.enqueueDelay(static_cast<int>(rank), below(random, 300));
        }
        world.enqueue(static_cast<int>(rank), group);
      }
    }
    return outcome(world, memories());
  });
}

}  // namespace
}  // namespace unisono::protocol
