// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>

#include "device/simt/common.h"
#include "runtime/host/schedule.h"
#include "runtime/runtime.h"

#define UNISONO_DEVICE inline
#define UNISONO_DEVICE_CALL inline
#define UNISONO_UNROLL
#define UNISONO_NO_UNROLL
#define UNISONO_DEVICE_TABLE inline constexpr
#define UNISONO_TARGET host_target

// On the host a group is one thread of execution with one lane: loops over group.size() run whole,
// barriers inside a group are nothing. An executor that checks them splits it into the roles that a
// GPU's warps have, one task each. Orders are those of std::atomic, which ThreadSanitizer and the
// executors for docs/proof.md understand.
namespace unisono::device::host_target {

inline constexpr int kWarpSize = 1;
inline constexpr int kGroupWords = 6;
// Words that a lane of protocol LL moves at a time, and lines of protocol LL128.
inline constexpr int kWordsPerPass = 2;

template <typename T>
T loadRelaxed(const T* address) {
  return runtime::host::load(address, std::memory_order_relaxed);
}
template <typename T>
T loadAcquire(const T* address) {
  return runtime::host::load(address, std::memory_order_acquire);
}
template <typename T>
void storeRelaxed(T* address, T value) {
  runtime::host::store(address, value, std::memory_order_relaxed);
}
template <typename T>
void storeRelease(T* address, T value) {
  runtime::host::store(address, value, std::memory_order_release);
}
// For the CPU, which may read the word at any time. Not a scheduling point, because no other task
// reads it.
inline void storeForCpu(uint64_t* address, uint64_t value) {
  std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_relaxed);
}
inline void addForCpu(uint64_t* address, uint64_t value) {
  std::atomic_ref<uint64_t>(*address).fetch_add(value, std::memory_order_relaxed);
}
inline constexpr bool kLoadsMayHang = true;
// With acquire order.
template <typename T>
T exchange(T* address, T value) {
  return runtime::host::exchange(address, value, std::memory_order_acquire);
}

// Returns the value before.
inline uint64_t fetchAddAcquire(uint64_t* address, uint64_t value) {
  return runtime::host::fetchAdd(address, value, std::memory_order_acquire);
}
inline void addRelease(uint64_t* address, uint64_t value) {
  runtime::host::fetchAdd(address, value, std::memory_order_release);
}

// Every store that is ordered is one with release order here.
inline void releaseStores() {}
template <typename T>
void storeOrdered(T* address, T value) {
  storeRelease(address, value);
}
inline void addOrdered(uint64_t* address, uint64_t value) {
  addRelease(address, value);
}

// Plain accesses that the next lines make.
inline void noteRead(const void* address, uint64_t bytes) {
  runtime::host::noteRead(address, bytes);
}
inline void noteWrite(const void* address, uint64_t bytes) {
  runtime::host::noteWrite(address, bytes);
}

inline void fenceAliases() {}

inline uint64_t loadWord(const uint64_t* address, bool wanted, uint64_t otherwise) {
  return wanted ? *address : otherwise;
}

class ThreadGroup {
 public:
  ThreadGroup() = default;
  explicit ThreadGroup(const runtime::HostGroupContext& context)
      : role_(context.roles == 1 ? Role::all : static_cast<Role>(context.role)),
        shared_(static_cast<Shared*>(context.groupShared)) {}
  int rank() const { return 0; }
  int size() const { return 1; }
  bool isWorker() const { return role_ == Role::all || role_ == Role::worker; }
  bool isWaiter(int index = 0) const {
    return (void)index, role_ == Role::all || role_ == Role::waiter;
  }
  bool isPoster(int index = 0) const {
    return (void)index, role_ == Role::all || role_ == Role::poster;
  }
  // Every role has a copy of what a group shares.
  bool isLoader(int index) const { return (void)index, true; }

  void syncReady() {
    if (role_ == Role::worker || role_ == Role::waiter) sync(0, 2);
  }
  void syncDone() {
    if (role_ == Role::worker || role_ == Role::poster) sync(1, 2);
  }
  void syncAll() {
    if (role_ != Role::all) sync(2, 3);
  }

  void setAborted() {
    aborted_ = true;
    if (shared_ != nullptr) storeRelaxed(&shared_->aborted, uint32_t{1});
  }
  bool aborted() const {
    return aborted_ || (shared_ != nullptr && loadRelaxed(&shared_->aborted) != 0);
  }

  // Words that the waiter leaves to the other roles, which see them after the next barriers.
  void setWord(int index, uint64_t value) {
    if (shared_ == nullptr) {
      words_[index] = value;
    } else {
      storeRelaxed(&shared_->words[index], value);
    }
  }
  uint64_t word(int index) const {
    return shared_ == nullptr ? words_[index] : loadRelaxed(&shared_->words[index]);
  }

 private:
  enum class Role { worker, waiter, poster, all };
  static constexpr int kBarriers = 3;
  struct Shared {
    uint64_t arrived[kBarriers];
    uint64_t opened[kBarriers];
    uint64_t words[kGroupWords];
    uint32_t aborted;
  };
  static_assert(sizeof(Shared) <= runtime::kGroupSharedBytes);

  // Whoever arrives releases what it did; whoever leaves has acquired what all did.
  void sync(int barrier, uint64_t roles) {
    const uint64_t round = ++rounds_[barrier];
    uint64_t* opened = &shared_->opened[barrier];
    if (runtime::host::fetchAdd(&shared_->arrived[barrier], uint64_t{1},
                                std::memory_order_acq_rel) == roles * round - 1) {
      storeRelease(opened, round);
      return;
    }
    uint64_t seen;
    while ((seen = loadAcquire(opened)) < round) {
      runtime::host::poll({"the other roles of its group", -1, -1, -1, round, seen});
    }
    runtime::host::progress();
  }

