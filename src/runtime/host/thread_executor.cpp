// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/thread_executor.h"

#include <pthread.h>
#include <sched.h>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

namespace unisono::runtime::host {
namespace {

using namespace std::chrono_literals;

// Looks at a condition before the thread gives its core away, and before it sleeps between looks.
constexpr int kLooksBeforeYield = 16;
constexpr int kLooksBeforeNap = 400;
constexpr std::chrono::microseconds kNap = 50us;
// After so long without progress the executor ends the tasks.
constexpr std::chrono::seconds kDeadlockAfter = 2s;

}  // namespace

void ThreadTask::poll(const WaitReason& reason) {
  looks_++;
  if (looks_ <= kLooksBeforeYield) return;
  if (looks_ <= kLooksBeforeNap) {
    ::sched_yield();
    return;
  }
  // Others may wait for what this task did before it came here.
  if (looks_ == kLooksBeforeNap + 1) executor_.moved();
  {
    std::lock_guard lock(mutex_);
    reason_ = reason;
    lookedAt_ = movesBeforeLook_;
  }
  std::this_thread::sleep_for(kNap);
  executor_.lookForProgress();
  movesBeforeLook_ = executor_.moves_.load(std::memory_order_acquire);
  std::lock_guard lock(mutex_);
  if (!stuck_.empty()) throw Error(ErrorCode::internalError, stuck_);
}

void ThreadTask::progress() {
  if (looks_ == 0) return;
  looks_ = 0;
  executor_.moved();
}

void ThreadTask::suspend() {
  std::unique_lock lock(mutex_);
  suspended_ = true;
  awake_.wait(lock, [this] { return woken_; });
  suspended_ = woken_ = false;
}

void ThreadTask::wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  awake_.notify_one();
}

bool ThreadTask::waits(uint64_t moves) {
  std::lock_guard lock(mutex_);
  return suspended_ ? !woken_ : lookedAt_ == moves;
}

ThreadExecutor::~ThreadExecutor() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return running_ == 0; });
}

void ThreadExecutor::spawn(TaskRequest request) {
  auto task = std::make_unique<ThreadTask>(*this, std::move(request));
  {
    std::lock_guard lock(mutex_);
    tasks_.insert(task.get());
    running_++;
  }
  moved();
  auto body = [this, task = task.get()] { run(std::unique_ptr<ThreadTask>(task)); };
  try {
    startThread("unisono-task", body).detach();
  } catch (Error& error) {
    std::lock_guard lock(mutex_);
    tasks_.erase(task.get());
    running_--;
    throw std::move(error).remedy("Unset UNISONO_HOST_EXECUTOR: fibers need no thread each");
  }
  (void)task.release();  // run() owns it
}

void ThreadExecutor::run(std::unique_ptr<ThreadTask> task) {
  task->makeCurrent();
  task->request_.body();
  std::function<void()> afterEnd = std::move(task->request_.afterEnd);
  {
    std::lock_guard lock(mutex_);
    tasks_.erase(task.get());
  }
  task.reset();
  moved();
  if (afterEnd) afterEnd();
  afterEnd = nullptr;
  std::lock_guard lock(mutex_);
  if (--running_ == 0) ended_.notify_all();
}

void ThreadExecutor::setSchedule(const Schedule& schedule) {
  if (schedule.seed < 0) return;
  throw invalidUsage("The threads executor's schedule has no seed")
      .remedy("Set UNISONO_HOST_EXECUTOR=fibers");
}

void ThreadExecutor::moved() {
  moves_.fetch_add(1, std::memory_order_release);
}

void ThreadExecutor::lookForProgress() {
  std::lock_guard lock(mutex_);
  uint64_t moves = moves_.load(std::memory_order_relaxed);
  auto now = std::chrono::steady_clock::now();
  if (moves != seenMoves_) {
    seenMoves_ = moves;
    seenAt_ = now;
    reported_ = false;
    return;
  }
  bool isError = deadlockIsError_ && gates_ > 0;
  if (reported_ || now - seenAt_ < (isError ? kDeadlockAfter : kReportAfter)) return;
  // A thread that the machine has not let run for long is not stuck; nor is one at its end, which
  // may still wake others.
  if (running_ != tasks_.size()) return;
  for (ThreadTask* task : tasks_) {
    if (!task->waits(moves)) return;
  }
  std::vector<Waiter> waiters;
  for (ThreadTask* task : tasks_) {
    std::lock_guard taskLock(task->mutex_);
    if (!task->suspended_) waiters.push_back({task->info(), task->reason_});
  }
  reported_ = true;
  std::string text = describeWaits(waiters);
  if (!isError) {
    logWarn("No progress for {} s: {}", kReportAfter.count(), text);
    return;
  }
  for (ThreadTask* task : tasks_) {
    std::lock_guard taskLock(task->mutex_);
    if (!task->suspended_) task->stuck_ = text;
  }
}

std::unique_ptr<Executor> createThreadExecutor() {
  return std::make_unique<ThreadExecutor>();
}

}  // namespace unisono::runtime::host
