#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/settings.h"
#include "runtime/host/task.h"

namespace unisono::runtime::host {

struct TaskRequest {
  TaskInfo info;
  uint64_t clock = 0;          // where the task's virtual clock starts
  std::function<void()> body;  // must not throw
  // Runs when nothing of the task is left, outside of any task; may be empty; must not throw.
  std::function<void()> afterEnd;
};

// Runs tasks that may wait on each other: every task that was spawned makes progress, however many
// there are. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  virtual void spawn(TaskRequest request) = 0;

  // While a thread waits for tasks it holds the gate open. A seeded schedule runs only then, so
  // that what a single thread enqueued before it waits replays exactly.
  virtual void openGate() = 0;
  virtual void closeGate() = 0;
  // For a thread that looks but does not wait: where tasks run only while the gate is open, runs a
  // fixed number of steps before it returns.
  virtual void runSomeSteps() = 0;

  // Restarts the schedule from `seed`; negative: no seed, tasks run at once and in turn. Throws
  // invalidUsage if tasks are alive, or if this executor's order cannot be chosen.
  virtual void setSeed(int64_t seed) = 0;
  // A hash of every choice since the seed was set.
  virtual uint64_t scheduleHash() const = 0;

  // Whether "nothing can move while a thread waits" is an error, reported by ending the stuck
  // tasks, or (the default) a reason to wait for other processes and threads.
  virtual void setDeadlockIsError(bool value) = 0;
};

std::unique_ptr<Executor> createFiberExecutor(int64_t seed);
std::unique_ptr<Executor> createThreadExecutor();
// As settings.hostExecutor and settings.hostSeed say; throws invalidArgument.
std::unique_ptr<Executor> createExecutor(const Settings& settings);

// Opens when `count` arrivals have come. Tasks wait for it without polling.
class Latch {
 public:
  explicit Latch(uint32_t count) : count_(count) {}

  // By any task or thread. What was written before it is visible behind wait().
  void arrive();
  // By a task.
  void wait();

 private:
  std::mutex mutex_;
  uint32_t count_;
  std::vector<Task*> waiting_;
};

}  // namespace unisono::runtime::host
