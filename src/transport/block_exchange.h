// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "memory/mapping_cache.h"
#include "transport/link_check.h"

namespace unisono::transport {

// Names a message about what `sender` and `receiver` share.
uint64_t tagOf(uint64_t purpose, bool ofSender, int sender, int receiver);

// Exchanges memory between the ranks of a communicator: the owner of a block sends it, the other
// one maps it.
class BlockExchange {
 public:
  BlockExchange(bootstrap::Bootstrap& bootstrap, memory::MappingCache& mappings,
                const TransportContext& context)
      : bootstrap_(bootstrap), mappings_(mappings), check_(context, mappings) {}

  // `kind` tells what the block is for; both ends must expect the same.
  void send(int peer, uint64_t tag, uint32_t kind, const memory::Block& block);
  // Waits for a block and maps it. Throws Error(invalidUsage) if its kind is another one, and
  // Error(systemError) if the link is found to be broken.
  std::byte* receive(int peer, uint64_t tag, uint32_t kind);

  // The same with memory that its owner keeps until the other one has ended, from any thread: it
  // need not know when it has been mapped.
  void lend(int peer, uint64_t tag, std::span<const memory::Block> blocks);
  std::vector<std::byte*> borrow(int peer, uint64_t tag, size_t blocks);

  // Waits for the other ends of links that the blocks so far are the first to use. Throws
  // Error(systemError) if a link is found to be broken.
  void verifyLinks();

  // Waits until every peer has mapped the blocks that were sent to it. Memory must not be freed
  // before that, but may be freed afterwards although peers still use it. Throws what the bootstrap
  // throws.
  void waitUntilMapped();

 private:
  bootstrap::Bootstrap& bootstrap_;
  memory::MappingCache& mappings_;
  LinkCheck check_;
  std::vector<int> unconfirmed_;  // peers, once for each block sent to them
};

}  // namespace unisono::transport
