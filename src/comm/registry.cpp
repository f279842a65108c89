// SPDX-License-Identifier: Apache-2.0
#include "comm/registry.h"

#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <shared_mutex>
#include <thread>
#include <unordered_map>

#include "base/fork.h"
#include "base/log.h"
#include "comm/reaper.h"

namespace unisono::comm {

namespace {

// A launch takes microseconds unless the queue of the stream is full.
constexpr std::chrono::milliseconds kLongestLaunch{50};

}  // namespace

void Handle::initialize(const InitFunction& init) {
  std::shared_ptr<Communicator> made;
  try {
    made = init(health_);
  } catch (const std::exception& error) {
    fail(asError(error));
  }
  const std::lock_guard lock(mutex_);
  communicator_ = std::move(made);
  initializing_ = false;
}

void Handle::initAsync(InitFunction init) {
  try {
    setBackground(Background::start(
        "unisono-init",
        [self = shared_from_this(), init = std::move(init)] { self->initialize(init); }));
  } catch (const Error& error) {
    initialize([&](const auto&) -> std::shared_ptr<Communicator> { throw error; });
  }
}

void Handle::setBackground(std::shared_ptr<Background> operation) {
  const std::lock_guard lock(mutex_);
  background_ = std::move(operation);
}

bool Handle::inProgress() const {
  return initializing_ || (background_ != nullptr && !background_->done());
}

ErrorCode Handle::state() const {
  const std::lock_guard lock(mutex_);
  if (inProgress()) return ErrorCode::inProgress;
  if (stopped_ || !health_->hasFailed()) return ErrorCode::success;
  return health_->error()->code();
}

const std::shared_ptr<Communicator>& Handle::working(const std::lock_guard<std::mutex>&) const {
  if (inProgress()) {
    throw invalidArgument("An earlier operation on the communicator is still in progress")
        .remedy(
            "Wait until ncclCommGetAsyncError no longer reports ncclInProgress (or, for a "
            "communicator that is initialized in a group, until ncclGroupEnd)");
  }
  if (health_->hasFailed()) throw *health_->error();
  return communicator_;
}

std::shared_ptr<Communicator> Handle::communicator() const {
  const std::lock_guard lock(mutex_);
  return working(lock);
}

std::shared_ptr<Communicator> Handle::getActive() const {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Communicator>& made = working(lock);
  if (stopped_) {
    throw invalidUsage("The communicator was revoked, or shrunk with NCCL_SHRINK_ABORT")
        .remedy("Make another communicator from it with ncclCommShrink, and destroy it");
  }
  if (finalized_) {
    throw invalidUsage("The communicator was finalized")
        .remedy("Make all calls before ncclCommFinalize, and only ncclCommDestroy after it");
  }
  if (suspended_) {
    throw invalidUsage("The communicator is suspended").remedy("Call ncclCommResume on all ranks");
  }
  return made;
}

bool Handle::isSuspended() const {
  const std::lock_guard lock(mutex_);
  return suspended_;
}

std::shared_ptr<Turns::Turn> Handle::beginSuspend(bool suspends) {
  const std::shared_ptr<Communicator> made = suspends ? getActive() : communicator();
  const std::lock_guard lock(mutex_);
  if (!suspends && !suspended_) {
    throw invalidUsage("The communicator is not suspended")
        .remedy("Call ncclCommSuspend on all ranks before ncclCommResume");
  }
  return made->turns().announce();
}

std::shared_ptr<Turns::Turn> Handle::beginRegister() {
  return getActive()->turns().announce();
}

std::shared_ptr<Communicator> Handle::awaitTurn(Turns::Turn& turn) {
  std::shared_ptr<Communicator> made;
  {
    const std::lock_guard lock(mutex_);
    made = communicator_;
  }
  if (!turn.await([&] { return health_->signal().raised(); })) {
    throw invalidUsage("The communicator was aborted or revoked")
        .rank(made->rank())
        .remedy("Make another communicator");
  }
  return made;
}

std::shared_ptr<const plan::SymmetricWindow> Handle::finishRegister(void* address, uint64_t bytes,
                                                                    bool isSymmetric,
                                                                    Turns::Turn& turn) {
  const std::shared_ptr<Communicator> made = awaitTurn(turn);
  const Turns::Turn::End end{turn};
  return made->registerTogether(address, bytes, isSymmetric);
}

void Handle::finishSuspend(bool suspends, Turns::Turn& turn) {
  const std::shared_ptr<Communicator> made = awaitTurn(turn);
  const Turns::Turn::End end{turn};
  logInfo("{}: {}", made->description(), suspends ? "suspend" : "resume");
  if (suspends) made->prepareToSuspend();
  try {
    suspends ? made->suspend() : made->resume();
  } catch (const std::exception& error) {
    throw fail(asError(error));
  }
  const std::lock_guard lock(mutex_);
  suspended_ = suspends;
}

std::shared_ptr<Communicator> Handle::getParent(bool evenIfFailed) const {
  {
    const std::lock_guard lock(mutex_);
    const bool isMade = communicator_ != nullptr && !initializing_ && !finalized_;
    if (isMade && (stopped_ || (evenIfFailed && health_->hasFailed()))) return communicator_;
  }
  return getActive();
}

void Handle::stop(bool again) {
  // Kernels end in a millisecond or so. What is stuck on a stream after work of others is kept from
  // starting.
  constexpr std::chrono::seconds kPatience{10};
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Communicator> made = communicator_;
  if (made == nullptr) throw invalidUsage("The communicator is not initialized");
  if (suspended_) throw invalidUsage("The communicator is suspended");
  if (finalized_ || (stopped_ && !again)) {
    throw invalidArgument("The communicator was {} before", stopped_ ? "revoked" : "finalized")
        .remedy("Destroy it");
  }
  if (std::exchange(stopped_, true)) return;
  lock.unlock();
  logInfo("{}: stopped", made->description());
  health_->raise();
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto isBusy = [&] {
    lock.lock();
    const bool busy = !isIdle(lock);
    lock.unlock();
    return busy;
  };
  while (isBusy() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  health_->signal().resumeWaits();
}

void Handle::launch(Communicator::Prepared& prepared) {
  std::unique_lock lock(mutex_);
  if (health_->hasFailed()) throw *health_->error();
  launching_ = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    communicator_->launch(prepared);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  launching_ = false;
  launched_.notify_all();
  if (failure) std::rethrow_exception(failure);
}

bool Handle::finalize() {
  auto made = communicator();
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(finalized_, true)) {
      throw invalidArgument("The communicator was finalized before")
          .remedy("Call ncclCommFinalize once, then ncclCommDestroy");
    }
  }
  logInfo("{}: finalize", made->description());
  made->noteFinalize();
  if (blocking_) {
    made->finish();
    communicator();  // throws if an abort ended the wait
    return true;
  }
  setBackground(
      Background::start("unisono-finish", [self = shared_from_this(), made = std::move(made)] {
        try {
          made->finish();
        } catch (const std::exception& error) {
          self->fail(asError(error));
        }
      }));
  return false;
}

