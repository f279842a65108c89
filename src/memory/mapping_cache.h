// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "memory/arena.h"

namespace unisono::memory {

// The memory of other ranks that one communicator has mapped, each range once. A mapping keeps
// memory of the same process alive, so that ranks of one process may end in any order.
class MappingCache {
 public:
  MappingCache(runtime::Runtime& runtime, int device) : runtime_(runtime), device_(device) {}

  // Returns the block's address for kernels on this device. Valid while the cache lives.
  std::byte* map(const SharedBlock& block);

 private:
  struct Mapping {
    std::shared_ptr<runtime::MappedMemory> mapped;
    std::shared_ptr<runtime::DeviceMemory> owner;  // of the same process; else null
  };

  runtime::Runtime& runtime_;
  int device_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, Mapping> mappings_;  // by (process, address)
};

// Makes a range known to the caches of this process for as long as it has an owner.
void announceLocal(const runtime::MemoryHandle& handle,
                   const std::shared_ptr<runtime::DeviceMemory>& memory);

}  // namespace unisono::memory
