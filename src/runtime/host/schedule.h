#pragma once

#include <atomic>
#include <cstdint>

// What device code on the host, and nothing else, calls to share the machine with the other tasks
// (groups of blocks) of the process. All of it may be called from a thread that is no task, too:
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

namespace detail {
extern constinit std::atomic<bool> seeded;
void schedulePointSlow();
}  // namespace detail

// A place where a seeded schedule may switch to another task (now and then); one load otherwise.
inline void schedulePoint() {
  if (detail::seeded.load(std::memory_order_relaxed)) [[unlikely]]
    detail::schedulePointSlow();
}

// The task's virtual clock, in nanoseconds. A launch starts at the clock of its stream and the
// stream continues at the latest clock of the launch's tasks.
uint64_t virtualClock();
void advanceVirtualClock(uint64_t nanoseconds);
void raiseVirtualClock(uint64_t to);  // to the later of the two

}  // namespace unisono::runtime::host