Error Handle::fail(const Error& error) {
  std::shared_ptr<Communicator> made;
  {
    const std::lock_guard lock(mutex_);
    // What was in progress ends with an error, and others can be made from the communicator.
    if (stopped_) return error;
    made = communicator_;
  }
  Error first = health_->fail(error);
  // If it was another rank that failed first, the others hear of that one.
  if (made != nullptr) made->bootstrap().fail(first.what());
  return first;
}

std::string Handle::description() const {
  std::lock_guard lock(mutex_);
  return communicator_ != nullptr ? communicator_->description() : "communicator in initialization";
}

std::string Handle::lastError() const {
  const std::optional<Error> error = health_->error();
  return error ? error->what() : "";
}

// Whether this rank leaves in an orderly manner depends on what it had in progress before.
bool Handle::isIdle(const std::unique_lock<std::mutex>&) const noexcept {
  if (communicator_ == nullptr || launching_ || busy_ > 0 || inProgress()) return false;
  try {
    return communicator_->isIdle() && !communicator_->isReplaying();
  } catch (const std::exception&) {
    return false;
  }
}

void Handle::abort() {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Communicator> made = communicator_;
  const bool idle = isIdle(lock);
  lock.unlock();
  // What made the user abort may not have been told yet.
  const std::optional<Error> cause = health_->error();
  health_->abort();
  logInfo("{}: abort", description());
  if (made != nullptr && idle) made->leave("was aborted (ncclCommAbort)");
  if (made != nullptr && !idle) {
    made->bootstrap().fail(cause ? cause->what()
                                 : "ncclCommAbort was called while a call was in progress");
  }
  lock.lock();
  // A call in the background may be launching, on a stream that the user may destroy after this.
  launched_.wait_for(lock, kLongestLaunch, [this] { return !launching_; });
}

