// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/fiber_executor.h"

#include <pthread.h>
#include <sched.h>

#include <cxxabi.h>

#include "base/error.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "runtime/host/sanitizer.h"

namespace unisono::runtime::host {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;
using namespace std::chrono_literals;

// A schedule point switches once in about this many.
constexpr uint32_t kPointsPerSwitch = 32;
// Rounds in which nothing moved before the engine sleeps, and for how long it then sleeps at most:
// what it waits for comes from another process or thread.
constexpr int kRoundsBeforeNap = 50;
constexpr std::chrono::microseconds kShortNap = 50us;
constexpr std::chrono::microseconds kLongNap = 200us;
// Looks for new work before the engine sleeps: launches often follow each other closely.
constexpr int kLooksForWork = 40;
constexpr int kStepsOfQuery = 1000;

ExceptionState& exceptionState() {
  return *reinterpret_cast<ExceptionState*>(abi::__cxa_get_globals());
}

}  // namespace

FiberTask::FiberTask(FiberExecutor& executor, TaskRequest request)
    : HostTask(request.info, request.clock),
      executor_(executor),
      request_(std::move(request)),
      stack_(executor.stacks_.take()),
      tsanFiber_(sanitizer::createFiber()),
      context_(make_fcontext(static_cast<std::byte*>(stack_.bottom) + stack_.bytes, stack_.bytes,
                             &FiberTask::enter)) {}

FiberTask::~FiberTask() {
  sanitizer::destroyFiber(tsanFiber_);
  executor_.stacks_.giveBack(stack_);
}

void FiberTask::enter(transfer_t from) {
  auto* self = static_cast<FiberTask*>(HostTask::current());
  sanitizer::finishSwitch(nullptr, nullptr, nullptr);
  sanitizer::acquire(self);
  self->scheduler_ = from.fctx;
  self->request_.body();
  self->switchToScheduler(Left::ended);
}

void FiberTask::switchToScheduler(Left how) {
  left_ = how;
  sanitizer::startSwitch(how == Left::ended ? nullptr : &fakeStack_, executor_.engineStack_,
                         executor_.engineStackBytes_);
  // Read before ThreadSanitizer takes what follows for the scheduler's.
  fcontext_t scheduler = scheduler_;
  sanitizer::switchFiber(executor_.tsanScheduler_, sanitizer::Order::currentBeforeTarget);
  transfer_t from = jump_fcontext(scheduler, nullptr);
  sanitizer::finishSwitch(fakeStack_, nullptr, nullptr);
  scheduler_ = from.fctx;
}

void FiberTask::poll(const WaitReason& reason) {
  reason_ = reason;
  switchToScheduler(Left::polling);
  worked_ = false;
  if (const std::string* text = stuck_.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::internalError, *text);
  }
}

void FiberTask::progress() {
  worked_ = true;
  if (exact_ != nullptr) executor_.exact_->progressed(*exact_);
}

uint64_t FiberTask::access(const Access& access) {
  if (exact_ == nullptr) {
    walkPoint();
    return access.kind == Access::Kind::none ? 0 : performNow(access);
  }
  sanitizer::IgnoreScope ignore;
  if (executor_.exact_->givesWay(*exact_, access) || executor_.inboxFilled_) {
    switchToScheduler(Left::yielding);
  }
  try {
    return executor_.exact_->perform(*exact_, access);
  } catch (const Error& error) {
    executor_.failAll(error.what());
    throw;
  }
}

void FiberTask::notePlain(const void* address, size_t bytes, bool writes) {
  if (exact_ == nullptr) return;
  sanitizer::IgnoreScope ignore;
  try {
    executor_.exact_->notePlain(*exact_, address, bytes, writes);
  } catch (const Error& error) {
    executor_.failAll(error.what());
    throw;
  }
}

void FiberTask::publish(SyncPoint& what) {
  if (exact_ != nullptr) what = executor_.exact_->published(*exact_, what);
}

void FiberTask::observe(const SyncPoint& what) {
  if (exact_ != nullptr) executor_.exact_->observed(*exact_, what);
}

// A seeded walk that is not exact: switches now and then.
void FiberTask::walkPoint() {
  uint32_t left = executor_.pointsToSwitch_.load(std::memory_order_relaxed);
  if (left > 0) {
    executor_.pointsToSwitch_.store(left - 1, std::memory_order_relaxed);
    return;
  }
  uint64_t state = executor_.pointState_.load(std::memory_order_relaxed);
  uint64_t drawn = splitMix64(state);
  executor_.pointState_.store(state, std::memory_order_relaxed);
  executor_.pointsToSwitch_.store(drawn % (2 * kPointsPerSwitch), std::memory_order_relaxed);
  switchToScheduler(Left::yielding);
}

