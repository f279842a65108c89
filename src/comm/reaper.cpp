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

namespace {

// As the ranks of a node destroy their communicators together, those who are late by more have
// failed.
constexpr std::chrono::seconds kLongestExit{30};

}  // namespace

Reaper& Reaper::get() {
  // Never destroyed, because its thread may outlive every destructor.
  static auto* instance = new Reaper;
  return *instance;
}

Reaper::Reaper() : forks_(forkCount()) {
  std::atexit([] { get().stop(); });
}

void Reaper::add(std::function<bool()> release, AtExit atExit) noexcept {
  try {
    std::lock_guard lock(mutex_);
    items_.push_back({++added_, std::move(release), atExit});
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

bool Reaper::exits() {
  const std::lock_guard lock(mutex_);
  return exits_;
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
    if (exits_ && item->atExit == AtExit::drop) {
      item++;
      continue;
    }
    releasing_ = true;
    lock.unlock();
    const bool released = item->release();
    lock.lock();
    releasing_ = false;
    any = any || released;
    if (released && exits_) {
      (item++)->atExit = AtExit::drop;  // and what it owns is left to the system
    } else {
      item = released ? items_.erase(item) : std::next(item);
    }
    changed_.notify_all();
  }
  return any;
}

bool Reaper::mustFinish() const {
  return running_ && std::ranges::any_of(
                         items_, [](const Item& item) { return item.atExit == AtExit::finish; });
}

// The thread touches no device any more once the process exits, as drivers end with it.
void Reaper::stop() {
  if (forks_ != forkCount()) return;
  std::unique_lock lock(mutex_);
  exits_ = true;
  const auto isFinished = [this] { return !mustFinish(); };
  if (!changed_.wait_for(lock, 1s, isFinished)) {
    logWarn(
        "The process waits up to {} s before it exits: a rank of this host sends through it (PXN) "
        "and has not called ncclCommDestroy",
        kLongestExit.count());
    changed_.wait_for(lock, kLongestExit, isFinished);
  }
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, 1s, [this] { return !releasing_; });
}

}  // namespace unisono::comm
