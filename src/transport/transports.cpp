// SPDX-License-Identifier: Apache-2.0
#include "transport/transports.h"

#include <iterator>

#include "transport/mapped/mapped_transport.h"
#include "transport/net/net_transport.h"

namespace unisono::transport {
namespace {

struct TransportEntry {
  TransportKind kind;
  std::string_view name;
  bool (*canConnect)(const PairFacts& pair);
  std::unique_ptr<Transport> (*make)(const TransportContext& context);
};

// In order of preference.
constexpr TransportEntry kTransports[] = {
    {TransportKind::peer, "peer-to-peer access",
     [](const PairFacts& pair) { return pair.peerAccess; }, makePeerTransport},
    {TransportKind::hostMemory, "shared host memory",
     [](const PairFacts& pair) { return pair.sharedHostMemory; }, makeHostMemoryTransport},
    {TransportKind::network, "the network", [](const PairFacts& pair) { return pair.network; },
     makeNetworkTransport},
};
static_assert(std::size(kTransports) == kTransportKinds);

const TransportEntry& entryOf(TransportKind kind) {
  return kTransports[static_cast<size_t>(kind)];
}

}  // namespace

std::optional<TransportKind> chooseTransport(const PairFacts& pair) {
  for (const TransportEntry& entry : kTransports) {
    if (entry.canConnect(pair)) return entry.kind;
  }
  return std::nullopt;
}

std::string_view nameOf(TransportKind kind) {
  return entryOf(kind).name;
}

std::unique_ptr<Transport> makeTransport(TransportKind kind, const TransportContext& context) {
  return entryOf(kind).make(context);
}

}  // namespace unisono::transport
