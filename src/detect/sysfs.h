// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace unisono::detect {

// The files of a machine below a root folder: "/" for this one, a folder of a test for another.
// Nothing here throws: what cannot be read is absent, as it is in containers and virtual machines.
class Sysfs {
 public:
  explicit Sysfs(std::filesystem::path root) : root_(std::move(root)) {}

  // A path below the root, given without a leading slash.
  std::filesystem::path at(std::string_view path) const { return root_ / path; }

  // The first 64 KiB of a file; nothing if there is none.
  static std::optional<std::string> read(const std::filesystem::path& file);
  // The text of an attribute without the white space around it; nothing if absent or empty.
  static std::optional<std::string> attribute(const std::filesystem::path& folder,
                                              std::string_view name);
  // The names in a folder, numbers in them by their value (mlx5_2 before mlx5_10).
  static std::vector<std::string> list(const std::filesystem::path& folder);
  static bool exists(const std::filesystem::path& path);
  // Where a path leads when all links are followed; nothing if it leads nowhere.
  static std::optional<std::filesystem::path> resolve(const std::filesystem::path& path);

 private:
  std::filesystem::path root_;
};

// A whole decimal number that fills the text.
std::optional<long long> parseInteger(std::string_view text);
// The number at the start of the text ("32.0 GT/s PCIe").
std::optional<double> leadingNumber(std::string_view text);

}  // namespace unisono::detect