void FiberTask::suspend() {
  worked_ = true;
  switchToScheduler(Left::suspended);
}

void FiberTask::wake() {
  executor_.put(this);
}

FiberExecutor::FiberExecutor(const Schedule& schedule) {
  setSchedule(schedule);
  bool started = false;
  std::unique_lock lock(mutex_);
  engine_ = startThread("unisono-fibers", [this, &started] {
    {
      std::lock_guard inner(mutex_);
      becomeScheduler();
      started = true;
      stepsDone_.notify_all();
    }
    run();
  });
  stepsDone_.wait(lock, [&] { return started; });
}

FiberExecutor::~FiberExecutor() {
  {
    std::lock_guard lock(mutex_);
    gates_++;
    stop_ = true;
    onCaller_ = false;
    wakeUp_.notify_all();
    stepsDone_.notify_all();
  }
  engine_.join();
  if (seeded_) detail::seeded = false;
}

void FiberExecutor::spawn(TaskRequest request) {
  auto* task = new FiberTask(*this, std::move(request));
  auto* starter = static_cast<FiberTask*>(HostTask::current());
  task->isRoot_ = starter == nullptr;
  if (starter != nullptr) starter->publish(task->before_);
  alive_++;
  sanitizer::release(task);
  put(task);
}

void FiberExecutor::put(FiberTask* task) {
  sanitizer::IgnoreScope ignore;
  std::lock_guard lock(mutex_);
  inbox_.push_back(task);
  inboxFilled_.store(true, std::memory_order_relaxed);
  if (sleeping_) wakeUp_.notify_one();
}

void FiberExecutor::openGate() {
  std::lock_guard lock(mutex_);
  gates_++;
  wakeUp_.notify_one();
}

void FiberExecutor::closeGate() {
  gates_--;
}

void FiberExecutor::runSomeSteps() {
  if (!seeded_) return;
  if (runsHere()) {
    steps_ = kStepsOfQuery;
    while (steps_ > 0 && runStep()) {
    }
    steps_ = 0;
    return;
  }
  std::unique_lock lock(mutex_);
  steps_ = kStepsOfQuery;
  wakeUp_.notify_one();
  stepsDone_.wait(lock, [&] { return steps_ == 0; });
}

bool FiberExecutor::runsHere() const {
  return onCaller_ && caller_ == std::this_thread::get_id();
}

void FiberExecutor::runUntil(const std::atomic<bool>& done) {
  while (!done.load(std::memory_order_acquire)) {
    if (!runStep()) sleep(0us);
  }
}

// The engine's thread leaves the tasks to caller_.
void FiberExecutor::rest() {
  std::unique_lock lock(mutex_);
  resting_ = true;
  stepsDone_.notify_all();
  stepsDone_.wait(lock, [this] { return !onCaller_; });
  resting_ = false;
  becomeScheduler();
}

void FiberExecutor::becomeScheduler() {
  tsanScheduler_ = sanitizer::currentFiber();
  pthread_attr_t attributes;
  void* bottom = nullptr;
  if (::pthread_getattr_np(::pthread_self(), &attributes) == 0) {
    ::pthread_attr_getstack(&attributes, &bottom, &engineStackBytes_);
    ::pthread_attr_destroy(&attributes);
    engineStack_ = bottom;
  }
}

void FiberExecutor::setSchedule(const Schedule& schedule) {
  const int64_t seed = schedule.seed;
  std::unique_lock lock(mutex_);
  if (size_t alive = alive_; alive > 0) {
    throw invalidUsage("The seed of the schedule cannot change while {} tasks run", alive)
        .remedy("Synchronize every stream first");
  }
  random_ = static_cast<uint64_t>(seed);
  pointState_ = mix64(random_ + 1);
  pointsToSwitch_ = 0;
  // ThreadSanitizer holds fibers apart from the engine's thread only.
  const bool onCaller = schedule.onThisThread && seed >= 0 && !sanitizer::kThread;
  const auto caller = std::this_thread::get_id();
  if (onCaller && !(onCaller_ && caller_ == caller)) {
    onCaller_ = true;
    caller_ = caller;
    wakeUp_.notify_all();
    stepsDone_.wait(lock, [this] { return resting_; });
    becomeScheduler();
  } else if (!onCaller && onCaller_) {
    onCaller_ = false;
    stepsDone_.notify_all();
  }
  hash_ = random_;
  spawned_ = 0;
  next_ = 0;
  schedule_ = schedule;
  exact_ = seed >= 0 && schedule.isExact()
               ? std::make_unique<ExactSchedule>(schedule, names_, memory_)
               : nullptr;
  seeded_ = seed >= 0;
  detail::seeded = seed >= 0;
}

