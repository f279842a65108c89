// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "bootstrap/socket.h"

namespace unisono::bootstrap {

// One thread of this process that waits for the sockets of all its mailboxes. It runs as long as
// the process does, so ranks accept and answer connections also while none of their calls is
// running.
class Reactor {
 public:
  class Handler {
   public:
    // Called by the reactor's thread when `descriptor` is ready.
    virtual void serve(int descriptor) = 0;
    // Called by the reactor's thread kTick after requestTick(), and every kTick while this process
    // has strangers.
    virtual void tick() = 0;

   protected:
    ~Handler() = default;
  };
  static constexpr std::chrono::milliseconds kTick{100};

  // The reactor of this process: a forked child has one of its own. Throws Error(systemError).
  static Reactor& ofThisProcess();

  // Returns the number under which the handler's descriptors are watched.
  uint32_t add(Handler& handler);
  // Returns when the handler's last call has ended. The handler must hold no lock that its calls
  // take.
  void remove(uint32_t number);

  void watch(uint32_t number, int descriptor, Poller::Interest interest);
  void setInterest(uint32_t number, int descriptor, Poller::Interest interest);
  void forget(int descriptor);
  void requestTick();

 private:
  Reactor();
  void run();
  // A forked child shares the epoll instance of its parent and must leave it alone.
  bool isOurs() const;

  const pid_t process_;
  Poller poller_;
  const UniqueDescriptor wakeUp_;  // an eventfd: for ticks that other threads request
  std::atomic<bool> tickRequested_{false};
  std::mutex mutex_;  // held during calls of handlers
  std::map<uint32_t, Handler*> handlers_;
  uint32_t lastNumber_ = 0;
};

// How long a new connection may take to show that it belongs here.
inline constexpr std::chrono::seconds kStrangerTimeout{10};
// How many connections of a process may be in that state: one more closes the oldest.
inline constexpr size_t kMaxStrangers = 1024;

// Counts one accepted connection that has not shown yet that it belongs to a rank: a stranger.
class Stranger {
 public:
  Stranger() { count_++; }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  ~Stranger() { count_--; }

  // How many there are in this process, over all its listeners.
  static size_t count() { return count_.load(); }
  // How many there should be: few enough that they never use up the limit of open files.
  static size_t max();

 private:
  inline static std::atomic<size_t> count_{0};
};

}  // namespace unisono::bootstrap
