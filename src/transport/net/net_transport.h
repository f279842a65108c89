// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/transport.h"

namespace unisono::transport {

// FIFOs over TCP, verbs or a net plug-in (network.h), of protocol Simple only: the kernels of both
// ranks use slots in memory of their own host, and the proxies of their devices move the data
// (stream.h).
std::unique_ptr<Transport> makeNetworkTransport(const TransportContext& context);

}  // namespace unisono::transport