ScheduleCounts FiberExecutor::scheduleCounts() const {
  return exact_ != nullptr ? exact_->counts() : ScheduleCounts{};
}

std::string FiberExecutor::lastSteps() const {
  return exact_ != nullptr ? exact_->lastSteps() : std::string();
}

void FiberExecutor::forgetMemory(const void* address, size_t bytes) {
  if (exact_ != nullptr) exact_->forgetMemory(address, bytes);
}

void FiberExecutor::nameMemory(const void* address, size_t bytes, std::string name) {
  std::lock_guard lock(mutex_);
  names_.add(address, bytes, std::move(name));
}

bool FiberExecutor::mayRun() const {
  return !seeded_ || gates_ > 0 || steps_ > 0;
}

void FiberExecutor::run() {
  while (true) {
    if (onCaller_) rest();
    if (runStep()) continue;
    if (stop_ && alive_ == 0) return;
    for (int i = 0; i < kLooksForWork && !inboxFilled_ && !(mayRun() && !ready_.empty()); i++) {
      ::sched_yield();
    }
    sleep(0us);
  }
}

// Lets a task run until it leaves; false if there is none that may.
bool FiberExecutor::runStep() {
  // Read before the inbox: a gate is opened after the tasks that it lets run, and a seed replays
  // only if all of them can be chosen.
  const bool running = mayRun();
  if (inboxFilled_.load(std::memory_order_relaxed)) drainInbox();
  if (ready_.empty() || !running) return false;
  const std::optional<size_t> index = choose();
  if (!index) {
    allPoll();
    return true;
  }
  resume(*ready_[*index]);
  account(*index);
  if (steps_ > 0) endStep();
  return true;
}

void FiberExecutor::sleep(std::chrono::microseconds atMost) {
  std::unique_lock lock(mutex_);
  auto wanted = [this] {
    return !inbox_.empty() || (!ready_.empty() && mayRun()) || steps_ > 0 ||
           (stop_ && alive_ == 0) || (onCaller_ && !runsHere());
  };
  if (ready_.empty() && inbox_.empty() && steps_ > 0) {
    steps_ = 0;
    stepsDone_.notify_all();
  }
  sleeping_ = true;
  if (atMost > 0us) {
    // Ready tasks all poll: only a new task or the time is news.
    wakeUp_.wait_for(lock, atMost, [this] { return !inbox_.empty(); });
  } else {
    wakeUp_.wait(lock, wanted);
  }
  sleeping_ = false;
}

void FiberExecutor::endStep() {
  if (--steps_ > 0) return;
  std::lock_guard lock(mutex_);
  stepsDone_.notify_all();
}

void FiberExecutor::drainInbox() {
  std::vector<FiberTask*> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(inbox_);
    inboxFilled_.store(false, std::memory_order_relaxed);
  }
  for (FiberTask* task : tasks) {
    sanitizer::acquire(task);
    if (task->number_ == 0) {
      task->number_ = ++spawned_;
      if (exact_ != nullptr) {
        task->exact_ = &exact_->add(task->info(), task->number_, task->before_);
      }
    }
    ready_.push_back(task);
  }
  round_++;
  looked_ = 0;
  idleRounds_ = 0;
}

// Empty: every task that an exact schedule has waits for another.
std::optional<size_t> FiberExecutor::choose() {
  size_t index;
  if (seeded_.load(std::memory_order_relaxed)) {
    if (exact_ == nullptr) {
      index = splitMix64(random_) % ready_.size();
    } else if (const auto chosen = chooseExactly()) {
      index = *chosen;
    } else {
      return std::nullopt;
    }
    uint64_t hash = hash_.load(std::memory_order_relaxed);
    hash_.store(mix64(hash ^ ready_[index]->number_), std::memory_order_release);
  } else {
    if (next_ >= ready_.size()) next_ = 0;
    index = next_;
  }
  return index;
}

std::optional<size_t> FiberExecutor::chooseExactly() {
  enabled_.clear();
  enabledStates_.clear();
  for (size_t i = 0; i < ready_.size(); i++) {
    if (ready_[i]->exact_->blocked) continue;
    enabled_.push_back(i);
    enabledStates_.push_back(ready_[i]->exact_);
  }
  if (enabled_.empty()) return std::nullopt;
  return enabled_[exact_->choose(enabledStates_)];
}

