// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <algorithm>

#include "base/math.h"
#include "memory/mapping_cache.h"

namespace unisono::memory {

namespace {
constexpr size_t kAlignment = 4096;
}

Arena::Arena(runtime::Runtime& runtime, int device, size_t slabBytes, Place place)
    : runtime_(runtime), device_(device), slabBytes_(slabBytes), place_(place) {}

Block Arena::allocate(size_t bytes) {
  bytes = roundUp<size_t>(bytes, kAlignment);
  auto fits = [bytes](const Slab& slab) { return slab.memory->bytes() - slab.used >= bytes; };
  auto slab = std::find_if(slabs_.begin(), slabs_.end(), fits);
  if (slab == slabs_.end()) {
    const size_t slabs = std::max<size_t>((bytes + slabBytes_ - 1) / slabBytes_, 1);
    auto memory = place_ == Place::host ? runtime_.allocateShared(device_, slabs * slabBytes_)
                                        : runtime_.allocate(device_, slabs * slabBytes_);
    const auto handle = runtime_.exportMemory(memory->address(), memory->bytes());
    announceLocal(handle, memory);
    slabs_.push_back({std::move(memory), handle, 0});
    slab = slabs_.end() - 1;
  }
  Block block{static_cast<std::byte*>(slab->memory->address()) + slab->used,
              {slab->handle, slab->used}};
  slab->used += bytes;
  return block;
}

Arena::Mark Arena::mark() const {
  Mark mark;
  for (const Slab& slab : slabs_) mark.used_.push_back(slab.used);
  mark.bytes_ = bytes();
  return mark;
}

void Arena::release(const Mark& mark) {
  slabs_.resize(mark.used_.size());
  runtime_.releaseFreedExports();
  const std::shared_ptr<void> stream = runtime_.createStream(device_);
  for (size_t i = 0; i < slabs_.size(); i++) {
    Slab& slab = slabs_[i];
    // Blocks are zero-filled.
    const std::vector<std::byte> zeros(slab.used - mark.used_[i]);
    slab.used = mark.used_[i];
    runtime_.copyAsync(static_cast<std::byte*>(slab.memory->address()) + slab.used, zeros.data(),
                       zeros.size(), stream.get());
    runtime_.synchronize(stream.get());
  }
}

size_t Arena::bytes() const {
  size_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory->bytes();
  return total;
}

}  // namespace unisono::memory
