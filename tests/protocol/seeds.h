// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "scenario.h"
#include "support/sanitized.h"

// Tests by number: everything that a seed does, its world, the past of the world's counters, the
// calls, their data and the schedule, follows from the number and the name of the test.
namespace unisono::protocol {

using test::kSanitized;

struct SeedRange {
  uint64_t first;
  uint64_t count;
};
// `count` of them (fewer under a sanitizer and with threads), UNISONO_TEST_SEEDS of them, or only
// UNISONO_TEST_SEED.
SeedRange seedRange(uint64_t count);

// The generator of one seed of one test.
Random randomOf(uint64_t seed, const std::string& test);

// Geometries that make every path of the protocols common.
const std::vector<Geometry>& geometries();
// Throws for a name that no geometry has.
const Geometry& geometryOf(const std::string& name);

// The world of a geometry and a number of ranks; made once, and again after discardWorlds().
World& worldOf(const Geometry& geometry, int ranks);
// After an error: counters of the two ends of a connection may differ permanently.
void discardWorlds();
Memories& memories();

// Restarts the schedule where the executor has one.
void setSchedule(uint64_t seed);

// Runs `body` for every seed until three have failed; reports each failure with its number.
// `body` returns what is wrong, or an empty text.
void forEachSeed(uint64_t count, const std::string& test,
                 const std::function<std::string(uint64_t seed, Random& random)>& body);

}  // namespace unisono::protocol
