// SPDX-License-Identifier: Apache-2.0
#include "transport/net/stream.h"

#include <algorithm>
#include <atomic>

#include "device/work.h"

namespace unisono::transport {

uint64_t Stream::tail() const {
  return std::atomic_ref(*memory_.tail).load(std::memory_order_acquire);
}

uint64_t Stream::head() const {
  return std::atomic_ref(*memory_.head).load(std::memory_order_acquire);
}

void Stream::setTail(uint64_t steps) {
  std::atomic_ref(*memory_.tail).store(steps, std::memory_order_release);
}

void Stream::setHead(uint64_t steps) {
  std::atomic_ref(*memory_.head).store(steps, std::memory_order_release);
}

uint32_t Stream::filledBytes(uint64_t step) const {
  uint64_t* size = memory_.tail + device::kSizesWord + (step & (memory_.slotCount - 1));
  const uint64_t bytes = std::atomic_ref(*size).load(std::memory_order_relaxed);
  return static_cast<uint32_t>(std::min<uint64_t>(bytes, memory_.slotBytes));
}

}  // namespace unisono::transport
