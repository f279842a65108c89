// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/memory.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/math.h"

namespace unisono::runtime::host {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kPoolBytes = 32 << 20;
constexpr size_t kLargestPooled = 1 << 20;

// Somebody else's range, or another owner's in this process.
class MappedRange final : public MappedMemory {
 public:
  MappedRange(std::vector<std::shared_ptr<MemorySegment>> segments, void* address)
      : MappedMemory(address), segments_(std::move(segments)) {}

 private:
  std::vector<std::shared_ptr<MemorySegment>> segments_;
};

class AdjacentAllocations final : public DeviceMemory {
 public:
  AdjacentAllocations(std::vector<std::shared_ptr<DeviceMemory>> allocations, size_t bytes,
                      int device)
      : DeviceMemory(allocations.front()->address(), bytes, device),
        allocations_(std::move(allocations)) {}

 private:
  std::vector<std::shared_ptr<DeviceMemory>> allocations_;
};

DescriptorTicket ticketOf(const MemoryHandle& handle) {
  DescriptorTicket ticket;
  std::memcpy(&ticket, handle.payload.data(), sizeof(ticket));
  return ticket;
}

static_assert(sizeof(DescriptorTicket) <= sizeof(MemoryHandle::payload));

void insertFree(std::map<size_t, size_t>& free, size_t offset, size_t bytes) {
  auto next = free.lower_bound(offset);
  if (next != free.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free.erase(next);
  }
  if (next != free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free.emplace_hint(next, offset, bytes);
}

}  // namespace

class MemoryManager::Allocation final : public DeviceMemory {
 public:
  Allocation(std::shared_ptr<MemoryManager> manager, std::shared_ptr<MemorySegment> segment,
             void* address, size_t bytes, size_t reserved, int device)
      : DeviceMemory(address, bytes, device),
        manager_(std::move(manager)),
        segment_(std::move(segment)),
        reserved_(reserved) {}
  ~Allocation() override { manager_->free(*this); }

  const std::shared_ptr<MemorySegment>& segment() const { return segment_; }
  size_t reserved() const { return reserved_; }

