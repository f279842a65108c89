// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/math.h"
#include "device/work.h"
#include "runtime/runtime.h"
#include "transport/net/stream.h"

namespace unisono::transport {

// Pinned memory of the host with the slots and counters of several FIFOs, of which a proxy moves
// the data.
class FifoMemory {
 public:
  FifoMemory(runtime::Runtime& runtime, size_t fifos, uint32_t slots, uint32_t slotBytes)
      : fifos_(fifos), slots_(slots), slotBytes_(slotBytes) {
    memory_ = runtime.allocatePinned(fifos * stride());
  }

  size_t fifos() const { return fifos_; }
  StreamMemory streamOf(size_t fifo) const {
    auto* base = static_cast<std::byte*>(memory_->hostAddress()) + fifo * stride();
    return {reinterpret_cast<uint64_t*>(base),
            reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes), base + kSlotAlignment,
            slots_, slotBytes_};
  }
  device::Fifo fifoOf(size_t fifo) const {
    auto* base = static_cast<std::byte*>(memory_->deviceAddress()) + fifo * stride();
    device::Fifo result{};
    result.tail = reinterpret_cast<uint64_t*>(base);
    result.head = reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes);
    result.slots = base + kSlotAlignment;
    result.reportsSlots = 1;
    return result;
  }

 private:
  static constexpr size_t kSlotAlignment = 4096;
  size_t stride() const {
    return kSlotAlignment + roundUp(size_t{slots_} * slotBytes_, kSlotAlignment);
  }

  const size_t fifos_;
  const uint32_t slots_, slotBytes_;
  std::shared_ptr<runtime::PinnedMemory> memory_;
};

}  // namespace unisono::transport
