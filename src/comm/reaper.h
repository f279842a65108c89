// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>

namespace unisono::comm {

// Releases aborted communicators, and memory that a communicator has replaced, as soon as the
// device has finished with it, and what a communicator has left to others when they have finished
// with it. Nobody waits for a stream on which somebody else's kernel may be
// stuck. The thread exists only while there is something to release. When the process exits, it is
// waited for only where others depend on it, for a while.
class Reaper {
 public:
  static Reaper& get();

  enum class AtExit : uint8_t { drop, finish };
  // Calls `release` now and then, on the reaper's thread, until it returns true. `release` must not
  // throw, must not wait for a device, and with AtExit::finish must not use one.
  void add(std::function<bool()> release, AtExit atExit = AtExit::drop) noexcept;

  // Whether the process exits.
  bool exits();

  // Waits until everything that was added after `mark` was returned has been released, but not
  // longer than `limit`.
  uint64_t mark();
  void settle(uint64_t mark, std::chrono::milliseconds limit);

 private:
  struct Item {
    uint64_t number;
    std::function<bool()> release;
    AtExit atExit;
  };

  Reaper();
  void run();
  bool tryAll(std::unique_lock<std::mutex>& lock);
  bool mustFinish() const;
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Item> items_;  // in the order of their numbers
  uint64_t added_ = 0;
  bool running_ = false;    // the thread
  bool releasing_ = false;  // the thread is in an item's `release`
  bool exits_ = false;      // the process: only what must finish is called
  bool stopped_ = false;
  const int forks_;  // of the process that made this
};

}  // namespace unisono::comm
