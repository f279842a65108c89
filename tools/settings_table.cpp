// SPDX-License-Identifier: Apache-2.0
// Prints the table of settings as Markdown, for scripts/settings_table.
#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "base/settings.h"

namespace {

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '|') result += '\\';
    result += c;
  }
  return result;
}

}  // namespace

int main() {
  fmt::print("| variable | value | default | meaning |\n|---|---|---|---|\n");
  for (const unisono::SettingInfo& row : unisono::settingsTable()) {
    fmt::print("| `{}` | {} | {} | {} |\n", row.name, escaped(row.values), escaped(row.defaultText),
               escaped(row.meaning));
  }
  return std::fflush(stdout) == 0 ? 0 : 1;
}
