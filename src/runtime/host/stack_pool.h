// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace unisono::runtime::host {

// A fiber's stack: [bottom, bottom + bytes), with an unmapped page below it.
struct Stack {
  void* bottom = nullptr;
  size_t bytes = 0;
};

// Stacks are mapped once and used again. Thread-safe.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool();

  // Throws Error(systemError).
  Stack take();
  void giveBack(const Stack& stack) noexcept;

 private:
  std::mutex mutex_;
  std::vector<Stack> free_;
};

}  // namespace unisono::runtime::host
