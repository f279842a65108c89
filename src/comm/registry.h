// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "comm/background.h"
#include "comm/communicator.h"

namespace unisono::comm {

// The object that a user's ncclComm_t names. Handles are validated by lookup and never dereferenced
// directly, so a stale handle is an error rather than a crash.
//
//   initialize / initAsync      finalize           ncclCommDestroy, ncclCommAbort
//   initializing ------> active ------> finalized ------> released
//        |                 |                |                ^
//        +-----------------+--- failed -----+----------------+
//
// An operation of a nonblocking communicator (initialization, calls that have to connect,
// finalization) runs in the background and owns the handle until it is done. The state is
// inProgress until then, and other calls are refused.
class Handle : public std::enable_shared_from_this<Handle> {
 public:
  Handle(runtime::Runtime& runtime, int device, bool blocking)
      : health_(std::make_shared<Health>(runtime, device)), device_(device), blocking_(blocking) {}

  // Runs `init` and keeps its result or its error, here or in the background.
  using InitFunction = std::function<std::shared_ptr<Communicator>(std::shared_ptr<Health>)>;
  void initialize(const InitFunction& init);
  void initAsync(InitFunction init);

  bool blocking() const { return blocking_; }
  int device() const { return device_; }

  // success, inProgress, or the error of the initialization or of a later call.
  ErrorCode state() const;
  // The initialized communicator. Throws Error(invalidArgument) while an operation is in progress,
  // and otherwise the error that the communicator has failed with.
  std::shared_ptr<Communicator> communicator() const;
  // The same, for calls that are not allowed after ncclCommFinalize: throws Error(invalidUsage).
  std::shared_ptr<Communicator> getActive() const;
  // The same, for what may be made from a communicator also after stop() and, if `evenIfFailed`,
  // after a failure.
  std::shared_ptr<Communicator> getParent(bool evenIfFailed = false) const;
  // While one lives, a call is in progress that has not begun to launch.
  class Busy {
   public:
    explicit Busy(std::shared_ptr<Handle> handle) : handle_(std::move(handle)) { handle_->busy_++; }
    ~Busy() { handle_->busy_--; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    const std::shared_ptr<Handle> handle_;
  };
  // Ends running work and waits until it has ended. From then on the communicator makes no calls,
  // but can be split, shrunk and destroyed. Throws Error(invalidArgument) after ncclCommFinalize
  // and, unless `again`, the second time.
  void stop(bool again);
  // What all ranks do together on the CPU, for CallGroup: `begin` on the thread of the call,
  // `finish` on any thread, together with the other ranks. Throw Error(invalidUsage) in the wrong
  // state.
  //
  // ncclCommSuspend and ncclCommResume are refused on all ranks when calls were captured; after
  // another error the communicator has failed.
  std::shared_ptr<Turns::Turn> beginSuspend(bool suspends);
  void finishSuspend(bool suspends, Turns::Turn& turn);
  // ncclCommWindowRegister. `finish` returns what keeps the buffer registered.
  std::shared_ptr<Turns::Turn> beginRegister();
  std::shared_ptr<const plan::SymmetricWindow> finishRegister(void* address, uint64_t bytes,
                                                              bool isSymmetric, Turns::Turn& turn);
  bool isSuspended() const;
  // Launches unless the communicator has failed or was aborted: throws that error.
  void launch(Communicator::Prepared& prepared);
  // Names the operation that `state` depends on from now on.
  void setBackground(std::shared_ptr<Background> operation);
  // Waits for everything that was launched, or returns false and does so in the background if the
  // communicator is nonblocking. Throws Error(invalidArgument) the second time.
  bool finalize();
  // Records an error that makes the communicator unusable, unless there is one already, logs it and
  // tells the other ranks, but not after stop(). Returns the error that it has failed with.
  Error fail(const Error& error);
  std::string lastError() const;
  // Ends all waits and launches nothing more; the communicator can only be destroyed afterwards.
  void abort();
  // Tells the other ranks that the process exits. Waits for nothing.
  void leaveAtExit() noexcept;
  // Gives up an initialization or a call that is in progress and waits until it has ended.
  void destroy();
  // Names the communicator in log lines.
  std::string description() const;

 private:
  const std::shared_ptr<Communicator>& working(const std::lock_guard<std::mutex>& lock) const;
  std::shared_ptr<Communicator> awaitTurn(Turns::Turn& turn);
  bool inProgress() const;  // with the lock held
  bool isIdle(const std::unique_lock<std::mutex>& lock) const noexcept;

  const std::shared_ptr<Health> health_;
  const int device_;
  const bool blocking_;
  mutable std::mutex mutex_;
  std::condition_variable launched_;
  std::atomic<int> busy_{0};
  bool initializing_ = true, launching_ = false, finalized_ = false;
  bool stopped_ = false, suspended_ = false;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Background> background_;
};

// The handles that live. Addresses are not used again while the process lives.
using HandleId = void*;
HandleId registerHandle(std::shared_ptr<Handle> handle);
// Throws Error(invalidArgument) for null, destroyed and unknown handles.
std::shared_ptr<Handle> findHandle(HandleId id);
// The communicator of such a handle, as Handle::communicator() returns it.
std::shared_ptr<Communicator> communicatorOf(HandleId id);
// Takes a handle out; the caller holds it last.
std::shared_ptr<Handle> releaseHandle(HandleId id);
// The same, but null if it is gone already.
std::shared_ptr<Handle> releaseIfLive(HandleId id);
// Takes a handle out and aborts it. Waits a moment for its memory to be released, unless
// `returnAtOnce`; what the device has not finished with by then is released later.
void abortHandle(HandleId id, bool returnAtOnce);

}  // namespace unisono::comm
