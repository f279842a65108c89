// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "runtime/host/executor.h"
#include "runtime/host/wait_graph.h"

namespace unisono::runtime::host {

class ThreadExecutor;

// A task on an operating system's thread of its own.
class ThreadTask final : public HostTask {
 public:
  ThreadTask(ThreadExecutor& executor, TaskRequest request)
      : HostTask(request.info, request.clock), executor_(executor), request_(std::move(request)) {}

  void poll(const WaitReason& reason) override;
  void progress() override;
  uint64_t access(const Access& access) override { return performNow(access); }
  void notePlain(const void*, size_t, bool) override {}
  void publish(SyncPoint&) override {}
  void observe(const SyncPoint&) override {}
  void suspend() override;
  void wake() override;

 private:
  friend class ThreadExecutor;
  void makeCurrent() { setCurrent(this); }
  // Whether it waits for what none of the first `moves` moves has brought.
  bool waits(uint64_t moves);

  ThreadExecutor& executor_;
  TaskRequest request_;
  int looks_ = 0;                 // the thread's own
  uint64_t movesBeforeLook_ = 0;  // the thread's own

  std::mutex mutex_;
  std::condition_variable awake_;
  bool suspended_ = false;
  bool woken_ = false;
  uint64_t lookedAt_ = 0;  // moves before its last unsuccessful look
  WaitReason reason_;
  std::string stuck_;
};

// One thread per task: real races, for ThreadSanitizer. It is a deadlock when every task has looked
// without success since the last one moved, and for some time, since other threads may bring work.
class ThreadExecutor final : public Executor {
 public:
  // Waits for the tasks to end.
  ~ThreadExecutor() override;

  void spawn(TaskRequest request) override;
  void openGate() override { gates_++; }
  void closeGate() override { gates_--; }
  void runSomeSteps() override {}
  void setSchedule(const Schedule& schedule) override;
  uint64_t scheduleHash() const override { return 0; }
  void setDeadlockIsError(bool value) override { deadlockIsError_ = value; }

 private:
  friend class ThreadTask;
  void run(std::unique_ptr<ThreadTask> task);
  void moved();
  void lookForProgress();

  std::mutex mutex_;
  std::condition_variable ended_;
  std::set<ThreadTask*> tasks_;
  size_t running_ = 0;
  uint64_t seenMoves_ = 0;
  std::chrono::steady_clock::time_point seenAt_;
  bool reported_ = false;

  std::atomic<uint64_t> moves_{1};
  std::atomic<int> gates_{0};
  std::atomic<bool> deadlockIsError_{false};
};

}  // namespace unisono::runtime::host
