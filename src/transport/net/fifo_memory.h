// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/math.h"
#include "device/work.h"
#include "memory/arena.h"
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
    device::Protocol protocol = device::Protocol::simple;
    bool onDevice = false;
  };
  // Whose kernels fill or empty the slots.
  enum class User { ownRank, otherRank };
  static constexpr size_t kPageBytes = 4096;

  // `device`: where the slots of some FIFOs are. Their bytes are added to `deviceBytes` while they
  // are there, unless it is null.
  FifoMemory(runtime::Runtime& runtime, const std::vector<Shape>& fifos, uint32_t slots,
             int device = -1, const std::shared_ptr<std::atomic<uint64_t>>& deviceBytes = nullptr,
             User user = User::ownRank)
      : runtime_(runtime), slots_(slots) {
    if (user == User::otherRank) {
      arenas_.emplace(Arenas{{runtime, device, kPageBytes, memory::Arena::Place::host},
                             {runtime, device, kPageBytes},
                             nullptr});
    }
    size_t hostBytes = (fifos.size() + 1) * kPageBytes, slotBytes = 0;
    for (const Shape& shape : fifos) {
      Place& place = places_.emplace_back();
      place.shape = shape;
      place.counters = places_.size() * kPageBytes;
      place.slots.offset = shape.onDevice ? slotBytes : hostBytes;
      (shape.onDevice ? slotBytes : hostBytes) += bytesOfSlots(places_.size() - 1);
    }
    host_ = allocateHost(hostBytes);
    const Range onDevice =
        slotBytes == 0 ? Range{} : allocateDevice(device, slotBytes, deviceBytes);
    for (Place& place : places_) {
      const size_t offset = place.slots.offset;
      place.slots = place.shape.onDevice ? onDevice : host_;
      place.slots.offset += offset;
    }
    if (arenas_) {
      arenas_->counted = std::make_unique<const Counted>(deviceBytes, arenas_->device.bytes());
    }
  }

  size_t fifos() const { return places_.size(); }
  uint32_t slotBytes(size_t fifo) const { return places_[fifo].shape.slotBytes; }
  // Of all slots of a FIFO: whole pages.
  size_t bytesOfSlots(size_t fifo) const {
    return roundUp(size_t{slots_} * slotBytes(fifo), kPageBytes);
  }
  // Takes the slots of a FIFO out of the device's memory, before anything uses them.
  void moveToHost(size_t fifo) {
    Place& place = places_[fifo];
    place.slots = allocateHost(bytesOfSlots(fifo));
    place.shape.onDevice = false;
  }
  StreamMemory streamOf(size_t fifo) const {
    const Place& place = places_[fifo];
    std::byte* const counters = host_.forHost() + place.counters;
    return {tailOf(counters),
            headOf(counters),
            place.shape.onDevice ? place.slots.forKernels() : place.slots.forHost(),
            slots_,
            place.shape.slotBytes,
            place.shape.onDevice,
            place.shape.protocol};
  }
  device::Fifo fifoOf(size_t fifo) const {
    const Place& place = places_[fifo];
    return makeFifo(host_.forKernels() + place.counters, place.slots.forKernels());
  }

  // Of memory for another rank. The first block begins with a page for the two ranks and one with
  // the counters of each FIFO. The other blocks are the slots of each FIFO.
  std::byte* page() const { return host_.forHost(); }
  std::vector<memory::Block> blocks() const {
    std::vector<memory::Block> blocks{host_.block()};
    for (const Place& place : places_) blocks.push_back(place.slots.block());
    return blocks;
  }
  // As the other rank addresses the blocks.
  static device::Fifo makeFifo(const std::vector<std::byte*>& blocks, size_t fifo) {
    return makeFifo(blocks.front() + (fifo + 1) * kPageBytes, blocks[fifo + 1]);
  }

 private:
  struct Range {
    std::byte *host = nullptr, *kernels = nullptr;  // how they address the allocation
    size_t offset = 0;                              // in it
    memory::SharedBlock shared{};                   // the allocation; where another rank uses it
    std::shared_ptr<void> owner;                    // else

    std::byte* forHost() const { return host + offset; }
    std::byte* forKernels() const { return kernels + offset; }
    memory::Block block() const { return {forKernels(), {shared.handle, shared.offset + offset}}; }
  };
  // Adds to a sum as long as it lives.
  class Counted {
   public:
    Counted(std::shared_ptr<std::atomic<uint64_t>> total, uint64_t bytes)
        : total_(std::move(total)), bytes_(bytes) {
      if (total_ != nullptr) *total_ += bytes_;
    }
    ~Counted() {
      if (total_ != nullptr) *total_ -= bytes_;
    }
    Counted(const Counted&) = delete;

   private:
    const std::shared_ptr<std::atomic<uint64_t>> total_;
    const uint64_t bytes_;
  };
  struct CountedMemory {
    std::shared_ptr<runtime::DeviceMemory> memory;
    Counted counted;
  };
  struct Place {
    Shape shape{};
    size_t counters = 0;  // where they begin in host_
    Range slots;
  };
  struct Arenas {
    memory::Arena host, device;
    std::unique_ptr<const Counted> counted;  // what is in `device`
  };

  static uint64_t* tailOf(std::byte* counters) { return reinterpret_cast<uint64_t*>(counters); }
  static uint64_t* headOf(std::byte* counters) {
    return reinterpret_cast<uint64_t*>(counters + device::kCounterLineBytes);
  }
  static device::Fifo makeFifo(std::byte* counters, std::byte* slots) {
    device::Fifo result{};
    result.tail = tailOf(counters);
    result.head = headOf(counters);
    result.slots = slots;
    result.hasProxy = 1;
    return result;
  }
  static Range rangeOf(const memory::Block& block) {
    return {block.address, block.address, 0, block.shared, nullptr};
  }
  Range allocateHost(size_t bytes) {
    if (arenas_) return rangeOf(arenas_->host.allocate(bytes));
    auto memory = runtime_.allocatePinned(bytes);
    return {static_cast<std::byte*>(memory->hostAddress()),
            static_cast<std::byte*>(memory->deviceAddress()),
            0,
            {},
            memory};
  }
  // Adapters take whole pages.
  Range allocateDevice(int device, size_t bytes,
                       const std::shared_ptr<std::atomic<uint64_t>>& total) {
    Range range;
    if (arenas_) {
      range = rangeOf(arenas_->device.allocate(bytes + kPageBytes));
    } else {
      std::shared_ptr<CountedMemory> memory(new CountedMemory{
          runtime_.allocate(device, bytes + kPageBytes), {total, bytes + kPageBytes}});
      range.kernels = static_cast<std::byte*>(memory->memory->address());
      range.owner = std::move(memory);
    }
    const auto begin = reinterpret_cast<uintptr_t>(range.kernels);
    range.offset = roundUp(begin, uintptr_t{kPageBytes}) - begin;
    return range;
  }

  runtime::Runtime& runtime_;
  const uint32_t slots_;
  std::optional<Arenas> arenas_;  // of memory for another rank
  std::vector<Place> places_;
  Range host_;
};

}  // namespace unisono::transport
