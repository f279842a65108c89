// SPDX-License-Identifier: Apache-2.0
#include "detect/sysfs.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <fstream>

namespace unisono::detect {

namespace {

constexpr size_t kReadBytes = 64u << 10;

bool isDigit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

bool naturalLess(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (isDigit(a[i]) && isDigit(b[j])) {
      const auto digitsEnd = [](const std::string& text, size_t at) {
        while (at < text.size() && isDigit(text[at])) ++at;
        return at;
      };
      const auto skipZeros = [](const std::string& text, size_t at, size_t end) {
        while (at + 1 < end && text[at] == '0') ++at;
        return at;
      };
      const size_t endA = digitsEnd(a, i), endB = digitsEnd(b, j);
      i = skipZeros(a, i, endA);
      j = skipZeros(b, j, endB);
      if (endA - i != endB - j) return endA - i < endB - j;
      const int order = a.compare(i, endA - i, b, j, endB - j);
      if (order != 0) return order < 0;
      i = endA;
      j = endB;
      continue;
    }
    if (a[i] != b[j]) return a[i] < b[j];
    ++i;
    ++j;
  }
  if (i < a.size() || j < b.size()) return j < b.size();
  return a < b;
}

}  // namespace

std::optional<std::string> Sysfs::read(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error)) return std::nullopt;
  std::ifstream in(file, std::ios::binary);
  std::string text(kReadBytes, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  // An attribute that the kernel refuses to read opens, but gives an error here.
  if (!in && !in.eof()) return std::nullopt;
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

std::optional<std::string> Sysfs::attribute(const std::filesystem::path& folder,
                                            std::string_view name) {
  std::optional<std::string> text = read(folder / name);
  if (!text) return std::nullopt;
  constexpr std::string_view kSpace(" \t\r\n\0", 5);
  const size_t begin = text->find_first_not_of(kSpace);
  if (begin == std::string::npos) return std::nullopt;
  return text->substr(begin, text->find_last_not_of(kSpace) - begin + 1);
}

std::vector<std::string> Sysfs::list(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end(), naturalLess);
  return names;
}

bool Sysfs::exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::optional<std::filesystem::path> Sysfs::resolve(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path target = std::filesystem::canonical(path, error);
  if (error) return std::nullopt;
  return target;
}

std::optional<long long> parseInteger(std::string_view text) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<double> leadingNumber(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace unisono::detect
