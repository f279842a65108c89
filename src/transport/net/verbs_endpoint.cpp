// SPDX-License-Identifier: Apache-2.0
#include "transport/net/verbs_endpoint.h"

#include <cstring>
#include <string_view>

#include "base/fnv.h"

namespace unisono::transport {
namespace {

// Tells other versions from this one.
constexpr uint64_t kVersion = 1;

uint64_t checksumOf(const VerbsEndpoint& endpoint) {
  Fnv hash;
  hash.add(kVersion);
  hash.add(std::string_view(reinterpret_cast<const char*>(&endpoint), sizeof(endpoint))
               .substr(sizeof(endpoint.checksum)));
  return hash.value();
}

}  // namespace

void VerbsEndpoint::seal() {
  checksum = checksumOf(*this);
}

bool VerbsEndpoint::isFor(uint64_t ownGroup, uint64_t ownFifo, const StreamMemory& memory) const {
  return checksum == checksumOf(*this) && group == ownGroup && fifo == ownFifo &&
         slots == memory.slotCount && slotBytes == memory.slotBytes && queuePairs >= 1 &&
         queuePairs <= kMaxQueuePairs && port.back() == '\0';
}

std::vector<std::byte> pack(std::span<const VerbsEndpoint> endpoints) {
  const auto bytes = std::as_bytes(endpoints);
  return {bytes.begin(), bytes.end()};
}

std::vector<VerbsEndpoint> unpack(std::span<const std::byte> message, size_t count) {
  if (message.size() != count * sizeof(VerbsEndpoint)) return {};
  std::vector<VerbsEndpoint> endpoints(count);
  if (count > 0) std::memcpy(endpoints.data(), message.data(), message.size());
  return endpoints;
}

}  // namespace unisono::transport
