// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

#include "memory/windows.h"

namespace unisono::comm {

// The thread of this process that maps windows for all its communicators. It exists only while one
// of them has windows. It is not waited for when the process exits.
class Mapper {
 public:
  static Mapper& get();

  // Calls windows->work() soon, and then as often as it asks for. Keeps no communicator alive.
  void schedule(const std::shared_ptr<memory::Windows>& windows) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  Mapper();
  void run();
  void stop();

  std::mutex mutex_;
  std::condition_variable changed_;
  // When each is due, by the address of its control block.
  std::map<std::weak_ptr<memory::Windows>, Clock::time_point, std::owner_less<>> due_;
  bool running_ = false;  // the thread
  bool working_ = false;  // the thread is in a call of work()
  bool stopped_ = false;
  const int forks_;  // of the process that made this
};

}  // namespace unisono::comm
