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

device::SlotReport Stream::reportOf(uint64_t step) const {
  uint64_t* report = memory_.tail + device::kReportsWord + (step & (memory_.slotCount - 1));
  return device::unpackReport(std::atomic_ref(*report).load(std::memory_order_relaxed));
}

uint32_t Stream::filledBytes(uint64_t step) const {
  return std::min(reportOf(step).bytes, memory_.slotBytes);
}

}  // namespace unisono::transport
