// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

// Seeds of random tests. A test that draws random inputs takes its seed from here, so that every
// failure can be replayed.
namespace unisono::test {

// The seed of the running test: UNISONO_TEST_SEED if that is set, else a number drawn once a
// process. Prints the command that repeats the test with this seed, before the test can fail, crash
// or hang.
uint64_t seed();

// The command that repeats the running test with `seed`: the variables of the environment that
// change what the library or the tests do, the program, and the filter for this test.
std::string replayCommand(uint64_t seed);

}  // namespace unisono::test
