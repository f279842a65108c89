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

size_t Arena::bytes() const {
  size_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory->bytes();
  return total;
}

}  // namespace unisono::memory
