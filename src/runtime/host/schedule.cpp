// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/schedule.h"

#include <algorithm>
#include <thread>
#include <type_traits>

#include "runtime/host/task.h"

namespace unisono::runtime::host {
namespace {

thread_local uint64_t threadClock = 0;

// Calls visit(order) with the order as a constant: those of atomic operations are meant to be.
template <typename Visit>
auto withOrder(std::memory_order order, Visit visit) {
  switch (order) {
    case std::memory_order_relaxed:
      return visit(std::integral_constant<std::memory_order, std::memory_order_relaxed>{});
    case std::memory_order_acquire:
    case std::memory_order_consume:
      return visit(std::integral_constant<std::memory_order, std::memory_order_acquire>{});
    case std::memory_order_release:
      return visit(std::integral_constant<std::memory_order, std::memory_order_release>{});
    default:
      return visit(std::integral_constant<std::memory_order, std::memory_order_acq_rel>{});
  }
}

template <typename T>
uint64_t performAs(const Access& access) {
  std::atomic_ref<T> cell(*static_cast<T*>(const_cast<void*>(access.address)));
  const T operand = static_cast<T>(access.operand);
  return withOrder(access.order, [&](auto order) -> uint64_t {
    constexpr std::memory_order kOrder = order;
    constexpr std::memory_order kLoad =
        kOrder == std::memory_order_relaxed ? kOrder : std::memory_order_acquire;
    constexpr std::memory_order kStore =
        kOrder == std::memory_order_relaxed ? kOrder : std::memory_order_release;
    switch (access.kind) {
      case Access::Kind::load:
        return cell.load(kLoad);
      case Access::Kind::store:
        cell.store(operand, kStore);
        return 0;
      case Access::Kind::exchange:
        return cell.exchange(operand, kOrder);
      case Access::Kind::add:
        return cell.fetch_add(operand, kOrder);
      default:
        return 0;
    }
  });
}

}  // namespace

uint64_t performNow(const Access& access) {
  if (access.kind == Access::Kind::fence) {
// ThreadSanitizer does not know fences: there a protocol that needs one is reported.
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(access.order);
#endif
    return 0;
  }
  return access.bytes == 4 ? performAs<uint32_t>(access) : performAs<uint64_t>(access);
}

thread_local constinit std::atomic<HostTask*> HostTask::current_{nullptr};

namespace detail {

constinit std::atomic<bool> seeded{false};

void schedulePointSlow() {
  if (HostTask* task = HostTask::current()) task->access({});
}

uint64_t perform(const Access& access) {
  HostTask* task = HostTask::current();
  return task != nullptr ? task->access(access) : performNow(access);
}

void notePlain(const void* address, size_t bytes, bool writes) {
  HostTask* task = HostTask::current();
  if (task != nullptr && bytes > 0) task->notePlain(address, bytes, writes);
}

}  // namespace detail

void poll(const WaitReason& reason) {
  if (HostTask* task = HostTask::current()) {
    task->poll(reason);
  } else {
    std::this_thread::yield();
  }
}

void progress() {
  if (HostTask* task = HostTask::current()) task->progress();
}

uint64_t virtualClock() {
  HostTask* task = HostTask::current();
  return task != nullptr ? task->clock() : threadClock;
}

void raiseVirtualClock(uint64_t to) {
  if (HostTask* task = HostTask::current()) {
    task->setClock(std::max(task->clock(), to));
  } else {
    threadClock = std::max(threadClock, to);
  }
}

void advanceVirtualClock(uint64_t nanoseconds) {
  raiseVirtualClock(virtualClock() + nanoseconds);
}

}  // namespace unisono::runtime::host
