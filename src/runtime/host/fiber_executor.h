#pragma once

#include <boost/context/detail/fcontext.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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
// a thread, but ThreadSanitizer orders only the way from the fiber to the scheduler.
class FiberTask final : public Task {
 public:
  FiberTask(FiberExecutor& executor, TaskRequest request);
  ~FiberTask() override;

  void poll(const WaitReason& reason) override;
  void progress() override { worked_ = true; }
  void schedulePoint() override;
  void suspend() override;
  void wake() override;

 private:
  friend class FiberExecutor;
  enum class Left { polling, yielding, suspended, ended };

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

  std::atomic<const std::string*> stuck_{nullptr};
};

// All tasks as fibers of one thread.
//
// Stuck is: every task that is neither suspended nor ended has looked at its condition in vain
// since any task last did something else.
class FiberExecutor final : public Executor {
 public:
  explicit FiberExecutor(int64_t seed);
  // Waits for the tasks to end.
  ~FiberExecutor() override;

  void spawn(TaskRequest request) override;
  void openGate() override;
  void closeGate() override;
  void runSomeSteps() override;
  void setSeed(int64_t seed) override;
  uint64_t scheduleHash() const override { return hash_.load(std::memory_order_acquire); }
  void setDeadlockIsError(bool value) override { deadlockIsError_ = value; }

 private:
  friend class FiberTask;
  using Clock = std::chrono::steady_clock;

  void run();
  void drainInbox();
  void put(FiberTask* task);
  bool mayRun() const;
  void sleep(std::chrono::microseconds atMost);
  size_t choose();
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

  // The scheduler's.
  std::vector<FiberTask*> ready_;
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

  // Of the engine's thread; set before the constructor returns.
  void* tsanScheduler_ = nullptr;
  const void* engineStack_ = nullptr;
  size_t engineStackBytes_ = 0;
  std::thread engine_;
};

}  // namespace unisono::runtime::host
