#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "base/error.h"

// What the tests of the topology layer share: files, and the text of expected errors.
namespace unisono::topology::testing {

inline std::string readFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  EXPECT_TRUE(in.good()) << path;
  return out.str();
}

// A file of this repository's tests/data/topologies.
inline std::string ownTopology(const std::string& name) {
  return readFile(std::filesystem::path(UNISONO_TEST_DATA) / "topologies" / name);
}

// Files that are not ours lie beside the checkout, or where UNISONO_TEST_TOPOLOGIES says; nothing
// if they are not there.
inline std::optional<std::filesystem::path> foreignTopology(const std::string& name) {
  const char* folder = std::getenv("UNISONO_TEST_TOPOLOGIES");
  const std::filesystem::path path =
      (folder ? std::filesystem::path(folder)
              : std::filesystem::path(UNISONO_TEST_DATA) / "../../../shared/data/topologies") /
      name;
  if (!std::filesystem::exists(path)) return std::nullopt;
  return path;
}

// The text of the error that `call` throws; empty if it throws none.
template <typename Call>
std::string errorOf(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace unisono::topology::testing
