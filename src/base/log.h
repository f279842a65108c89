// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace unisono {

// The levels of NCCL_DEBUG. Nothing is written at `none`.
enum class LogLevel : int { none = 0, version = 1, warn = 2, info = 3, trace = 4 };

// The level that NCCL_DEBUG asks for, read once per process (ncclResetDebugInit reads it again).
LogLevel logLevel();
void resetLog();

// Writes one line, "host:pid unisono LEVEL text", to stderr or the file of NCCL_DEBUG_FILE
// (%h and %p stand for host and process). Log once, where a thing is decided.
void writeLog(LogLevel level, std::string_view text);

template <typename... Args>
void logWarn(fmt::format_string<Args...> format, Args&&... args) {
  if (logLevel() >= LogLevel::warn) {
    writeLog(LogLevel::warn, fmt::format(format, std::forward<Args>(args)...));
  }
}
// Logs a warning once per process, however often it occurs.
void warnOnce(const std::string& text);
template <typename... Args>
void logInfo(fmt::format_string<Args...> format, Args&&... args) {
  if (logLevel() >= LogLevel::info) {
    writeLog(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
  }
}

}  // namespace unisono
