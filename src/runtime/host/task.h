// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "runtime/host/schedule.h"

namespace unisono::runtime::host {

// The tasks that a group is split into: a worker, a waiter and a poster.
inline constexpr int kGroupRoles = 3;

// Whose work a task does, for reports. `name` must outlive the task.
struct TaskInfo {
  const char* name = "";
  int device = -1;
  int block = -1;
  int group = -1;
  int role = -1;  // of those that a group is split into; -1: not split
};

// What some tasks have done, in the form that the executor keeps it in; null where it keeps
// nothing.
using SyncPoint = std::shared_ptr<const void>;

// Makes an access by the machine's own instructions.
uint64_t performNow(const Access& access);

// The thread of execution that an executor runs: one group of one block, or the driver of a stream.
class HostTask {
 public:
  HostTask(const TaskInfo& info, uint64_t clock) : info_(info), clock_(clock) {}
  HostTask(const HostTask&) = delete;
  HostTask& operator=(const HostTask&) = delete;
  virtual ~HostTask() = default;

  // Called by the task itself.
  virtual void poll(const WaitReason& reason) = 0;
  virtual void progress() = 0;
  // Makes an access, or nothing for Kind::none; others may run first.
  virtual uint64_t access(const Access& access) = 0;
  virtual void notePlain(const void* address, size_t bytes, bool writes) = 0;
  // Sleeps until wake(), which may come first.
  virtual void suspend() = 0;

  // Order what this task has done so far before what another one does after it has observed `what`,
  // where the executor keeps account of that.
  virtual void publish(SyncPoint& what) = 0;
  virtual void observe(const SyncPoint& what) = 0;

  // Called by any task or thread, once for each suspend().
  virtual void wake() = 0;

  const TaskInfo& info() const { return info_; }
  uint64_t clock() const { return clock_; }
  void setClock(uint64_t nanoseconds) { clock_ = nanoseconds; }

  // The task that runs on the calling thread, or null.
  static HostTask* current() { return current_.load(std::memory_order_relaxed); }

 protected:
  static void setCurrent(HostTask* task) { current_.store(task, std::memory_order_relaxed); }

 private:
  // Atomic because a scheduler and its fibers, which ThreadSanitizer holds apart, share the thread.
  static thread_local constinit std::atomic<HostTask*> current_;

  TaskInfo info_;
  uint64_t clock_;
};

}  // namespace unisono::runtime::host
