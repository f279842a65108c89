// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/transport.h"

// The transports whose FIFOs are in memory that both ranks map, so that kernels alone move the
// data.
namespace unisono::transport {

// Whether and how a peer may use the buffers of this rank, and the reverse: ranks of one process
// offer addresses, those of different processes windows.
struct Offers {
  bool any, byAddress;
};
Offers offersBetween(const TransportContext& context, int peer);

// Counters are in the memory of the GPU whose kernels poll them. Slots are in the receiver's
// memory, or in the sender's where receivers read. Where two ranks do not reach each other,
// everything is in the memory of the rank between them.
std::unique_ptr<Transport> makePeerTransport(const TransportContext& context);

// The same with memory of the host that the GPU belongs to.
std::unique_ptr<Transport> makeHostMemoryTransport(const TransportContext& context);

}  // namespace unisono::transport