void Handle::leaveAtExit() noexcept {
  // A thread that is in the middle of something may never go on.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || communicator_ == nullptr) return;
  if (isIdle(lock)) {
    communicator_->leave("has exited without ncclCommDestroy");
  } else {
    communicator_->bootstrap().fail("its process exits while a call is in progress");
  }
}

void Handle::destroy() {
  std::shared_ptr<Background> operation;
  bool finalizing = false;
  {
    const std::lock_guard lock(mutex_);
    operation = background_;
    finalizing = finalized_;
  }
  if (operation == nullptr || operation->done()) return;
  if (!finalizing) {
    fail(invalidUsage("The communicator was destroyed while an operation on it was in progress")
             .remedy("Wait until ncclCommGetAsyncError no longer reports ncclInProgress"));
  }
  operation->wait();
}

namespace {

constexpr const char* kWhatIsForked = "The communicator";

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<HandleId, std::shared_ptr<Handle>> live;
  std::deque<char> addresses;     // a byte for each handle ever made: its address is the id
  const int forks = forkCount();  // of the process that made the handles
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

Error unknownHandle(HandleId id) {
  if (id == nullptr) {
    return invalidArgument("The communicator is null").remedy("Pass one that was initialized");
  }
  return invalidArgument("{} is not a communicator, or it was destroyed", id)
      .remedy("Do not use a communicator after ncclCommDestroy or ncclCommAbort");
}

}  // namespace

// Other ranks would take the end of this process for a death, also where it has nothing to do.
void leaveAtExit() {
  Registry& all = registry();
  if (all.forks != forkCount()) return;
  const std::shared_lock lock(all.mutex, std::try_to_lock);
  if (!lock) return;
  for (const auto& [id, handle] : all.live) handle->leaveAtExit();
}

HandleId registerHandle(std::shared_ptr<Handle> handle) {
  Registry& all = registry();
  checkNotForked(all.forks, kWhatIsForked);
  [[maybe_unused]] static const int registered = std::atexit(leaveAtExit);
  std::lock_guard lock(all.mutex);
  HandleId id = &all.addresses.emplace_back();
  all.live.emplace(id, std::move(handle));
  return id;
}

std::shared_ptr<Handle> findHandle(HandleId id) {
  Registry& all = registry();
  // Not even the lock may be touched in a child: another thread of the parent may have held it.
  if (id != nullptr) checkNotForked(all.forks, kWhatIsForked);
  std::shared_lock lock(all.mutex);
  auto entry = all.live.find(id);
  if (entry == all.live.end()) throw unknownHandle(id);
  return entry->second;
}
std::shared_ptr<Communicator> communicatorOf(HandleId id) {
  return findHandle(id)->communicator();
}

std::shared_ptr<Handle> releaseHandle(HandleId id) {
  std::shared_ptr<Handle> handle = releaseIfLive(id);
  if (handle == nullptr) throw unknownHandle(id);
  return handle;
}

std::shared_ptr<Handle> releaseIfLive(HandleId id) {
  Registry& all = registry();
  if (id != nullptr) checkNotForked(all.forks, kWhatIsForked);
  std::lock_guard lock(all.mutex);
  auto entry = all.live.find(id);
  if (entry == all.live.end()) return nullptr;
  std::shared_ptr<Handle> handle = std::move(entry->second);
  all.live.erase(entry);
  return handle;
}

void abortHandle(HandleId id, bool returnAtOnce) {
  // Kernels see the abort after a millisecond or so.
  constexpr std::chrono::milliseconds kPatience{30};
  Reaper& reaper = Reaper::get();
  const uint64_t mark = reaper.mark();
  std::shared_ptr<Handle> handle = releaseHandle(id);
  handle->abort();
  reaper.add([handle = std::move(handle)]() mutable {
    handle.reset();
    return true;
  });
  if (!returnAtOnce) reaper.settle(mark, kPatience);
}

}  // namespace unisono::comm
