// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#endif

// What the sanitizers have to be told about fibers; nothing in other builds.
//
// ThreadSanitizer sees each fiber as a thread. A switch from the scheduler to a fiber does not
// order them, so that two fibers are ordered only by what their own code does, as on real
// processors, and not by the one thread that happens to run both.
namespace unisono::runtime::host::sanitizer {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddress = true;
#else
inline constexpr bool kAddress = false;
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThread = true;
#else
inline constexpr bool kThread = false;
#endif

// Orders what came before release(object) ahead of what follows acquire(object).
inline void release([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(object);
#endif
}
inline void acquire([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(object);
#endif
}

// Hides what the executor does for itself: the lock of its queue would order tasks that nothing
// else orders, and what its scheduler reads of a fiber would look like a race with the fiber's next
// write.
class IgnoreScope {
 public:
  IgnoreScope() {  // NOLINT(modernize-use-equals-default)
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
  }
  ~IgnoreScope() {  // NOLINT(modernize-use-equals-default)
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  IgnoreScope(const IgnoreScope&) = delete;
  IgnoreScope& operator=(const IgnoreScope&) = delete;
};

inline void* currentFiber() {
#if defined(__SANITIZE_THREAD__)
  return __tsan_get_current_fiber();
#else
  return nullptr;
#endif
}
inline void* createFiber() {
#if defined(__SANITIZE_THREAD__)
  return __tsan_create_fiber(0);
#else
  return nullptr;
#endif
}
inline void destroyFiber([[maybe_unused]] void* fiber) {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(fiber);
#endif
}
enum class Order { none, currentBeforeTarget };
inline void switchFiber([[maybe_unused]] void* fiber, [[maybe_unused]] Order order) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber, order == Order::none ? __tsan_switch_to_fiber_no_sync : 0);
#endif
}

// Around a switch of stacks. `saved` keeps the leaving context's state; null when it ends.
inline void startSwitch([[maybe_unused]] void** saved, [[maybe_unused]] const void* bottom,
                        [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(saved, bottom, bytes);
#endif
}
inline void finishSwitch([[maybe_unused]] void* saved, [[maybe_unused]] const void** bottom,
                         [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, bottom, bytes);
#endif
}
inline void unpoison([[maybe_unused]] void* address, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(address, bytes);
#endif
}

}  // namespace unisono::runtime::host::sanitizer
