#pragma once

#include <atomic>
#include <cstring>

#include "device/simt/common.h"
#include "runtime/host/schedule.h"

#define UNISONO_DEVICE inline
#define UNISONO_DEVICE_CALL inline
#define UNISONO_UNROLL
#define UNISONO_DEVICE_TABLE inline const
#define UNISONO_TARGET host_target

// On the host a group is one thread of execution with one lane: loops over group.size() run whole,
// barriers inside a group are nothing. Orders are std::atomic_ref's, so that ThreadSanitizer checks
// that a protocol publishes its data.
namespace unisono::device::host_target {

inline constexpr int kWarpSize = 1;
// Lines that a lane sends before it polls for the peers' (see collective/one_shot.h).
inline constexpr int kLinesPerPass = 64;

class Group {
 public:
  explicit Group(int warps = 1, int firstWarp = 0, int barrier = 1) {
    (void)warps, (void)firstWarp, (void)barrier;
  }
  int rank() const { return 0; }
  int size() const { return 1; }
  bool isWorker() const { return true; }
  bool isWaiter(int index = 0) const { return (void)index, true; }
  bool isPoster() const { return true; }
  void syncReady() const {}
  void syncDone() const {}
  void syncAll() const {}

  void setAborted() { aborted_ = true; }
  bool aborted() const { return aborted_; }

 private:
  bool aborted_ = false;
};

template <typename T>
T loadRelaxed(const T* address) {
  runtime::host::schedulePoint();
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_relaxed);
}
template <typename T>
T loadAcquire(const T* address) {
  runtime::host::schedulePoint();
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_acquire);
}
template <typename T>
void storeRelaxed(T* address, T value) {
  std::atomic_ref<T>(*address).store(value, std::memory_order_relaxed);
  runtime::host::schedulePoint();
}
template <typename T>
void storeRelease(T* address, T value) {
  std::atomic_ref<T>(*address).store(value, std::memory_order_release);
  runtime::host::schedulePoint();
}

inline Vector16 loadVector(const void* address) {
  Vector16 value;
  std::memcpy(&value, __builtin_assume_aligned(address, 16), sizeof(value));
  return value;
}
inline void storeVector(void* address, const Vector16& value) {
  std::memcpy(__builtin_assume_aligned(address, 16), &value, sizeof(value));
}

inline void storeLine(Line* line, uint64_t data, uint32_t flag) {
  uint64_t first = (data & 0xffffffffu) | uint64_t{flag} << 32;
  uint64_t second = data >> 32 | uint64_t{flag} << 32;
  storeRelaxed(reinterpret_cast<uint64_t*>(line), first);
  storeRelaxed(reinterpret_cast<uint64_t*>(line) + 1, second);
}
inline Line loadLine(const Line* line) {
  uint64_t first = loadRelaxed(reinterpret_cast<const uint64_t*>(line));
  uint64_t second = loadRelaxed(reinterpret_cast<const uint64_t*>(line) + 1);
  return Line{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
              static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
}

// Calls `ready` until it is true; false when the communicator was aborted first. `wanted` and
// `seen()` are for the report of a stuck process.
template <typename Ready>
bool waitUntil(const uint32_t* abortFlag, const WaitSubject& subject, Ready ready,
               uint64_t wanted = 0) {
  while (!ready()) {
    if (loadRelaxed(abortFlag) != 0) return false;
    runtime::host::poll({subject.what, subject.rank, subject.peer, subject.channel, wanted, 0});
  }
  runtime::host::progress();
  return true;
}

}  // namespace unisono::device::host_target
