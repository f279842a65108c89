// SPDX-License-Identifier: Apache-2.0
#include "device/protocol/lines.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "support/seed.h"

// Where the words of a buffer are in lines of LL128, with as many lanes to a line as on a GPU.
namespace unisono::protocol {
namespace {

using namespace device::host_target;

constexpr int kLanes = 8;  // of a line
constexpr uint32_t kDataWords = device::kLineWords - 1;

template <int kLines>
uint32_t passWords(int lanes) {
  return static_cast<uint32_t>(lanes / kLanes) * kLines * kDataWords;
}

// By place in the lines of some passes, the number of the word there plus one; 0 for flags. Words
// must be in the first lines that have room for them, whatever the pass of the other end is.
template <template <int, int> class PlaceOf, int kLines>
std::vector<uint64_t> wordsInLines(int lanes, uint32_t words) {
  using Place = PlaceOf<kLanes, kLines>;
  std::vector<uint64_t> found(size_t{words / kDataWords} * device::kLineWords);
  for (uint32_t pass = 0; pass * passWords<kLines>(lanes) < words; pass++) {
    for (int lane = 0; lane < lanes; lane++) {
      const Place place(pass, lane, lanes);
      EXPECT_EQ(place.hasFlag(), lane % kLanes == kLanes - 1);
      uint64_t word[Place::kWords], inBuffer[Place::kWords];
      for (int k = 0; k < Place::kWords; k++) inBuffer[k] = place.first() + place.distance(k);
      std::ranges::copy(inBuffer, word);
      place.toLines(word);
      for (int k = 0; k < Place::kWords; k++) {
        const uint32_t line = place.line(k / 2);
        const auto at = line * device::kLineWords + static_cast<uint32_t>(2 * place.lane() + k % 2);
        if (place.hasFlag() && k % 2 == 1) {
          EXPECT_EQ(at % device::kLineWords, kDataWords);
          word[k] = ~uint64_t{0};
          continue;
        }
        EXPECT_EQ(word[k] / kDataWords, line) << "lane " << lane;
        found.at(at) = word[k] + 1;
      }
      place.toBuffer(word);
      for (int k = 0; k < Place::kWords; k++) {
        if (!place.has(k)) continue;
        EXPECT_EQ(word[k], inBuffer[k]) << "lane " << lane;
        if (Place::kHasVectors) {
          EXPECT_EQ(inBuffer[k] % 2, static_cast<uint64_t>(k % 2)) << "lane " << lane;
          EXPECT_TRUE(place.has(k / 2 * 2));
        }
      }
    }
  }
  return found;
}

template <template <int, int> class PlaceOf>
void checkPlaces() {
  constexpr uint32_t kWords = 3 * 512 / kLanes * 4 * kDataWords;  // of 3 passes of 512 lanes
  const std::vector<uint64_t> found = wordsInLines<PlaceOf, 4>(512, kWords);
  EXPECT_EQ(found, (wordsInLines<PlaceOf, 2>(512, kWords)));
  EXPECT_EQ(found, (wordsInLines<PlaceOf, 4>(32, kWords)));
  EXPECT_EQ(found, (wordsInLines<PlaceOf, 2>(64, kWords)));
  std::vector<uint64_t> all = found;
  std::erase(all, uint64_t{0});
  std::ranges::sort(all);
  EXPECT_EQ(all.size(), kWords);
  EXPECT_TRUE(std::ranges::adjacent_find(all) == all.end()) << "a word is in two places";
}

TEST(LinePlaces, HoldEveryWordOnce) {
  checkPlaces<LinePlace>();
}
TEST(LinePairPlaces, HoldEveryWordOnce) {
  checkPlaces<LinePairPlace>();
}

// Buffers of any alignment and size, moved by all lanes. What is around them stays as it is.
template <template <int, int> class PlaceOf>
void moveBuffers() {
  const uint64_t seed = test::seed();
  std::mt19937_64 random(seed);
  constexpr int kAllLanes = 32, kLines = 4;
  using Place = PlaceOf<kLanes, kLines>;
  for (int round = 0; round < 2000; round++) {
    const uint32_t elementSize = 1u << random() % 4;
    const auto shift = [&]() -> size_t {
      return random() % 3 == 0 ? 0 : random() % 16 / elementSize * elementSize;
    };
    const size_t from = shift(), to = shift();
    const auto bytes = static_cast<uint32_t>((1 + random() % 4000 / elementSize) * elementSize);
    alignas(16) std::byte source[4096 + 32], target[4096 + 32], expected[4096 + 32];
    for (std::byte& each : source) each = static_cast<std::byte>(random());
    for (std::byte& each : target) each = static_cast<std::byte>(random());
    std::memcpy(expected, target, sizeof(target));
    std::memcpy(expected + to, source + from, bytes);
    const UserWords input(source + from, bytes, elementSize);
    const UserWords output(target + to, bytes, elementSize);
    for (uint32_t pass = 0; pass * passWords<kLines>(kAllLanes) < (bytes + 7) / 8; pass++) {
      for (int lane = 0; lane < kAllLanes; lane++) {
        uint64_t word[Place::kWords];
        const Place place(pass, lane, kAllLanes);
        input.load(place, word);
        for (int k = 0; k < Place::kWords; k++) {
          if (!place.has(k)) word[k] = random();
        }
        output.store(place, word);
      }
    }
    ASSERT_EQ(std::memcmp(target, expected, sizeof(target)), 0)
        << bytes << " bytes from " << from << " to " << to << ", elements of " << elementSize;
  }
}

TEST(LinePlaces, MoveBuffersOfAnyAlignment) {
  moveBuffers<LinePlace>();
}
TEST(LinePairPlaces, MoveBuffersOfAnyAlignment) {
  moveBuffers<LinePairPlace>();
}

}  // namespace
}  // namespace unisono::protocol