 private:
  std::shared_ptr<MemoryManager> manager_;
  std::shared_ptr<MemorySegment> segment_;
  size_t reserved_;
};

std::shared_ptr<DeviceMemory> MemoryManager::allocate(int device, size_t bytes) {
  if (bytes > kLargestPooled) {
    return add(std::make_shared<MemorySegment>(bytes), bytes, device,
               MemoryHandle::Kind::descriptor);
  }
  std::shared_ptr<MemorySegment> segment;
  const size_t reserved = roundUp<size_t>(std::max<size_t>(bytes, 1), kAlignment);
  std::unique_lock lock(mutex_);
  std::byte* address = takeFromPool(device, reserved, segment);
  ranges_.emplace(reinterpret_cast<uintptr_t>(address),
                  Range{std::max<size_t>(bytes, 1), device, segment, ++lastSerial_});
  lock.unlock();
  return std::make_shared<Allocation>(shared_from_this(), std::move(segment), address, bytes,
                                      reserved, device);
}

std::shared_ptr<DeviceMemory> MemoryManager::allocateSegmented(int device, size_t bytes,
                                                               size_t segmentBytes) {
  segmentBytes = roundUpToPages(segmentBytes);
  if (bytes <= segmentBytes) return allocate(device, bytes);
  const auto reservation = std::make_shared<AddressReservation>(roundUpToPages(bytes));
  std::vector<std::shared_ptr<DeviceMemory>> allocations;
  for (size_t offset = 0; offset < bytes; offset += segmentBytes) {
    const size_t part = std::min(segmentBytes, bytes - offset);
    auto segment =
        std::make_shared<MemorySegment>(part, "unisono-device", SegmentPlace{reservation, offset});
    allocations.push_back(add(std::move(segment), part, device, MemoryHandle::Kind::descriptor));
  }
  return std::make_shared<AdjacentAllocations>(std::move(allocations), bytes, device);
}

std::shared_ptr<DeviceMemory> MemoryManager::allocateShared(int device, size_t bytes) {
  return add(std::make_shared<MemorySegment>(std::max<size_t>(bytes, 1), "unisono-host-memory"),
             bytes, device, MemoryHandle::Kind::hostMemory);
}

// An allocation that has `segment` to itself.
std::shared_ptr<DeviceMemory> MemoryManager::add(std::shared_ptr<MemorySegment> segment,
                                                 size_t bytes, int device,
                                                 MemoryHandle::Kind kind) {
  std::byte* address = segment->address();
  {
    std::lock_guard lock(mutex_);
    ranges_.emplace(reinterpret_cast<uintptr_t>(address),
                    Range{std::max<size_t>(bytes, 1), device, segment, ++lastSerial_, kind});
  }
  return std::make_shared<Allocation>(shared_from_this(), std::move(segment), address, bytes, bytes,
                                      device);
}

std::byte* MemoryManager::takeFromPool(int device, size_t bytes,
                                       std::shared_ptr<MemorySegment>& segment) {
  auto& pools = pools_[device];
  auto take = [&](Pool& pool) -> std::byte* {
    for (auto& [offset, available] : pool.free) {
      if (available < bytes) continue;
      size_t start = offset;
      size_t rest = available - bytes;
      pool.free.erase(start);
      if (rest > 0) pool.free.emplace(start + bytes, rest);
      segment = pool.segment;
      return segment->address() + start;
    }
    return nullptr;
  };
  for (auto& pool : pools) {
    if (std::byte* address = take(*pool)) return address;
  }
  auto& pool = pools.emplace_back(std::make_unique<Pool>());
  try {
    pool->segment = std::make_shared<MemorySegment>(kPoolBytes);
  } catch (...) {
    pools.pop_back();
    throw;
  }
  pool->free.emplace(0, kPoolBytes);
  return take(*pool);
}

void MemoryManager::free(const Allocation& allocation) {
  if (forks_ != forkCount()) return;
  auto* address = static_cast<std::byte*>(allocation.address());
  const MemorySegment* segment = allocation.segment().get();
  std::lock_guard lock(mutex_);
  ranges_.erase(reinterpret_cast<uintptr_t>(address));
  auto& pools = pools_[allocation.device()];
  auto pool = std::find_if(pools.begin(), pools.end(),
                           [&](const auto& one) { return one->segment.get() == segment; });
  if (pool == pools.end()) return;
  auto offset = static_cast<size_t>(address - segment->address());
  allocation.segment()->clear(offset, allocation.reserved());
  insertFree((*pool)->free, offset, allocation.reserved());
  bool isUnused = (*pool)->free.size() == 1 && (*pool)->free.begin()->second == kPoolBytes;
  if (isUnused && pools.size() > 1) pools.erase(pool);
}

std::map<uintptr_t, MemoryManager::Range>::iterator MemoryManager::find(const void* address) {
  auto where = reinterpret_cast<uintptr_t>(address);
  auto range = ranges_.upper_bound(where);
  if (range == ranges_.begin()) return ranges_.end();
  --range;
  return where - range->first < range->second.bytes ? range : ranges_.end();
}

PointerInfo MemoryManager::inspect(const void* address) {
  std::lock_guard lock(mutex_);
  auto range = find(address);
  if (range == ranges_.end()) return {};
  if (range->second.kind == MemoryHandle::Kind::hostMemory) return {PointerInfo::Kind::pinned, -1};
  return {PointerInfo::Kind::device, range->second.device, true};
}

unisono::runtime::Allocation MemoryManager::findAllocation(const void* address) {
  std::lock_guard lock(mutex_);
  auto range = find(address);
  if (range == ranges_.end()) return {};
  return {range->first, range->second.bytes, range->second.serial};
}

MemoryManager::Range MemoryManager::rangeOf(const void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto range = find(address);
  if (range == ranges_.end()) {
    throw invalidArgument("{} is not memory of a simulated device", address)
        .remedy("Allocate it with unisonoHostMalloc or ncclMemAlloc");
  }
  size_t offset = reinterpret_cast<uintptr_t>(address) - range->first;
  if (bytes > range->second.bytes - offset) {
    throw invalidArgument("{} bytes at {} go beyond their allocation of {} bytes", bytes, address,
                          range->second.bytes);
  }
  return range->second;
}

// Where CUDA has a DMA-BUF, the simulated device has the file of its memory.
DmaBuf MemoryManager::exportDmaBuf(const void* address, size_t bytes) {
  const Range range = rangeOf(address, bytes);
  const auto offset =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(range.segment->address());
  return {range.segment->duplicateDescriptor(), offset};
}

void MemoryManager::retain(const void* address) {
  std::lock_guard lock(mutex_);
  auto range = find(address);
  if (range != ranges_.end()) range->second.retained = true;
}

MemoryHandle MemoryManager::exportRetained(const void* address, size_t bytes) {
  const Range range = rangeOf(address, bytes);
  if (!range.retained) {
    throw internalError("The memory at {} is exported without having been retained", address);
  }
  const std::shared_ptr<MemorySegment>& segment = range.segment;
  MemoryHandle handle{};
  handle.kind = range.kind;
  handle.device = range.device;
  handle.process = processToken();
  handle.address = reinterpret_cast<uintptr_t>(address);
  handle.bytes = bytes;
  handle.base = reinterpret_cast<uintptr_t>(segment->address());
  handle.baseBytes = segment->bytes();
  std::memcpy(handle.payload.data(), &segment->ticket(), sizeof(DescriptorTicket));
  return handle;
}

std::shared_ptr<MappedMemory> MemoryManager::importRun(std::span<const MemoryHandle> handles) {
  const MemoryHandle& handle = handles.front();
  if (handle.kind != MemoryHandle::Kind::descriptor &&
      handle.kind != MemoryHandle::Kind::hostMemory) {
    throw invalidArgument("A memory handle of kind {} cannot be mapped by the host backend",
                          static_cast<uint32_t>(handle.kind))
        .remedy("Use the same backend (UNISONO_BACKEND) on all ranks");
  }
  std::vector<std::shared_ptr<MemorySegment>> segments;
  if (handle.process == processToken()) {
    std::lock_guard lock(mutex_);
    for (const MemoryHandle& one : handles) {
      const auto* address = reinterpret_cast<const void*>(one.address);
      auto range = find(address);
      if (range == ranges_.end()) {
        throw invalidArgument("The memory at {} that a handle names was freed", address)
            .remedy("Keep memory while others may map it");
      }
      segments.push_back(range->second.segment);
    }
    return std::make_shared<MappedRange>(std::move(segments),
                                         reinterpret_cast<void*>(handle.address));
  }
  if (handles.size() == 1) {
    segments.push_back(mapped(handle));
  } else {
    const MemoryHandle& last = handles.back();
    const auto reservation =
        std::make_shared<AddressReservation>(last.base + last.baseBytes - handle.base);
    for (const MemoryHandle& one : handles) {
      segments.push_back(std::make_shared<MemorySegment>(
          fetchDescriptor(ticketOf(one)), static_cast<size_t>(one.baseBytes),
          SegmentPlace{reservation, static_cast<size_t>(one.base - handle.base)}));
    }
  }
  std::byte* address = segments.front()->address() + (handle.address - handle.base);
  return std::make_shared<MappedRange>(std::move(segments), address);
}

std::shared_ptr<MemorySegment> MemoryManager::mapped(const MemoryHandle& handle) {
  const DescriptorTicket ticket = ticketOf(handle);
  auto cached = [&]() -> std::shared_ptr<MemorySegment> {
    auto entry = imported_.find(ticket.token);
    if (entry == imported_.end()) return nullptr;
    std::shared_ptr<MemorySegment> segment = entry->second.lock();
    if (segment != nullptr && segment->bytes() != handle.baseBytes) {
      throw invalidArgument("A memory handle says {} bytes of an allocation of {}",
                            handle.baseBytes, segment->bytes());
    }
    return segment;
  };
  {
    std::lock_guard lock(mutex_);
    if (auto segment = cached()) return segment;
  }
  UniqueDescriptor descriptor = fetchDescriptor(ticket);
  std::lock_guard lock(mutex_);
  if (auto segment = cached()) return segment;
  auto segment = std::make_shared<MemorySegment>(descriptor, static_cast<size_t>(handle.baseBytes));
  std::erase_if(imported_, [](const auto& entry) { return entry.second.expired(); });
  imported_[ticket.token] = segment;
  return segment;
}

}  // namespace unisono::runtime::host
