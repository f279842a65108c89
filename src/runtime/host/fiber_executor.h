// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/context/detail/fcontext.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/host/exact_schedule.h"
#include "runtime/host/executor.h"
#include "runtime/host/stack_pool.h"
#include "runtime/host/wait_graph.h"

namespace unisono::runtime::host {

class FiberExecutor;

// What the C++ runtime keeps for each thread about exceptions in flight (Itanium C++ ABI, section
// 2.2.2). Each fiber has its own, since it may poll inside a handler or a destructor.
struct ExceptionState {
  void* caught = nullptr;
  unsigned int uncaught = 0;
};

// A task on a stack of its own. Who writes which member matters: the scheduler and the fiber share
// a thread, but ThreadSanitizer orders only the switch from the fiber to the scheduler.
class FiberTask final : public HostTask {
 public:
  FiberTask(FiberExecutor& executor, TaskRequest request);
  ~FiberTask() override;

  void poll(const WaitReason& reason) override;
  void progress() override;
  uint64_t access(const Access& access) override;
  void notePlain(const void* address, size_t bytes, bool writes) override;
  void publish(SyncPoint& what) override;
  void observe(const SyncPoint& what) override;
  void suspend() override;
  void wake() override;

 private:
  friend class FiberExecutor;
  enum class Left { polling, yielding, suspended, ended };

  void walkPoint();
  static void enter(boost::context::detail::transfer_t from);
  void switchToScheduler(Left how);

  FiberExecutor& executor_;
  TaskRequest request_;
  Stack stack_;
  void* tsanFiber_;

  // Written by the fiber.
  boost::context::detail::fcontext_t scheduler_ = nullptr;
  void* fakeStack_ = nullptr;
  Left left_ = Left::yielding;
  WaitReason reason_;
  // Something other than looking has been done since the last poll. A switch at a schedule point
  // alone is not: a look may hold one.
  bool worked_ = true;

  // Written by the scheduler.
  boost::context::detail::fcontext_t context_;
  uint64_t number_ = 0;
  uint64_t round_ = 0;      // the last round in which it looked
  bool looksAnew_ = false;  // it has polled since it was last resumed
  uint64_t lookRound_ = 0;  // the round in which its latest look began
  ExceptionState exceptions_;
  ExactSchedule::TaskState* exact_ = nullptr;
  bool isRoot_;       // no task started it
  SyncPoint before_;  // what had happened when it was started

  std::atomic<const std::string*> stuck_{nullptr};
};

// All tasks as fibers of one thread.
//
// Deadlock: every task that is neither suspended nor ended has polled its condition unsuccessfully
// since any task last made progress.
class FiberExecutor final : public Executor {
 public:
  explicit FiberExecutor(const Schedule& schedule);
  // Waits for the tasks to end.
  ~FiberExecutor() override;

  void spawn(TaskRequest request) override;
  void openGate() override;
  void closeGate() override;
  void runSomeSteps() override;
  bool runsHere() const override;
  void runUntil(const std::atomic<bool>& done) override;
  void setSchedule(const Schedule& schedule) override;
  Schedule schedule() const override { return schedule_; }
  ScheduleCounts scheduleCounts() const override;
  std::string lastSteps() const override;
  void nameMemory(const void* address, size_t bytes, std::string name) override;
  void forgetMemory(const void* address, size_t bytes) override;
  int rolesPerGroup() const override { return schedule_.splitsGroups ? kGroupRoles : 1; }
  uint64_t scheduleHash() const override { return hash_.load(std::memory_order_acquire); }
  void setDeadlockIsError(bool value) override { deadlockIsError_ = value; }

 private:
  friend class FiberTask;
  using Clock = std::chrono::steady_clock;

  void run();
  void rest();
  void becomeScheduler();
  bool runStep();
  void drainInbox();
  void put(FiberTask* task);
  bool mayRun() const;
  void sleep(std::chrono::microseconds atMost);
  std::optional<size_t> choose();
  std::optional<size_t> chooseExactly();
  void failAll(const std::string& text);
  void resume(FiberTask& task);
  void account(size_t index);
  void removeReady(size_t index);
  void allPoll();
  std::vector<Waiter> pollingTasks() const;
  void endStep();

  // Shared with other threads.
  std::mutex mutex_;
  std::condition_variable wakeUp_;
  std::condition_variable stepsDone_;
  std::vector<FiberTask*> inbox_;  // to be made ready
  std::atomic<bool> inboxFilled_{false};
  bool sleeping_ = false;
  std::atomic<bool> onCaller_{false};  // the engine's thread rests, caller_ takes its place
  std::thread::id caller_;
  bool resting_ = false;
  std::atomic<int> gates_{0};
  std::atomic<int> steps_{0};
  std::atomic<size_t> alive_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> seeded_{false};
  std::atomic<bool> deadlockIsError_{false};
  std::atomic<uint64_t> hash_{0};
  std::atomic<uint64_t> pointState_{0};  // random state of schedule points, used by fibers
  std::atomic<uint32_t> pointsToSwitch_{0};
  StackPool stacks_;
  Schedule schedule_;
  // Of exact schedules; else null. Used by the engine's thread while tasks run.
  std::unique_ptr<ExactSchedule> exact_;
  MemoryNames names_;
  WeakMemory memory_;

  // The scheduler's.
  std::vector<FiberTask*> ready_;
  std::vector<size_t> enabled_;  // those of ready_ that are not blocked
  std::vector<ExactSchedule::TaskState*> enabledStates_;
  size_t next_ = 0;
  uint64_t random_ = 0;
  uint64_t spawned_ = 0;
  uint64_t round_ = 1;
  size_t looked_ = 0;  // tasks that have looked in this round
  int idleRounds_ = 0;
  Clock::time_point idleSince_;
  bool reported_ = false;
  std::deque<std::string> deadlocks_;  // texts that tasks refer to
  void* schedulerFakeStack_ = nullptr;

  // Of the thread that schedules.
  void* tsanScheduler_ = nullptr;
  const void* engineStack_ = nullptr;
  size_t engineStackBytes_ = 0;
  std::thread engine_;
};

}  // namespace unisono::runtime::host
