// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/error.h"
#include "runtime/host/executor.h"
#include "runtime/host/launch.h"

namespace unisono::runtime::host {

// A recorded point of a stream: opens when the stream gets there.
struct EventPoint {
  Latch reached{1};
  std::atomic<bool> isReached{false};  // for threads that do not wait
  std::atomic<uint64_t> clock{0};
  std::atomic<int64_t> time{0};  // of the steady clock, in ns; set before isReached
};

struct CopyOperation {
  void* destination;
  const void* source;
  size_t bytes;
  bool isBroken = false;  // passes a link that changes data
};
struct FillOperation {
  void* destination;
  std::byte value;
  size_t bytes;
};
struct RecordOperation {
  std::shared_ptr<EventPoint> point;
};
struct WaitOperation {
  std::shared_ptr<EventPoint> point;
};
using Operation = std::variant<CopyOperation, FillOperation, std::unique_ptr<Launch>,
                               RecordOperation, WaitOperation>;

// An ordered queue of work of one device. While there is work, a task of the executor (the driver)
// takes it in order. Thread-safe; must be owned by a shared_ptr, which the driver shares, so that a
// stream that its user dropped still finishes its work.
class HostStream : public std::enable_shared_from_this<HostStream> {
 public:
  // `deviceClock` receives the latest virtual clock of the stream, in ns.
  HostStream(Executor& executor, int device, std::atomic<uint64_t>& deviceClock)
      : executor_(executor), device_(device), deviceClock_(deviceClock) {}

  int device() const { return device_; }
  void enqueue(Operation operation);

  // Waits for what was enqueued before. Throws the first error of the stream's work since the last
  // call that reported one; the stream stays usable. Throws invalidUsage inside device code.
  void synchronize();
  // Whether all that was enqueued has ended; throws as synchronize().
  bool query();

 private:
  struct SyncWaiter;

  void startDriver();
  void drive();
  void perform(Operation& operation);
  void wakeWaiters(bool driverEnded);
  void throwFailure(std::unique_lock<std::mutex>& lock);

  Executor& executor_;
  const int device_;
  std::atomic<uint64_t>& deviceClock_;

  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<Operation> queue_;
  bool driven_ = false;  // a driver will look at the queue again
  int drivers_ = 0;      // that have not ended
  uint64_t enqueued_ = 0;
  uint64_t completed_ = 0;
  uint64_t clock_ = 0;
  std::vector<SyncWaiter*> waiters_;
  std::optional<Failure> failure_;
};

}  // namespace unisono::runtime::host