// Ends every task that polls, now or later, with an error.
void FiberExecutor::failAll(const std::string& text) {
  const std::string& kept = deadlocks_.emplace_back(text);
  for (FiberTask* task : ready_) {
    task->stuck_.store(&kept, std::memory_order_release);
    if (task->exact_ != nullptr) task->exact_->blocked = false;
  }
}

void FiberExecutor::resume(FiberTask& task) {
  ExceptionState& state = exceptionState();
  ExceptionState mine = state;
  state = task.exceptions_;
  if (task.looksAnew_) {
    task.looksAnew_ = false;
    task.lookRound_ = round_;
  }
  FiberTask::setCurrent(&task);
  sanitizer::startSwitch(&schedulerFakeStack_, task.stack_.bottom, task.stack_.bytes);
  // Read before ThreadSanitizer takes what follows for the fiber's.
  fcontext_t context = task.context_;
  sanitizer::switchFiber(task.tsanFiber_, sanitizer::Order::none);
  context = jump_fcontext(context, nullptr).fctx;
  task.context_ = context;
  sanitizer::finishSwitch(schedulerFakeStack_, nullptr, nullptr);
  FiberTask::setCurrent(nullptr);
  task.exceptions_ = state;
  state = mine;
}

void FiberExecutor::removeReady(size_t index) {
  ready_[index] = ready_.back();
  ready_.pop_back();
}

void FiberExecutor::account(size_t index) {
  FiberTask* task = ready_[index];
  FiberTask::Left left;
  bool worked;
  {
    sanitizer::IgnoreScope ignore;
    left = task->left_;
    worked = task->worked_;
  }
  const bool stays = left == FiberTask::Left::polling || left == FiberTask::Left::yielding;
  if (!stays || worked) {
    round_++;
    looked_ = 0;
    idleRounds_ = 0;
  }
  switch (left) {
    case FiberTask::Left::ended: {
      removeReady(index);
      if (task->exact_ != nullptr) exact_->end(*task->exact_, task->isRoot_);
      std::function<void()> afterEnd = std::move(task->request_.afterEnd);
      delete task;
      alive_--;
      if (alive_ == 0) deadlocks_.clear();
      if (afterEnd) afterEnd();
      break;
    }
    case FiberTask::Left::suspended:
      removeReady(index);
      break;
    case FiberTask::Left::yielding:
      next_ = index + 1;
      break;
    case FiberTask::Left::polling: {
      next_ = index + 1;
      if (task->exact_ != nullptr) {
        if (task->stuck_.load(std::memory_order_relaxed) == nullptr) exact_->polled(*task->exact_);
        break;
      }
      // A look that was interrupted at a schedule point is older than what others have done since.
      task->looksAnew_ = true;
      if (task->lookRound_ != round_ || task->round_ == round_) break;
      task->round_ = round_;
      if (++looked_ == ready_.size()) allPoll();
      break;
    }
  }
}

void FiberExecutor::allPoll() {
  round_++;
  looked_ = 0;
  if (inboxFilled_.load(std::memory_order_relaxed)) return;
  if (deadlockIsError_ && gates_ > 0) {
    std::string text = describeWaits(pollingTasks());
    if (exact_ != nullptr) {
      text += ". The last steps of each task:\n" + exact_->lastSteps();
    }
    failAll(text);
    return;
  }
  // They may wait for a thread that is not a task.
  for (FiberTask* task : ready_) {
    if (task->exact_ != nullptr) task->exact_->blocked = false;
  }
  if (idleRounds_++ == 0) {
    idleSince_ = Clock::now();
    reported_ = false;
  }
  if (idleRounds_ <= kRoundsBeforeNap) {
    ::sched_yield();
    return;
  }
  sleep(idleRounds_ <= 2 * kRoundsBeforeNap ? kShortNap : kLongNap);
  if (!reported_ && Clock::now() - idleSince_ >= kReportAfter) {
    reported_ = true;
    logWarn("No progress for {} s: {}", kReportAfter.count(), describeWaits(pollingTasks()));
  }
}

std::vector<Waiter> FiberExecutor::pollingTasks() const {
  sanitizer::IgnoreScope ignore;
  std::vector<Waiter> waiters;
  waiters.reserve(ready_.size());
  for (const FiberTask* task : ready_) waiters.push_back({task->info(), task->reason_});
  return waiters;
}

std::unique_ptr<Executor> createFiberExecutor(const Schedule& schedule) {
  return std::make_unique<FiberExecutor>(schedule);
}

}  // namespace unisono::runtime::host
