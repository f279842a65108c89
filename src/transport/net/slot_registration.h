// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "plugin/net.h"
#include "transport/net/fifo_memory.h"
#include "transport/transport.h"

namespace unisono::transport {

// How an adapter takes slots in memory of the device. The functions return why it does not; empty:
// it has taken them.
struct SlotRegistration {
  std::function<std::string(const StreamMemory&, const runtime::DmaBuf&)> asDmaBuf;
  std::function<std::string(const StreamMemory&)> byAddress;
};

// With the functions of the plug-in `name`, "net plug-in Example (v11)". What they make is left in
// `region`, which lives longer, as `functions` do.
template <typename Functions>
SlotRegistration registrationWith(const Functions& functions, void* connection, std::string name,
                                  std::optional<void*>& region) {
  const auto note = [name = std::move(name), &region](const char* function, int result,
                                                      void* made) {
    if (result != plugin::kSuccess) {
      return fmt::format("{} of the {} returned {}", function, name,
                         plugin::describeResult(result));
    }
    region = made;
    return std::string();
  };
  return {[&functions, connection, note](const StreamMemory& memory, const runtime::DmaBuf& buf) {
            void* made = nullptr;
            const int result = functions.registerDmaBuf(connection, memory.slots, memory.bytes(),
                                                        buf.offset, buf.descriptor.get(), &made);
            return note("regMrDmaBuf", result, made);
          },
          [&functions, connection, note](const StreamMemory& memory) {
            void* made = nullptr;
            const int result = functions.registerMemory(connection, memory.slots, memory.bytes(),
                                                        plugin::kDeviceMemory, &made);
            return note("regMr of GPU memory", result, made);
          }};
}

// Makes the slots of a FIFO known to an adapter if they are in memory of the device: as a DMA-BUF,
// else by address. Where it takes neither, they move to memory of the host and are left to the
// caller; that is logged once. Returns how data pass, for names of connections.
std::string registerOnDevice(const TransportContext& context, FifoMemory& memory, size_t fifo,
                             const plugin::NetPort& port, const SlotRegistration& registration);

}  // namespace unisono::transport
