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
// device has finished with it. Nobody waits for a stream on which somebody else's kernel may be
// stuck. The thread exists only while there is something to release. It is not waited for when the
// process exits.
class Reaper {
 public:
  static Reaper& get();

  // Calls `release` now and then, on the reaper's thread, until it returns true. `release` must not
  // throw, and must not wait for a device.
  void add(std::function<bool()> release) noexcept;

  // Waits until everything that was added after `mark` was returned has been released, but not
  // longer than `limit`.
  uint64_t mark();
  void settle(uint64_t mark, std::chrono::milliseconds limit);

 private:
  struct Item {
    uint64_t number;
    std::function<bool()> release;
  };

  Reaper();
  void run();
  bool tryAll(std::unique_lock<std::mutex>& lock);
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Item> items_;  // in the order of their numbers
  uint64_t added_ = 0;
  bool running_ = false;    // the thread
  bool releasing_ = false;  // the thread is in an item's `release`
  bool stopped_ = false;
  const int forks_;  // of the process that made this
};

}  // namespace unisono::comm
