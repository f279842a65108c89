// SPDX-License-Identifier: Apache-2.0
#include "support/seed.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>

namespace unisono::test {
namespace {

constexpr const char* kExpected = "UNISONO_TEST_EXPECTED";

// Runs itself again with the printed command, where the same seed must come out.
TEST(Seed, TheCommandRepeatsIt) {
  if (const char* expected = std::getenv(kExpected)) {
    EXPECT_EQ(std::to_string(seed()), expected);
    return;
  }
  ::setenv(kExpected, std::to_string(seed()).c_str(), 1);
  const std::string command = replayCommand(seed());
  ::unsetenv(kExpected);
  EXPECT_NE(command.find("UNISONO_TEST_SEED=" + std::to_string(seed()) + " "), std::string::npos)
      << command;
  const std::unique_ptr<FILE, int (*)(FILE*)> child(::popen(command.c_str(), "r"), ::pclose);
  ASSERT_NE(child, nullptr);
  std::string output;
  std::array<char, 4096> part;
  while (std::fgets(part.data(), part.size(), child.get()) != nullptr) output += part.data();
  EXPECT_NE(output.find("[  PASSED  ] 1 test."), std::string::npos) << output;
}

}  // namespace
}  // namespace unisono::test
