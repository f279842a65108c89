// SPDX-License-Identifier: Apache-2.0
#include "transport/net/collnet_stream.h"

#include <atomic>
#include <utility>

#include "base/error.h"

namespace unisono::transport {

CollNetStream::CollNetStream(std::shared_ptr<const CollNetConnection> connection,
                             const StreamMemory& send, const StreamMemory& receive)
    : Stream(send), connection_(std::move(connection)), results_(receive) {
  sendRegion_ = registerSlots(send);
  try {
    receiveRegion_ = registerSlots(receive);
  } catch (const Error&) {
    static_cast<void>(functions().deregisterMemory(connection_->handle, sendRegion_));
    throw;
  }
}

CollNetStream::~CollNetStream() {
  // Nobody can do anything about a failure.
  for (void* region : {sendRegion_, receiveRegion_}) {
    static_cast<void>(functions().deregisterMemory(connection_->handle, region));
  }
}

void* CollNetStream::registerSlots(const StreamMemory& memory) const {
  void* region = nullptr;
  const size_t bytes = size_t{memory.slotCount} * memory.slotBytes;
  const int result = functions().registerMemory(connection_->handle, memory.slots, bytes, &region);
  if (result == plugin::kSuccess) return region;
  throw Error(ErrorCode::systemError,
              fmt::format("The CollNet plug-in {} cannot use {} bytes of memory: its regMr "
                          "returned {}",
                          connection_->collNet->name(), bytes, plugin::describeResult(result)))
      .remedy("Raise the limit of locked memory (ulimit -l), or set NCCL_COLLNET_ENABLE=0");
}

bool CollNetStream::check(const char* function, int result) {
  if (result == plugin::kSuccess) return true;
  failure_ = fmt::format("{} returned {}", function, plugin::describeResult(result));
  return false;
}

// Begins the collective of the next slot, if there is one. Returns whether there may be another.
bool CollNetStream::begin() {
  const uint64_t step = step_ + requests_.size();
  if (step >= tail()) return false;
  // The kernel must have used the slot of the result before, which it says with release.
  const uint64_t used = std::atomic_ref(*results_.head).load(std::memory_order_acquire);
  if (used + results_.slotCount <= step) return false;
  const device::SlotReport report = reportOf(step);
  const size_t size = device::elementBytes(report.type), nodes = connection_->nodes;
  const bool reducesAll = report.operation == device::Operation::allReduce;
  const size_t stride = device::pieceStride(report.bytes);
  if ((reducesAll ? report.bytes : nodes * stride) > memory_.slotBytes) {
    failure_ = fmt::format("a slot reports {} bytes", report.bytes);
    return false;
  }
  void* request = nullptr;
  if (report.bytes > 0) {
    const plugin::CollNetBuffer from{memory_.slot(step), sendRegion_};
    const plugin::CollNetBuffer to{results_.slot(step), receiveRegion_};
    bool begun = false;
    switch (report.operation) {
      case device::Operation::allGather:
        begun = check("iallgather", functions().allGather(connection_->handle, from, to, stride,
                                                          nodes, &request));
        break;
      case device::Operation::reduceScatter:
        begun = check("ireducescatter",
                      functions().reduceScatter(connection_->handle, from, to, stride, nodes,
                                                report.type, report.reduction, &request));
        break;
      default:
        begun = check("iallreduce",
                      functions().allReduce(connection_->handle, from, to, report.bytes / size,
                                            report.type, report.reduction, &request));
        break;
    }
    if (!begun || request == nullptr) return false;
  }
  requests_.push_back(request);
  return true;
}

// Passes on the result of the first step that is under way. Returns whether it was there.
bool CollNetStream::complete() {
  if (requests_.empty()) return false;
  if (requests_.front() != nullptr) {
    int done = 0;
    if (!check("test", functions().test(requests_.front(), &done)) || done == 0) return false;
  }
  requests_.pop_front();
  step_++;
  std::atomic_ref(*results_.tail).store(step_, std::memory_order_release);
  setHead(step_);
  return true;
}

StreamProgress CollNetStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  for (int i = 0; i < kSlotsAtOnce && begin(); i++) progress.moved = true;
  while (failure_.empty() && complete()) progress.moved = true;
  progress.mustLook = isPending();
  return progress;
}

}  // namespace unisono::transport
