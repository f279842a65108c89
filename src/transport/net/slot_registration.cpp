// SPDX-License-Identifier: Apache-2.0
#include "transport/net/slot_registration.h"

#include "base/error.h"
#include "base/log.h"

namespace unisono::transport {

std::string registerOnDevice(const TransportContext& context, FifoMemory& memory, size_t fifo,
                             const plugin::NetPort& port, const SlotRegistration& registration) {
  const StreamMemory slots = memory.streamOf(fifo);
  if (!slots.onDevice) return "";
  std::string problem;
  if (port.takesDmaBufs && context.options.dmaBuf) {
    try {
      const runtime::DmaBuf dmaBuf =
          context.runtime.exportDmaBuf(slots.slots, memory.bytesOfSlots(fifo));
      problem = registration.asDmaBuf(slots, dmaBuf);
    } catch (const Error& error) {
      problem = error.what();
    }
    if (problem.empty()) return ", GPUDirect by DMA-BUF";
  }
  if (port.reachesGpus) {
    const std::string refusal = registration.byAddress(slots);
    if (refusal.empty()) {
      if (!problem.empty()) {
        warnOnce(fmt::format("Device {} takes no DMA-BUF ({}), but the address of GPU memory",
                             port.name, problem));
      }
      return ", GPUDirect";
    }
    problem += (problem.empty() ? "" : "; ") + refusal;
  }
  warnOnce(
      fmt::format("Data pass through memory of the host: device {} does not take memory of "
                  "the GPU ({})",
                  port.name, problem));
  memory.moveToHost(fifo);
  return "";
}

}  // namespace unisono::transport
