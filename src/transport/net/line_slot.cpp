// SPDX-License-Identifier: Apache-2.0
#include "transport/net/line_slot.h"

#include <atomic>
#include <cstring>

#include "device/work.h"

namespace unisono::transport {
namespace {

uint64_t load(const std::byte* word) {
  auto* address = reinterpret_cast<uint64_t*>(const_cast<std::byte*>(word));
  return std::atomic_ref(*address).load(std::memory_order_acquire);
}

void store(std::byte* word, uint64_t value) {
  std::atomic_ref(*reinterpret_cast<uint64_t*>(word)).store(value, std::memory_order_release);
}

}  // namespace

size_t countOpenLines(const std::byte* slot, uint64_t step, size_t lines) {
  const uint64_t flag = device::lineFlagOf(step);
  for (; lines > 0; lines--) {
    const std::byte* line = slot + (lines - 1) * kLineBytes;
    if (load(line + sizeof(uint64_t)) >> 32 != flag || load(line) >> 32 != flag) break;
  }
  return lines;
}

void unpackLines(const std::byte* slot, std::span<std::byte> data) {
  for (size_t i = 0; i < data.size(); i += sizeof(uint32_t), slot += sizeof(uint64_t)) {
    const auto half = static_cast<uint32_t>(load(slot));
    std::memcpy(data.data() + i, &half, sizeof(half));
  }
}

void packLines(std::span<const std::byte> data, std::byte* slot, uint64_t step) {
  const uint64_t flag = uint64_t{device::lineFlagOf(step)} << 32;
  for (size_t i = data.size() / sizeof(uint32_t); i-- > 0;) {
    uint32_t half = 0;
    std::memcpy(&half, data.data() + i * sizeof(half), sizeof(half));
    store(slot + i * sizeof(uint64_t), half | flag);
  }
}

void clearLines(std::byte* slot, size_t slotBytes) {
  for (size_t i = 0; i < slotBytes; i += sizeof(uint64_t)) store(slot + i, 0);
}

}  // namespace unisono::transport
