// SPDX-License-Identifier: Apache-2.0
#include "comm/mapper.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/thread.h"

namespace unisono::comm {

using namespace std::chrono_literals;

Mapper& Mapper::get() {
  // Never destroyed, because its thread may outlive every destructor.
  static auto* instance = new Mapper;
  return *instance;
}

Mapper::Mapper() : forks_(forkCount()) {
  std::atexit([] { get().stop(); });
}

void Mapper::schedule(const std::shared_ptr<memory::Windows>& windows) noexcept {
  if (forks_ != forkCount()) return;
  try {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    due_[windows] = Clock::now();
    if (!running_) {
      startThread("unisono-mapper", [this] { run(); }).detach();
      running_ = true;
    }
    changed_.notify_all();
  } catch (const std::exception& error) {
    logWarn("Buffers of peers are not mapped yet: {}", error.what());
  }
}

void Mapper::run() {
  std::unique_lock lock(mutex_);
  while (!due_.empty() && !stopped_) {
    const auto next = std::min_element(
        due_.begin(), due_.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (next->second > Clock::now()) {
      changed_.wait_until(lock, next->second);
      continue;
    }
    const std::weak_ptr<memory::Windows> windows = next->first;
    due_.erase(next);
    working_ = true;
    lock.unlock();
    std::optional<std::chrono::milliseconds> again;
    if (std::shared_ptr<memory::Windows> owned = windows.lock()) {
      try {
        again = owned->work();
      } catch (const std::exception& error) {
        logWarn("Buffers of peers are not mapped any more: {}", error.what());
      }
    }
    lock.lock();
    working_ = false;
    // A call of wake() since then has made it due at once already.
    if (again && !windows.expired()) due_.try_emplace(windows, Clock::now() + *again);
    changed_.notify_all();
  }
  running_ = false;
}

// The thread touches no device any more once the process exits, as drivers end with it.
void Mapper::stop() {
  if (forks_ != forkCount()) return;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, 1s, [this] { return !working_; });
}

}  // namespace unisono::comm
