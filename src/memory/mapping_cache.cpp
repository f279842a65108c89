// SPDX-License-Identifier: Apache-2.0
#include "memory/mapping_cache.h"

#include "base/error.h"

namespace unisono::memory {
namespace {

std::mutex localMutex;
std::map<uint64_t, std::weak_ptr<runtime::DeviceMemory>>& localMemory() {
  static auto* memory = new std::map<uint64_t, std::weak_ptr<runtime::DeviceMemory>>;
  return *memory;
}

}  // namespace

void announceLocal(const runtime::MemoryHandle& handle,
                   const std::shared_ptr<runtime::DeviceMemory>& memory) {
  std::lock_guard lock(localMutex);
  std::erase_if(localMemory(), [](const auto& entry) { return entry.second.expired(); });
  localMemory()[handle.address] = memory;
}

std::byte* MappingCache::map(const SharedBlock& block) {
  std::lock_guard lock(mutex_);
  const std::pair key(block.handle.process, block.handle.address);
  auto entry = mappings_.find(key);
  if (entry == mappings_.end()) {
    Mapping mapping;
    if (block.handle.process == runtime::processToken()) {
      std::lock_guard localLock(localMutex);
      auto local = localMemory().find(block.handle.address);
      if (local != localMemory().end()) mapping.owner = local->second.lock();
      if (mapping.owner == nullptr) {
        throw Error(ErrorCode::remoteError,
                    "A rank of this process was destroyed while others connected to it")
            .remedy("Destroy a communicator only after the calls of all its ranks have returned");
      }
    }
    mapping.mapped = runtime_.importMemory(block.handle, device_);
    entry = mappings_.emplace(key, std::move(mapping)).first;
  }
  return static_cast<std::byte*>(entry->second.mapped->address()) + block.offset;
}

}  // namespace unisono::memory
