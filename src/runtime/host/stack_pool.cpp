// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/stack_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "base/system.h"
#include "runtime/host/sanitizer.h"

namespace unisono::runtime::host {
namespace {

constexpr size_t kStackBytes = (sanitizer::kAddress || sanitizer::kThread ? 512 : 128) * 1024;
constexpr size_t kMaxFree = 4096;

Stack mapStack() {
  size_t guard = pageBytes();
  void* address = ::mmap(nullptr, guard + kStackBytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (address == MAP_FAILED) throw systemError(errno, "mmap of a fiber's stack");
  Stack stack{static_cast<std::byte*>(address) + guard, kStackBytes};
  if (::mprotect(stack.bottom, stack.bytes, PROT_READ | PROT_WRITE) != 0) {
    int cause = errno;
    ::munmap(address, guard + kStackBytes);
    throw systemError(cause, "mprotect of a fiber's stack")
        .remedy("Use fewer ranks or channels in one process, or raise vm.max_map_count");
  }
  return stack;
}

void unmapStack(const Stack& stack) {
  ::munmap(static_cast<std::byte*>(stack.bottom) - pageBytes(), pageBytes() + stack.bytes);
}

}  // namespace

StackPool::~StackPool() {
  for (const Stack& stack : free_) unmapStack(stack);
}

Stack StackPool::take() {
  // A new mapping each time under ThreadSanitizer: an old one's history would look like a race of
  // its former fiber with the next.
  if constexpr (!sanitizer::kThread) {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Stack stack = free_.back();
      free_.pop_back();
      sanitizer::unpoison(stack.bottom, stack.bytes);
      return stack;
    }
  }
  return mapStack();
}

void StackPool::giveBack(const Stack& stack) noexcept {
  if constexpr (!sanitizer::kThread) {
    std::lock_guard lock(mutex_);
    if (free_.size() < kMaxFree) {
      free_.push_back(stack);
      return;
    }
  }
  unmapStack(stack);
}

}  // namespace unisono::runtime::host
