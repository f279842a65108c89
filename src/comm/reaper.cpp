// SPDX-License-Identifier: Apache-2.0
#include "comm/reaper.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/thread.h"

namespace unisono::comm {

using namespace std::chrono_literals;

Reaper& Reaper::get() {
  // Never destroyed, because its thread may outlive every destructor.
  static auto* instance = new Reaper;
  return *instance;
}

Reaper::Reaper() : forks_(forkCount()) {
  std::atexit([] { get().stop(); });
}

void Reaper::add(std::function<bool()> release) noexcept {
  try {
    std::lock_guard lock(mutex_);
    items_.push_back({++added_, std::move(release)});
    if (!running_ && !stopped_) {
      startThread("unisono-reaper", [this] { run(); }).detach();
      running_ = true;
    }
    changed_.notify_all();
  } catch (const std::exception& error) {
    // What could not be added, or has no thread yet, stays allocated until the next call.
    logWarn("Memory of a communicator cannot be released yet: {}", error.what());
  }
}

uint64_t Reaper::mark() {
  std::lock_guard lock(mutex_);
  return added_;
}

void Reaper::settle(uint64_t mark, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit,
                    [&] { return items_.empty() || items_.back().number <= mark || stopped_; });
}

void Reaper::run() {
  constexpr std::chrono::microseconds kShortNap = 100us, kLongNap = 10ms;
  std::chrono::microseconds nap = kShortNap;
  std::unique_lock lock(mutex_);
  uint64_t seen = added_;
  while (!items_.empty() && !stopped_) {
    const bool released = tryAll(lock);
    nap = released || seen != added_ ? kShortNap : std::min(2 * nap, kLongNap);
    seen = added_;
    if (!items_.empty()) changed_.wait_for(lock, nap);
  }
  running_ = false;
}

// Returns whether anything was released.
bool Reaper::tryAll(std::unique_lock<std::mutex>& lock) {
  bool any = false;
  for (auto item = items_.begin(); item != items_.end() && !stopped_;) {
    releasing_ = true;
    lock.unlock();
    const bool released = item->release();
    lock.lock();
    releasing_ = false;
    item = released ? items_.erase(item) : std::next(item);
    any = any || released;
    changed_.notify_all();
  }
  return any;
}

// The thread touches no device any more once the process exits, as drivers end with it.
void Reaper::stop() {
  if (forks_ != forkCount()) return;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, 1s, [this] { return !releasing_; });
}

}  // namespace unisono::comm
