#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

namespace unisono::comm {

// What a user's ncclComm_t stands for: a communicator in one of its states. Handles are looked up,
// never dereferenced unseen, so a stale one is an error and not a crash.
class Handle {
 public:
  Handle(runtime::Runtime& runtime, int device, bool blocking)
      : abort_(std::make_shared<AbortSignal>(runtime)), device_(device), blocking_(blocking) {}
  ~Handle();

  // Runs `make` and keeps its result or its error, here or on a thread of its own.
  using Maker = std::function<std::shared_ptr<Communicator>(std::shared_ptr<AbortSignal>)>;
  void build(const Maker& make);
  void buildInBackground(Maker make);

  bool blocking() const { return blocking_; }
  int device() const { return device_; }

  // success, inProgress, or what the making or a later call failed with.
  ErrorCode state() const;
  // The communicator once it is made. Throws Error(invalidArgument) while it is being made, and the
  // error with which that failed.
  std::shared_ptr<Communicator> communicator() const;
  // The same, for calls that ncclCommFinalize ends: Error(invalidUsage) after it.
  std::shared_ptr<Communicator> usable() const;
  // Waits for all that was launched. Once: Error(invalidArgument) the second time.
  void finalize();
  // An error after which the communicator is of no use, for ncclCommGetAsyncError.
  void fail(const Error& error);
  std::string lastError() const;
  // Ends all waits; the communicator can only be destroyed afterwards.
  void abort();

  // Owns the making of another handle, which nobody else has, until this one goes.
  void keep(std::shared_ptr<Handle> other);

 private:
  std::shared_ptr<AbortSignal> abort_;
  const int device_;
  const bool blocking_;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
  std::shared_ptr<Communicator> communicator_;
  std::atomic<bool> building_{true};
  std::atomic<bool> finalized_{false};
  std::thread thread_;
  std::vector<std::shared_ptr<Handle>> kept_;
};

// The handles that live. Addresses are not used again while the process lives.
using HandleId = void*;
HandleId registerHandle(std::shared_ptr<Handle> handle);
// Throws Error(invalidArgument) for null, destroyed and unknown handles.
std::shared_ptr<Handle> findHandle(HandleId id);
// Takes a handle out; the caller holds it last.
std::shared_ptr<Handle> releaseHandle(HandleId id);
// The same, but null if it is gone already.
std::shared_ptr<Handle> releaseIfLive(HandleId id);

}  // namespace unisono::comm
