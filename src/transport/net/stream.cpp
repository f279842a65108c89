// SPDX-License-Identifier: Apache-2.0
#include "transport/net/stream.h"

#include <algorithm>
#include <atomic>

#include "device/work.h"
#include "transport/net/line_slot.h"

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

uint64_t Stream::reportWord(uint64_t step) const {
  uint64_t* report = memory_.tail + device::kReportsWord + (step & (memory_.slotCount - 1));
  return std::atomic_ref(*report).load(std::memory_order_relaxed);
}

device::SlotReport Stream::reportOf(uint64_t step) const {
  return device::unpackReport(reportWord(step));
}

bool Stream::isBegun(uint64_t step) const {
  return hasLines() ? device::isLineReportOf(reportWord(step), step) : step < tail();
}

bool Stream::isFilled(uint64_t step) {
  if (!isBegun(step)) return false;
  if (!hasLines()) return true;
  if (examined_ != step) {
    examined_ = step;
    openLines_ = filledBytes(step) / kLineBytes;
  }
  openLines_ = countOpenLines(memory_.slot(step), step, openLines_);
  return openLines_ == 0;
}

// With protocol LL only the next slot is looked at, as sending does.
SlotCounts Stream::countsOfSender(uint64_t posted) {
  SlotCounts counts{step_ + memory_.slotCount, posted, posted, step_, step_};
  if (hasLines()) {
    if (isFilled(posted)) counts.ready++;
  } else {
    counts.ready = std::max(posted, tail());
  }
  for (uint64_t step = step_; step < counts.ready; step++) {
    noteBytes(step, reportOf(step).bytes);
  }
  return counts;
}

SlotCounts Stream::countsOfReceiver(uint64_t arrived) const {
  const uint64_t done = std::min(head(), step_);
  return {done + memory_.slotCount, arrived, step_, step_, done};
}

plugin::NetEvents* Stream::eventsOf(uint64_t step) const {
  for (const auto& observer : observers_) {
    if (auto* events = observer->eventsOf(step)) return events;
  }
  return nullptr;
}

uint32_t Stream::filledBytes(uint64_t step) const {
  const uint32_t bytes = reportOf(step).bytes;
  const size_t filled = hasLines() ? device::occupiedBytesOf(memory_.protocol, bytes) : bytes;
  return static_cast<uint32_t>(std::min<size_t>(filled, memory_.slotBytes));
}

void Stream::release(uint64_t step) {
  const uint32_t bytes = reportOf(step).bytes;
  noteBytes(step, bytes);
  bytes_ += bytes;
  // As the receiver's kernel does with its slots, lest flags match that are a period old.
  if (hasLines() && device::mustClearLines(step, memory_.slotCount)) {
    clearLines(memory_.slot(step), memory_.slotBytes);
  }
  setHead(step + 1);
}

bool Stream::isFree(uint64_t step) const {
  return step < std::min(head(), step_) + memory_.slotCount;
}

}  // namespace unisono::transport
