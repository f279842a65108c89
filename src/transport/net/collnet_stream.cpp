// SPDX-License-Identifier: Apache-2.0
#include "transport/net/collnet_stream.h"

#include <atomic>
#include <utility>

#include "plugin/net.h"

namespace unisono::transport {

CollNetRegion makeRegion(std::shared_ptr<const CollNetConnection> connection, void* region) {
  // Nobody can do anything about a failure.
  return {region, [connection = std::move(connection)](void* made) {
            static_cast<void>(
                connection->collNet->functions().deregisterMemory(connection->handle, made));
          }};
}

CollNetStream::CollNetStream(std::shared_ptr<const CollNetConnection> connection, const Slots& send,
                             Slots results, bool flushes)
    : Stream(send.memory),
      connection_(std::move(connection)),
      region_(send.region),
      results_(std::move(results)),
      flushes_(flushes) {}

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
  const StreamMemory& results = results_.memory;
  const uint64_t used = std::atomic_ref(*results.head).load(std::memory_order_acquire);
  if (used + results.slotCount <= step) return false;
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
    const plugin::CollNetBuffer from{memory_.slot(step), region_.get()};
    const plugin::CollNetBuffer to{results.slot(step), results_.region.get()};
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

// Whether kernels see the result of the first step. Begins the flush of it where there has to be
// one.
bool CollNetStream::isFlushed() {
  if (!flushes_ || requests_.front() == nullptr) return true;
  if (!flushed_) {
    const plugin::CollNetBuffer slot{results_.memory.slot(step_), results_.region.get()};
    const int result = functions().flush(connection_->handle, slot,
                                         static_cast<int>(results_.memory.slotBytes), &flush_);
    if (!check("iflush", result)) return false;
    flushed_ = true;
  }
  int done = 1;
  return flush_ == nullptr || (check("test", functions().test(flush_, &done)) && done != 0);
}

// Passes on the result of the first step that is under way. Returns whether it was there.
bool CollNetStream::complete() {
  if (requests_.empty()) return false;
  if (!arrived_ && requests_.front() != nullptr) {
    int done = 0;
    if (!check("test", functions().test(requests_.front(), &done)) || done == 0) return false;
  }
  arrived_ = true;
  if (!isFlushed()) return false;
  arrived_ = flushed_ = false;
  flush_ = nullptr;
  requests_.pop_front();
  step_++;
  std::atomic_ref(*results_.memory.tail).store(step_, std::memory_order_release);
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
