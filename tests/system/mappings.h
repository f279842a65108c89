// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

// The memory of devices that this process has mapped. Buffers of calls are mapped while calls go on
// and without them, so a test waits for it.
namespace unisono::system_test {

// How often this process has a segment of device memory of `bytes` mapped.
inline int mappingsOf(size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    std::sscanf(line.c_str(), "%lx-%lx", &begin, &end);
    count += end - begin == bytes && line.find("memfd:unisono-device") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Waits for so many mappings, `limit` at most; returns whether they came.
inline bool waitForMappings(size_t bytes, int count,
                            std::chrono::steady_clock::duration limit = std::chrono::seconds(20)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (mappingsOf(bytes) != count) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace unisono::system_test
