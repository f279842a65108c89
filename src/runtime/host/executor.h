// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
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

// After so long without progress executors report who waits for what.
inline constexpr std::chrono::seconds kReportAfter{10};

class Explorer;

// How a seeded schedule is chosen, and what its tasks see of memory.
struct Schedule {
  // The seed of every choice; negative: none, tasks run at once and in turn, and the rest of this
  // does not apply.
  int64_t seed = -1;

  // 0: a random walk. Else probabilistic concurrency testing (Burckhardt et al., 2010): tasks have
  // random priorities, the one with the highest runs, and at `depth` - 1 random ones of the first
  // `steps` steps the running task falls below all others. A run finds a bug that takes `depth`
  // ordering constraints with a probability of at least 1 / (tasks * steps^(depth - 1)).
  int depth = 0;
  uint64_t steps = 0;
  // If not null, it decides in place of the seed.
  Explorer* explorer = nullptr;

  enum class Memory {
    machine,     // what the processor does; on one thread that is sequential consistency
    sequential,  // the same, and plain accesses are checked for data races
    weak,        // the memory model of docs/proof.md
  };
  Memory memory = Memory::machine;
  // Runs every group as a worker, a waiter and a poster with barriers between them, as on a GPU.
  bool splitsGroups = false;
  // Tasks run on the thread that sets the schedule, whenever it waits, and not on a thread of the
  // executor: this saves two switches of threads for each wait, which take long on a busy machine.
  // No other thread may depend on a task while that one does not wait.
  bool onThisThread = false;

  // Whether the executor takes each access for a step of its own.
  bool isExact() const { return depth > 0 || explorer != nullptr || memory != Memory::machine; }
};

// What a schedule has come to since it was set.
struct ScheduleCounts {
  uint64_t tasks = 0;
  uint64_t steps = 0;
  uint64_t staleLoads = 0;
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
  // Whether tasks run only while the calling thread calls runUntil(), which returns when `done`.
  virtual bool runsHere() const { return false; }
  virtual void runUntil(const std::atomic<bool>& done) { static_cast<void>(done); }

  // Starts a schedule. Throws invalidUsage if tasks are alive, or if this executor's order cannot
  // be chosen.
  virtual void setSchedule(const Schedule& schedule) = 0;
  virtual Schedule schedule() const { return {}; }
  // A hash of every choice since the seed was set.
  virtual uint64_t scheduleHash() const = 0;

  // For exact schedules.
  virtual ScheduleCounts scheduleCounts() const { return {}; }
  // The last steps of each task of an exact schedule, in words.
  virtual std::string lastSteps() const { return {}; }
  // Lets reports call [address, address + bytes) by a name, which overrides keep.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual void nameMemory(const void* /*address*/, size_t /*bytes*/, std::string /*name*/) {}
  // Called by a task for memory that it is about to use for something else, or to free.
  virtual void forgetMemory(const void* address, size_t bytes) {
    static_cast<void>(address), static_cast<void>(bytes);
  }
  // How many tasks a group is run as.
  virtual int rolesPerGroup() const { return 1; }

  // Whether "nothing can move while a thread waits" is an error, reported by ending the stuck
  // tasks, or (the default) a reason to wait for other processes and threads.
  virtual void setDeadlockIsError(bool value) = 0;
};

std::unique_ptr<Executor> createFiberExecutor(const Schedule& schedule);
std::unique_ptr<Executor> createThreadExecutor();
// As settings.hostExecutor and settings.hostSeed say; throws invalidArgument.
std::unique_ptr<Executor> createExecutor(const Settings& settings);

// Opens when `count` arrivals have come. Tasks wait for it without polling.
class Latch {
 public:
  explicit Latch(uint32_t count) : count_(count) {}

  // By any task or thread. What was written before it is visible after wait().
  void arrive();
  // By a task.
  void wait();

 private:
  std::mutex mutex_;
  uint32_t count_;
  std::vector<HostTask*> waiting_;
  SyncPoint arrived_;
};

}  // namespace unisono::runtime::host
