// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "memory/arena.h"
#include "memory/mapping_cache.h"
#include "runtime/runtime.h"

namespace unisono::transport {

struct TransportContext;

// Moves known data over a link between two GPUs when this process first uses it: the rank that maps
// memory of another one reads there what the owner has written, and writes what the owner then
// reads. Links that lose or change data (broken cables, PCIe switches and IOMMUs that redirect
// accesses) are found by this, and not by wrong results. The data take the path of GPU memory to
// GPU memory.
class LinkCheck {
 public:
  LinkCheck(const TransportContext& context, memory::MappingCache& mappings)
      : context_(context), mappings_(mappings) {}

  // From the owner to the rank that maps its memory, and back. Plain data.
  struct Request {
    uint64_t seed = 0;  // of the data; 0: there is nothing to check
    memory::SharedBlock block{};
    std::array<char, 32> busId{};  // of the owner's GPU
  };
  struct Answer {
    uint64_t wrongBytes = 0;  // that were read
    std::array<char, 32> busId{};
  };

  // For the owner, before a block is sent to `peer`.
  Request begin(int peer);
  // For the rank that has mapped the block.
  Answer answer(const Request& request);
  // Throws Error(systemError) that names the link if either side finds wrong data.
  void throwIfWrong(int peer, const Request& request, const Answer& answer) const;
  std::vector<int> pendingPeers() const;
  // For the owner.
  void finish(int peer, const Answer& answer);

 private:
  struct Pending {
    uint64_t seed;
    std::byte* address;
  };
  void copy(void* to, const void* from);
  uint64_t countWrong(const std::byte* deviceAddress, uint64_t seed);
  const std::array<char, 32>& busId();
  uint64_t linkTo(int peer) const;

  const TransportContext& context_;
  memory::MappingCache& mappings_;
  std::shared_ptr<void> stream_;
  std::byte* scratch_ = nullptr;
  std::array<char, 32> busId_{};
  std::map<int, Pending> pending_;
};

}  // namespace unisono::transport
