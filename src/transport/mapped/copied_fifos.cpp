// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/copied_fifos.h"

#include <atomic>

#include "base/log.h"

namespace unisono::transport {

CopyStream::CopyStream(runtime::Runtime& runtime, int device, runtime::Stream stream,
                       const StreamMemory& from, const StreamMemory& to, bool sends)
    : Stream(from), runtime_(runtime), device_(device), stream_(stream), to_(to), sends_(sends) {
  for (uint32_t slot = 0; slot < from.slotCount; slot++) {
    copied_.push_back(runtime.createEvent(device));
  }
}

// Returns whether there was a slot to copy, and room for it.
bool CopyStream::begin() {
  const uint64_t taken = std::atomic_ref(*to_.head).load(std::memory_order_acquire);
  if (begun_ >= tail() || begun_ >= taken + to_.slotCount) return false;
  const uint32_t bytes = filledBytes(begun_);
  if (bytes > 0) runtime_.copyAsync(to_.slot(begun_), memory_.slot(begun_), bytes, stream_);
  copied_[begun_ % copied_.size()]->record(stream_);
  begun_++;
  return true;
}

// Returns whether a copy has ended.
bool CopyStream::complete() {
  if (step_ == begun_ || !copied_[step_ % copied_.size()]->isReached()) return false;
  uint64_t* report = to_.tail + device::kReportsWord + step_ % to_.slotCount;
  std::atomic_ref(*report).store(device::packReport(reportOf(step_)), std::memory_order_relaxed);
  release(step_++);
  std::atomic_ref(*to_.tail).store(step_, std::memory_order_release);
  return true;
}

StreamProgress CopyStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  try {
    const runtime::DeviceScope scope(runtime_, device_);
    for (int i = 0; i < kSlotsAtOnce && begin(); i++) progress.moved = true;
    while (complete()) progress.moved = true;
  } catch (const Error& error) {
    failure_ = error.what();
    isSilence_ = true;  // the peer cannot tell more
  }
  progress.mustLook = failure_.empty() && (step_ < begun_ || isPending());
  return progress;
}

CopiedFifos::CopiedFifos(const TransportContext& context)
    : context_(context),
      streams_{context.runtime.createUrgentStream(context.own().device),
               context.runtime.createUrgentStream(context.own().device)},
      proxy_(Proxy::ofDevice(context.own().device, context.options.proxyCores,
                             context.options.ignoresOwnCores)),
      client_(proxy_.add({context.options.isIdle, context.options.fail})) {
  if (context.slots > device::kMaxReportedSlots) {
    throw internalError("Copy engines cannot move FIFOs of {} slots", context.slots);
  }
}

CopiedFifos::~CopiedFifos() {
  close();
  const runtime::DeviceScope scope(context_.runtime, context_.own().device);
  for (const auto& stream : streams_) {
    try {
      context_.runtime.synchronize(stream.get());
    } catch (const Error& error) {
      logInfo("The copies of a communicator ended: {}", error.what());
    }
  }
}

Proxy::Place CopiedFifos::placeOf(int rank, int peer, bool sends) {
  return {rank,
          {peer},
          sends ? "into host memory" : "out of host memory",
          "copy by a copy engine",
          ErrorCode::unhandledCudaError,
          "Look for errors of the device, or set NCCL_SHM_USE_CUDA_MEMCPY=0 to let kernels copy"};
}

void CopiedFifos::replace(const ConnectionGroup& group, std::vector<device::Fifo>& fifos) {
  const int device = context_.own().device;
  const bool sends = group.sender == context_.config.rank;
  const int peer = sends ? group.receiver : group.sender;
  std::vector<FifoMemory::Shape> shapes;
  std::vector<device::Fifo*> replaced;
  for (size_t i = 0; i < fifos.size(); i++) {
    const auto& shape = group.fifos[i % group.fifos.size()];
    if (shape.protocol != device::Protocol::simple) continue;
    shapes.push_back({shape.slotBytes, shape.protocol, true});
    replaced.push_back(&fifos[i]);
  }
  memory_.push_back(std::make_unique<FifoMemory>(context_.runtime, shapes, context_.slots, device,
                                                 context_.options.deviceBytes));
  const FifoMemory& memory = *memory_.back();
  for (size_t i = 0; i < replaced.size(); i++) {
    device::Fifo& fifo = *replaced[i];
    const StreamMemory own = memory.streamOf(i),
                       shared{fifo.tail, fifo.head, fifo.slots, context_.slots, own.slotBytes};
    proxy_.addStream(
        client_,
        std::make_unique<CopyStream>(context_.runtime, device, streams_[sends ? 0 : 1].get(),
                                     sends ? own : shared, sends ? shared : own, sends),
        placeOf(context_.config.rank, peer, sends));
    fifo = memory.fifoOf(i);
  }
}

}  // namespace unisono::transport
