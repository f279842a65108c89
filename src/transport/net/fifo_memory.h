// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/math.h"
#include "device/work.h"
#include "runtime/runtime.h"
#include "transport/net/stream.h"

namespace unisono::transport {

// The slots and counters of several FIFOs, of which a proxy moves the data. Counters are in pinned
// memory of the host, because proxies and kernels poll them. Slots are there too, or in memory of
// the device where adapters reach that.
class FifoMemory {
 public:
  struct Shape {
    uint32_t slotBytes;
    device::Protocol protocol = device::Protocol::simple;  // or LL
    bool onDevice = false;
  };
  // `device`: where the slots of some FIFOs are. Their bytes are added to `deviceBytes` while they
  // are there, unless it is null.
  FifoMemory(runtime::Runtime& runtime, const std::vector<Shape>& fifos, uint32_t slots,
             int device = -1, std::atomic<uint64_t>* deviceBytes = nullptr)
      : runtime_(runtime), slots_(slots) {
    size_t hostBytes = 0, slotBytes = 0;
    for (const Shape& shape : fifos) {
      Place& place = places_.emplace_back();
      place.shape = shape;
      place.counters = hostBytes;
      hostBytes += kAlignment;
      place.slots = shape.onDevice ? slotBytes : hostBytes;
      (shape.onDevice ? slotBytes : hostBytes) += bytesOfSlots(places_.size() - 1);
    }
    if (hostBytes > 0) host_ = runtime.allocatePinned(hostBytes);
    if (slotBytes == 0) return;
    const auto counted = std::make_shared<CountedMemory>(
        runtime.allocate(device, slotBytes + kAlignment), slotBytes + kAlignment, deviceBytes);
    const std::shared_ptr<runtime::DeviceMemory> memory(counted, counted->memory.get());
    const auto begin = reinterpret_cast<uintptr_t>(memory->address());
    for (Place& place : places_) {
      if (!place.shape.onDevice) continue;
      place.device = memory;
      place.slots += roundUp(begin, uintptr_t{kAlignment}) - begin;
    }
  }

  size_t fifos() const { return places_.size(); }
  uint32_t slotBytes(size_t fifo) const { return places_[fifo].shape.slotBytes; }
  // Of all slots of a FIFO: whole pages.
  size_t bytesOfSlots(size_t fifo) const {
    return roundUp(size_t{slots_} * slotBytes(fifo), kAlignment);
  }
  // Takes the slots of a FIFO out of the device's memory, before anything uses them.
  void moveToHost(size_t fifo) {
    Place& place = places_[fifo];
    place.moved = runtime_.allocatePinned(bytesOfSlots(fifo));
    place.device = nullptr;
    place.slots = 0;
    place.shape.onDevice = false;
  }
  StreamMemory streamOf(size_t fifo) const {
    const Place& place = places_[fifo];
    auto* const base = static_cast<std::byte*>(host_->hostAddress()) + place.counters;
    return {reinterpret_cast<uint64_t*>(base),
            reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes),
            slotsOf(place, &runtime::PinnedMemory::hostAddress),
            slots_,
            place.shape.slotBytes,
            place.shape.onDevice,
            place.shape.protocol};
  }
  device::Fifo fifoOf(size_t fifo) const {
    const Place& place = places_[fifo];
    auto* const base = static_cast<std::byte*>(host_->deviceAddress()) + place.counters;
    device::Fifo result{};
    result.tail = reinterpret_cast<uint64_t*>(base);
    result.head = reinterpret_cast<uint64_t*>(base + device::kCounterLineBytes);
    result.slots = slotsOf(place, &runtime::PinnedMemory::deviceAddress);
    result.reportsSlots = 1;
    return result;
  }

 private:
  static constexpr size_t kAlignment = 4096;

  struct CountedMemory {
    CountedMemory(std::shared_ptr<runtime::DeviceMemory> counted, uint64_t size,
                  std::atomic<uint64_t>* sum)
        : memory(std::move(counted)), bytes(size), total(sum) {
      if (total != nullptr) *total += bytes;
    }
    ~CountedMemory() {
      if (total != nullptr) *total -= bytes;
    }
    CountedMemory(const CountedMemory&) = delete;

    const std::shared_ptr<runtime::DeviceMemory> memory;
    const uint64_t bytes;
    std::atomic<uint64_t>* const total;
  };
  struct Place {
    Shape shape{};
    size_t counters = 0, slots = 0;                 // where they begin in their memory
    std::shared_ptr<runtime::DeviceMemory> device;  // of slots on the device
    std::shared_ptr<runtime::PinnedMemory> moved;   // of slots that were there once
  };
  std::byte* slotsOf(const Place& place, void* (runtime::PinnedMemory::*address)() const) const {
    if (place.shape.onDevice) return static_cast<std::byte*>(place.device->address()) + place.slots;
    const runtime::PinnedMemory& memory = place.moved != nullptr ? *place.moved : *host_;
    return static_cast<std::byte*>((memory.*address)()) + place.slots;
  }

  runtime::Runtime& runtime_;
  const uint32_t slots_;
  std::vector<Place> places_;
  std::shared_ptr<runtime::PinnedMemory> host_;
};

}  // namespace unisono::transport
