// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "plugin/net.h"
#include "transport/net/network.h"

namespace unisono::transport {

// How an adapter takes slots in memory of the device. The functions return why it does not; empty:
// it has taken them.
struct SlotRegistration {
  std::function<std::string(const StreamMemory&, const runtime::DmaBuf&)> asDmaBuf;
  std::function<std::string(const StreamMemory&)> byAddress;
};

// Makes the slots of a FIFO known to an adapter if they are in memory of the device: as a DMA-BUF,
// else by address. Where it takes neither, they move to memory of the host and are left to the
// caller; that is logged once. Returns how data pass, for names of connections.
std::string registerOnDevice(const TransportContext& context, const NetworkGroup& group,
                             size_t fifo, const plugin::NetPort& port,
                             const SlotRegistration& registration);

}  // namespace unisono::transport
