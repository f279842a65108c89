// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace unisono::comm {

// Work that runs on a thread of its own.
class Background {
 public:
  // Starts `body`, which must not throw. Throws Error(systemError) if the system refuses a thread.
  static std::shared_ptr<Background> start(const char* name, std::function<void()> body);

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Waits until the work is done. By then all that `body` has captured is released.
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> done_{false};
};

}  // namespace unisono::comm
