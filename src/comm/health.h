// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/peer_watcher.h"
#include "comm/replays.h"
#include "plan/plan.h"
#include "runtime/runtime.h"

namespace unisono::comm {

// Ends the waits of a communicator. Exists before the communicator does, so that its initialization
// can be aborted too.
class AbortSignal {
 public:
  AbortSignal(runtime::Runtime& runtime, int device);
  // Ends all waits, on the CPU and in kernels, and keeps kernels that start later from doing
  // anything. Returns false if that was done before.
  bool raise();
  // Ends the waits on the CPU. Kernels that were launched still come to their end.
  void endWaits() { raised_.store(true, std::memory_order_release); }
  // Lets the CPU wait again after raise(), once all that it was to end has ended.
  void resumeWaits() { raised_.store(false, std::memory_order_release); }
  // Whether raise() was called, and whether either was.
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  // Ends also the waits of kernels for what `rank`, whose process has ended, was storing.
  void noteEnd(int rank);
  // For kernels that wait, and for kernels that start.
  const uint32_t* waitFlag() const;
  const uint32_t* launchFlag() const { return launchFlag_->deviceAddress(); }

 private:
  std::atomic<bool> aborted_{false}, raised_{false};
  std::shared_ptr<runtime::PinnedMemory> waitFlag_;
  std::shared_ptr<runtime::LaunchFlag> launchFlag_;
};

// What a group of calls needs of the other ranks.
struct CallNeeds {
  uint64_t collectives = 0;
  std::vector<plan::PeerUse> messages;
};

// A rank whose process is another one of this PID namespace.
struct RankProcess {
  int rank;
  pid_t process;
};

// Whether a communicator is in order: its first error, from this rank or another one, and what
// other ranks have left. Shared by the handle, the communicator and the bootstrap.
//
// After an error every wait on the CPU ends at once, and kernels that wait end a grace later: calls
// that were complete on the rank that has failed have come to their end by then.
class Health final : public bootstrap::PeerWatcher, public std::enable_shared_from_this<Health> {
 public:
  Health(runtime::Runtime& runtime, int device) : signal_(runtime, device) {}

  AbortSignal& signal() { return signal_; }
  // From now on the communicator is made: `name` names it in log lines, and kernels may go on for
  // `grace` after an error. Until then its initialization finds out for itself what others report.
  void start(std::string name, int ranks, std::chrono::milliseconds grace,
             std::vector<RankProcess> processes);

  bool hasFailed() const { return failed_.load(std::memory_order_acquire); }
  std::optional<Error> error() const;
  // Whether its user has aborted it.
  bool wasAborted() const { return abortedByUser_.load(std::memory_order_acquire); }
  // Takes an error that other ranks are to be told of before it is recorded. They may abort as soon
  // as they know, so all that this rank hears of them from here on is a consequence: fail() records
  // this error, whatever it is called with. Returns the first one.
  Error reserve(const Error& error);
  // Records an error that makes the communicator unusable, unless there is one already, and logs
  // it. Returns the first one.
  Error fail(const Error& error);
  // Raises the signal, and follows the processes of the other ranks: see AbortSignal::noteEnd().
  void raise();
  // As fail() for a communicator that its user aborts: nothing is logged, nothing is waited for.
  void abort();

  // Throws Error(remoteError) when one of these calls needs a rank that has left.
  void check(const CallNeeds& needs);
  // Counts calls that are about to be launched. Throws as check().
  void begin(const CallNeeds& needs);
  // Notes what replays of graphs have needed so far, and fails if that is more than a rank which
  // has left took part in.
  void noteReplays(const Replays::Counts& counts);
  // What this rank has launched, with replays as last noted, from the point of view of `peer`.
  bootstrap::DepartureCounts countsFor(int peer) const;

  bool hasLeft(int peer) const;
  bool hasAnyoneLeft() const { return anyoneLeft_.load(); }

  void peerFailed(const Error& error) override;
  void peerLeft(const bootstrap::Departure& departure) override;

 private:
  struct MessageCounts {
    std::atomic<uint64_t> sends{0}, receives{0}, replayedSends{0}, replayedReceives{0};
  };
  std::optional<Error> unmetNeed(const bootstrap::Departure& departure,
                                 const CallNeeds& more) const;
  void raiseLater();

  AbortSignal signal_;
  std::atomic<uint64_t> collectives_{0}, replayedCollectives_{0};
  std::vector<MessageCounts> messages_;  // by peer
  std::atomic<bool> anyoneLeft_{false}, failed_{false}, abortedByUser_{false};
  mutable std::mutex mutex_;
  std::string name_ = "communicator in initialization";
  std::chrono::milliseconds grace_{0};
  std::vector<RankProcess> processes_;
  bool started_ = false;
  std::optional<Error> error_;
  std::optional<Error> reserved_;      // until it is recorded
  std::optional<Error> earlyFailure_;  // of a peer, before start()
  std::vector<bootstrap::Departure> departures_;
};

}  // namespace unisono::comm
