// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/stream.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/math.h"

namespace unisono::runtime::host {
namespace {

// Looks of a waiting thread before it sleeps; a small launch is over by then.
constexpr int kLooksBeforeSleep = 40;

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

}  // namespace

// A thread in synchronize(). It holds the executor's gate, which whoever wakes it closes: then a
// seeded schedule stops at the same place every time.
struct HostStream::SyncWaiter {
  uint64_t target;
  std::atomic<bool> done{false};
};

void HostStream::enqueue(Operation operation) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(operation));
  enqueued_++;
  if (driven_) return;
  try {
    startDriver();
  } catch (...) {
    queue_.pop_back();
    enqueued_--;
    throw;
  }
  driven_ = true;
}

void HostStream::startDriver() {
  auto self = shared_from_this();
  executor_.spawn({.info = {"stream", device_, 0, 0},
                   .clock = 0,
                   .body = [stream = self.get()] { stream->drive(); },
                   .afterEnd = [self] { self->wakeWaiters(true); }});
  drivers_++;
}

void HostStream::drive() {
  std::unique_lock lock(mutex_);
  while (true) {
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::optional<Failure> failure;
    try {
      perform(operation);
      if (auto* launch = std::get_if<std::unique_ptr<Launch>>(&operation)) {
        failure = std::move((*launch)->failure());
      }
    } catch (...) {
      failure = currentFailure();
    }
    operation = CopyOperation{};
    lock.lock();
    completed_++;
    if (failure && !failure_) failure_ = std::move(failure);
    if (queue_.empty()) {
      driven_ = false;
      return;
    }
    lock.unlock();
    wakeWaiters(false);
    lock.lock();
  }
}

void HostStream::perform(Operation& operation) {
  std::visit(Overloaded{
                 [](CopyOperation& copy) {
                   if (copy.bytes > 0) std::memmove(copy.destination, copy.source, copy.bytes);
                   if (copy.isBroken) *static_cast<uint8_t*>(copy.destination) ^= 0x10;
                 },
                 [](FillOperation& fill) {
                   if (fill.bytes > 0) {
                     std::memset(fill.destination, std::to_integer<int>(fill.value), fill.bytes);
                   }
                 },
                 [this](std::unique_ptr<Launch>& launch) {
                   clock_ = launch->run(executor_, device_, clock_);
                   atomicMax(deviceClock_, clock_);
                 },
                 [this](RecordOperation& record) {
                   record.point->clock.store(clock_, std::memory_order_relaxed);
                   record.point->time.store(
                       std::chrono::steady_clock::now().time_since_epoch().count(),
                       std::memory_order_relaxed);
                   record.point->isReached.store(true, std::memory_order_release);
                   record.point->reached.arrive();
                 },
                 [this](WaitOperation& wait) {
                   wait.point->reached.wait();
                   clock_ = std::max(clock_, wait.point->clock.load(std::memory_order_relaxed));
                 },
             },
             operation);
}

void HostStream::wakeWaiters(bool driverEnded) {
  std::lock_guard lock(mutex_);
  if (driverEnded) drivers_--;
  // Waiters for the last operation are woken after the driver has ended, so that nothing of a
  // stream is alive once it was synchronized.
  auto ready = std::partition(waiters_.begin(), waiters_.end(), [&](const SyncWaiter* waiter) {
    return waiter->target > completed_ || (!driverEnded && waiter->target == enqueued_);
  });
  if (ready == waiters_.end()) return;
  for (auto waiter = ready; waiter != waiters_.end(); waiter++) {
    executor_.closeGate();
    (*waiter)->done.store(true, std::memory_order_release);
  }
  waiters_.erase(ready, waiters_.end());
  ended_.notify_all();
}

void HostStream::synchronize() {
  if (HostTask::current() != nullptr) {
    throw invalidUsage("Device code cannot synchronize a stream");
  }
  std::unique_lock lock(mutex_);
  if (completed_ < enqueued_ || drivers_ > 0) {
    SyncWaiter waiter{.target = enqueued_};
    waiters_.push_back(&waiter);
    executor_.openGate();
    lock.unlock();
    if (executor_.runsHere()) executor_.runUntil(waiter.done);
    for (int i = 0; i < kLooksBeforeSleep && !waiter.done.load(std::memory_order_acquire); i++) {
      ::sched_yield();
    }
    lock.lock();
    ended_.wait(lock, [&] { return waiter.done.load(std::memory_order_acquire); });
  }
  throwFailure(lock);
}

bool HostStream::query() {
  executor_.runSomeSteps();
  std::unique_lock lock(mutex_);
  throwFailure(lock);
  return completed_ == enqueued_;
}

void HostStream::throwFailure(std::unique_lock<std::mutex>& lock) {
  if (!failure_) return;
  Failure failure = std::move(*failure_);
  failure_.reset();
  lock.unlock();
  throw Error(failure.code, std::move(failure.text));
}

}  // namespace unisono::runtime::host
