// SPDX-License-Identifier: Apache-2.0
#include "transport/block_exchange.h"

#include <cstring>
#include <utility>

#include "base/error.h"

namespace unisono::transport {
namespace {

constexpr uint64_t kMapped = 4, kChecked = 8;

struct BlockMessage {
  memory::SharedBlock block;
  uint64_t kind;
  LinkCheck::Request check;
};

void checkSize(int rank, int peer, size_t bytes, size_t expected) {
  if (bytes == expected) return;
  throw internalError("A connection message has {} bytes instead of {}", bytes, expected)
      .rank(rank)
      .peer(peer)
      .remedy("Use the same version of the library on all ranks");
}

}  // namespace

uint64_t tagOf(uint64_t purpose, bool ofSender, int sender, int receiver) {
  constexpr int kRankBits = 26;
  uint64_t tag = purpose << 1 | static_cast<uint64_t>(ofSender);
  tag = tag << kRankBits | static_cast<uint64_t>(sender);
  return tag << kRankBits | static_cast<uint64_t>(receiver);
}

void BlockExchange::send(int peer, uint64_t tag, uint32_t kind, const memory::Block& block) {
  const BlockMessage message{block.shared, kind, check_.begin(peer)};
  bootstrap_.send(peer, tag, std::as_bytes(std::span(&message, 1)));
  unconfirmed_.push_back(peer);
}

std::byte* BlockExchange::receive(int peer, uint64_t tag, uint32_t kind) {
  const std::vector<std::byte> bytes = bootstrap_.receive(peer, tag);
  const int rank = bootstrap_.rank();
  BlockMessage message;
  checkSize(rank, peer, bytes.size(), sizeof(message));
  std::memcpy(&message, bytes.data(), sizeof(message));
  if (message.kind != kind) {
    throw invalidUsage("Ranks {} and {} differ on how they exchange data", rank, peer)
        .rank(rank)
        .peer(peer)
        .remedy(
            "Set NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, NCCL_P2P_READ_ENABLE, NCCL_SHM_DISABLE, "
            "NCCL_SHM_LOCALITY, NCCL_SHM_USE_CUDA_MEMCPY, NCCL_SHM_MEMCPY_MODE and NCCL_TOPO_FILE "
            "to the same values on all ranks");
  }
  std::byte* address = mappings_.map(message.block);
  bootstrap_.send(peer, tagOf(kMapped, false, 0, 0), {});
  if (message.check.seed != 0) {
    // With a tag of its own: blocks are not mapped in the order in which they were sent.
    const LinkCheck::Answer answer = check_.answer(message.check);
    bootstrap_.send(peer, tagOf(kChecked, false, 0, 0), std::as_bytes(std::span(&answer, 1)));
    check_.throwIfWrong(peer, message.check, answer);
  }
  return address;
}

void BlockExchange::lend(int peer, uint64_t tag, std::span<const memory::Block> blocks) {
  std::vector<memory::SharedBlock> shared;
  for (const memory::Block& block : blocks) shared.push_back(block.shared);
  bootstrap_.send(peer, tag, std::as_bytes(std::span(shared)));
}

std::vector<std::byte*> BlockExchange::borrow(int peer, uint64_t tag, size_t blocks) {
  const std::vector<std::byte> bytes = bootstrap_.receive(peer, tag);
  std::vector<memory::SharedBlock> shared(blocks);
  checkSize(bootstrap_.rank(), peer, bytes.size(), blocks * sizeof(memory::SharedBlock));
  std::memcpy(shared.data(), bytes.data(), bytes.size());
  std::vector<std::byte*> addresses;
  for (const memory::SharedBlock& block : shared) addresses.push_back(mappings_.map(block));
  return addresses;
}

void BlockExchange::verifyLinks() {
  for (const int peer : check_.pendingPeers()) {
    const std::vector<std::byte> bytes = bootstrap_.receive(peer, tagOf(kChecked, false, 0, 0));
    LinkCheck::Answer answer;
    if (bytes.size() != sizeof(answer)) {
      throw internalError("A message about a link has {} bytes instead of {}", bytes.size(),
                          sizeof(answer));
    }
    std::memcpy(&answer, bytes.data(), sizeof(answer));
    check_.finish(peer, answer);
  }
}

void BlockExchange::waitUntilMapped() {
  for (const int peer : std::exchange(unconfirmed_, {})) {
    bootstrap_.receive(peer, tagOf(kMapped, false, 0, 0));
  }
}

}  // namespace unisono::transport