  Role role_ = Role::all;
  Shared* shared_ = nullptr;  // unless the group is split
  bool aborted_ = false;
  uint64_t rounds_[kBarriers] = {};
  uint64_t words_[kGroupWords] = {};
};

inline Vector16 loadVector(const void* address, bool wanted = true) {
  Vector16 value{};
  if (wanted) std::memcpy(&value, __builtin_assume_aligned(address, 16), sizeof(value));
  return value;
}
inline Vector16 loadVectorCached(const void* address, bool wanted) {
  return loadVector(address, wanted);
}
inline void storeVector(void* address, const Vector16& value, bool wanted = true) {
  if (wanted) std::memcpy(__builtin_assume_aligned(address, 16), &value, sizeof(value));
}
// Here a vector at any address.
struct Window {
  Vector16 value;
};
inline Window loadWindow(const void* address, bool wanted) {
  Window window{};
  if (wanted) std::memcpy(&window.value, address, sizeof(window.value));
  return window;
}
inline Vector16 vectorOf(const Window& window, uint32_t misalignment) {
  return (void)misalignment, window.value;
}
inline void storeAnywhere(void* address, const Vector16& value) {
  std::memcpy(address, &value, sizeof(value));
}

// With `dependent`, lines carry what PTX orders by dependency: a store that depends on a load by
// way of lines cannot be seen by that load (PTX: no values out of thin air). C++ has no such rule.
inline void storeLine(Line* line, uint64_t data, uint32_t flag, bool dependent = false) {
  const auto order = dependent ? std::memory_order_release : std::memory_order_relaxed;
  uint64_t first = (data & 0xffffffffu) | uint64_t{flag} << 32;
  uint64_t second = data >> 32 | uint64_t{flag} << 32;
  runtime::host::store(reinterpret_cast<uint64_t*>(line), first, order);
  runtime::host::store(reinterpret_cast<uint64_t*>(line) + 1, second, order);
}
inline void storeLineIf(bool wanted, Line* line, uint64_t data, uint32_t flag) {
  if (wanted) storeLine(line, data, flag);
}
inline Line loadLine(const Line* line, bool dependent = false) {
  const auto order = dependent ? std::memory_order_acquire : std::memory_order_relaxed;
  uint64_t first = runtime::host::load(reinterpret_cast<const uint64_t*>(line), order);
  uint64_t second = runtime::host::load(reinterpret_cast<const uint64_t*>(line) + 1, order);
  return Line{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
              static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
}

// One lane has the whole line. That it arrives as one is modelled by the order of its words: the
// flag is stored last, with release, and loaded first, with acquire. Data that are stored after the
// flag, or in another line than it, are found out.
inline constexpr int kLineLanes = 1;
inline constexpr int kLinesPerPass = 2;
inline constexpr int kLinesPerReduction = 1;
inline constexpr int kLaneWords = kLineWords;

inline void storeLine128(uint64_t* line, int lane, const uint64_t* word) {
  static_cast<void>(lane);
  for (int w = 0; w < kLineWords - 1; w++) storeRelaxed(line + w, word[w]);
  storeRelease(line + kLineWords - 1, word[kLineWords - 1]);
}
inline void loadLine128(const uint64_t* line, int lane, uint64_t* word) {
  static_cast<void>(lane);
  word[kLineWords - 1] = loadAcquire(line + kLineWords - 1);
  for (int w = 0; w < kLineWords - 1; w++) word[w] = loadRelaxed(line + w);
}

inline void pollFor(const WaitSubject& subject) {
  uint64_t seen = 0;
  if (subject.counter != nullptr) {
    seen = std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(subject.counter))
               .load(std::memory_order_relaxed);
  }
  runtime::host::poll(
      {subject.what, subject.rank, subject.peer, subject.channel, subject.wanted, seen});
}

// Calls `ready` until it is true; false when the communicator was aborted first.
template <typename Ready>
bool waitUntil(const uint32_t* abortFlag, const WaitSubject& subject, Ready ready) {
  while (!ready()) {
    if (loadRelaxed(abortFlag) != 0) return false;
    pollFor(subject);
  }
  runtime::host::progress();
  return true;
}
template <typename Ready>
bool waitUntilAll(const uint32_t* abortFlag, const WaitSubject& subject, Ready ready) {
  return waitUntil(abortFlag, subject, ready);
}
inline void syncWarp() {}
inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
// For a wait that is short and must not end before its condition holds, unless the peer has died:
// the memory that it stored to is safe then. That is when its process has ended, or at the latest
// after kLongestShortWait.
template <typename Ready>
void waitWhileAlive(const uint32_t* abortFlag, const WaitSubject& subject, Ready ready) {
  const bool isEndable = subject.peer >= 0 && subject.peer < kEndableRanks;
  // Not a scheduling point: it is the CPU that sets the bit.
  const auto hasEnded = [&] {
    if (!isEndable) return false;
    auto* word = const_cast<uint32_t*>(abortFlag + endedWordOf(subject.peer));
    return (std::atomic_ref(*word).load(std::memory_order_relaxed) & endedBitOf(subject.peer)) != 0;
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kLongestShortWait);
  while (!ready() && !hasEnded() && std::chrono::steady_clock::now() < end) pollFor(subject);
  runtime::host::progress();
}

}  // namespace unisono::device::host_target
