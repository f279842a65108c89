#include "runtime/host/schedule.h"

#include <algorithm>
#include <thread>

#include "runtime/host/task.h"

namespace unisono::runtime::host {
namespace {

thread_local uint64_t threadClock = 0;

}  // namespace

thread_local constinit std::atomic<Task*> Task::current_{nullptr};

namespace detail {

constinit std::atomic<bool> seeded{false};

void schedulePointSlow() {
  if (Task* task = Task::current()) task->schedulePoint();
}

}  // namespace detail

void poll(const WaitReason& reason) {
  if (Task* task = Task::current()) {
    task->poll(reason);
  } else {
    std::this_thread::yield();
  }
}

void progress() {
  if (Task* task = Task::current()) task->progress();
}

uint64_t virtualClock() {
  Task* task = Task::current();
  return task != nullptr ? task->clock() : threadClock;
}

void raiseVirtualClock(uint64_t to) {
  if (Task* task = Task::current()) {
    task->setClock(std::max(task->clock(), to));
  } else {
    threadClock = std::max(threadClock, to);
  }
}

void advanceVirtualClock(uint64_t nanoseconds) {
  raiseVirtualClock(virtualClock() + nanoseconds);
}

}  // namespace unisono::runtime::host
