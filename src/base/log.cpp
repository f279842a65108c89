// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>

#include "base/settings.h"
#include "base/system.h"

namespace unisono {
namespace {

LogLevel levelFromEnvironment() {
  const std::string level = debugSettings().debugLevel;
  if (level == "VERSION") return LogLevel::version;
  if (level == "WARN") return LogLevel::warn;
  if (level == "INFO") return LogLevel::info;
  if (level == "TRACE" || level == "ABORT") return LogLevel::trace;
  return LogLevel::none;
}

std::atomic<int> cachedLevel{-1};
std::mutex writeMutex;
std::FILE* output = nullptr;

}  // namespace

LogLevel logLevel() {
  int level = cachedLevel.load(std::memory_order_relaxed);
  if (level < 0) {
    level = static_cast<int>(levelFromEnvironment());
    cachedLevel.store(level, std::memory_order_relaxed);
  }
  return static_cast<LogLevel>(level);
}

void resetLog() {
  std::lock_guard lock(writeMutex);
  cachedLevel.store(-1, std::memory_order_relaxed);
  if (output != nullptr && output != stderr) std::fclose(output);
  output = nullptr;
}

void writeLog(LogLevel level, std::string_view text) {
  static constexpr const char* kNames[] = {"", "VERSION", "WARN", "INFO", "TRACE"};
  std::string line = fmt::format("{}:{} unisono {} {}\n", hostName(), ::getpid(),
                                 kNames[static_cast<int>(level)], text);
  std::lock_guard lock(writeMutex);
  if (output == nullptr) {
    const std::string file = debugSettings().debugFile;
    // "e": closed on exec, so that child processes do not inherit the file.
    output = file.empty() ? nullptr : std::fopen(expandFileName(file).c_str(), "ae");
    if (output == nullptr) output = stderr;
  }
  std::fwrite(line.data(), 1, line.size(), output);
  std::fflush(output);
}

// Never destroyed: threads may log until the process has ended.
void warnOnce(const std::string& text) {
  static auto* mutex = new std::mutex;
  static auto* logged = new std::set<std::string>;
  std::lock_guard lock(*mutex);
  if (logged->insert(text).second) logWarn("{}", text);
}

}  // namespace unisono
