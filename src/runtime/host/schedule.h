// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

// What device code on the host, and nothing else, calls to share the machine with the other tasks
// (groups of blocks) of the process. It may also be called from threads that are not tasks:
// then poll() yields the core and the rest does nothing but keep that thread's own clock.
namespace unisono::runtime::host {

// What a task waits for. `what` must be a string literal; a number that does not apply is -1 or 0.
struct WaitReason {
  const char* what = "";
  int rank = -1;  // who waits
  int peer = -1;  // for whom
  int channel = -1;
  uint64_t wanted = 0;
  uint64_t seen = 0;
};

// One unsuccessful look at a condition: lets other tasks run, returns when it is time to look
// again. Throws Error when the executor has found that nothing can ever move (see
// HostRuntime::setDeadlockIsError); the task has to end then.
void poll(const WaitReason& reason);

// A wait has ended: its condition holds. Must follow every loop of poll() that succeeded, before
// anything that others may see; else a task's work looks like waiting, and a deadlock is seen where
// there is none.
void progress();

// An access to memory that other tasks may see, with its order at system scope.
struct Access {
  enum class Kind : uint8_t { none, load, store, exchange, add, fence };
  Kind kind = Kind::none;
  std::memory_order order = std::memory_order_relaxed;
  uint8_t bytes = 0;  // 4 or 8
  const void* address = nullptr;
  uint64_t operand = 0;  // what is stored or added

  bool writes() const { return kind >= Kind::store && kind <= Kind::add; }
  bool reads() const { return kind == Kind::load || (kind >= Kind::exchange && writes()); }
};

namespace detail {
extern constinit std::atomic<bool> seeded;
void schedulePointSlow();
// Returns what was read. A seeded schedule may let other tasks run first.
uint64_t perform(const Access& access);
void notePlain(const void* address, size_t bytes, bool writes);
}  // namespace detail

// Whether schedules have a seed: only then tasks are more than ordinary code.
inline bool isSeeded() {
  return detail::seeded.load(std::memory_order_relaxed);
}

// A place where a seeded schedule may switch to another task; one load otherwise.
inline void schedulePoint() {
  if (isSeeded()) [[unlikely]]
    detail::schedulePointSlow();
}

// Accesses to memory that tasks share. Without a seed they are those of std::atomic_ref.
template <typename T>
T load(const T* address, std::memory_order order) {
  if (isSeeded()) [[unlikely]] {
    return static_cast<T>(detail::perform({Access::Kind::load, order, sizeof(T), address}));
  }
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(order);
}
template <typename T>
void store(T* address, T value, std::memory_order order) {
  if (isSeeded()) [[unlikely]] {
    detail::perform({Access::Kind::store, order, sizeof(T), address, value});
    return;
  }
  std::atomic_ref<T>(*address).store(value, order);
}
template <typename T>
T exchange(T* address, T value, std::memory_order order) {
  if (isSeeded()) [[unlikely]] {
    return static_cast<T>(
        detail::perform({Access::Kind::exchange, order, sizeof(T), address, value}));
  }
  return std::atomic_ref<T>(*address).exchange(value, order);
}
template <typename T>
T fetchAdd(T* address, T value, std::memory_order order) {
  if (isSeeded()) [[unlikely]] {
    return static_cast<T>(detail::perform({Access::Kind::add, order, sizeof(T), address, value}));
  }
  return std::atomic_ref<T>(*address).fetch_add(value, order);
}
inline void fence(std::memory_order order) {
  detail::perform({Access::Kind::fence, order});
}

// Announces plain accesses, before they are made, to an executor that checks them for data races:
// one call for a range.
inline void noteRead(const void* address, size_t bytes) {
  if (isSeeded()) [[unlikely]]
    detail::notePlain(address, bytes, false);
}
inline void noteWrite(const void* address, size_t bytes) {
  if (isSeeded()) [[unlikely]]
    detail::notePlain(address, bytes, true);
}

// The task's virtual clock, in nanoseconds. A launch starts at the clock of its stream and the
// stream continues at the latest clock of the launch's tasks.
uint64_t virtualClock();
void advanceVirtualClock(uint64_t nanoseconds);
void raiseVirtualClock(uint64_t to);  // to the later of the two

}  // namespace unisono::runtime::host
