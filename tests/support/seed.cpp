// SPDX-License-Identifier: Apache-2.0
#include "support/seed.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>

namespace unisono::test {
namespace {

std::string programPath() {
  std::array<char, 4096> path{};
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  return length > 0 ? std::string(path.data(), static_cast<size_t>(length)) : "<this program>";
}

uint64_t chooseSeed() {
  const char* given = std::getenv("UNISONO_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
}

}  // namespace

std::string replayCommand(uint64_t seed) {
  constexpr std::string_view kSeed = "UNISONO_TEST_SEED=";
  std::string command = std::string(kSeed) + std::to_string(seed) + " ";
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string_view variable = *entry;
    if (!variable.starts_with("NCCL_") && !variable.starts_with("UNISONO_")) continue;
    if (variable.starts_with("UNISONO_TEST_SEED")) continue;
    const size_t name = variable.find('=') + 1;
    command +=
        std::string(variable.substr(0, name)) + "'" + std::string(variable.substr(name)) + "' ";
  }
  command += programPath();
  if (const auto* test = ::testing::UnitTest::GetInstance()->current_test_info()) {
    command +=
        std::string(" --gtest_filter='") + test->test_suite_name() + "." + test->name() + "'";
  }
  return command;
}

uint64_t seed() {
  static const uint64_t kSeed = chooseSeed();
  static const ::testing::TestInfo* announced = nullptr;
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  if (test == nullptr || test != announced) {
    announced = test;
    std::printf("To repeat: %s\n", replayCommand(kSeed).c_str());
    std::fflush(stdout);
  }
  return kSeed;
}

}  // namespace unisono::test
