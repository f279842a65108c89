// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

namespace unisono::comm {

// Runs things that are on different threads in the order in which they were announced. A turn that
// is destroyed without being taken does not hold up the others.
class Turns : public std::enable_shared_from_this<Turns> {
 public:
  class Turn {
   public:
    // Ends a turn, also where it fails.
    struct End {
      Turn& turn;
      ~End() { turn.end(); }
    };

    Turn(std::shared_ptr<Turns> turns, uint64_t number)
        : turns_(std::move(turns)), number_(number) {}
    ~Turn() { end(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Waits until all earlier turns have ended. Returns false if `aborted` returned true before.
    bool await(const std::function<bool()>& aborted) {
      std::unique_lock lock(turns_->mutex_);
      while (*turns_->waiting_.begin() != number_) {
        if (aborted()) return false;
        turns_->changed_.wait_for(lock, std::chrono::milliseconds(20));
      }
      return true;
    }
    void end() {
      std::lock_guard lock(turns_->mutex_);
      turns_->waiting_.erase(number_);
      turns_->changed_.notify_all();
    }

   private:
    std::shared_ptr<Turns> turns_;
    const uint64_t number_;
  };

  std::shared_ptr<Turn> announce() {
    std::lock_guard lock(mutex_);
    waiting_.insert(next_);
    return std::make_shared<Turn>(shared_from_this(), next_++);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<uint64_t> waiting_;
  uint64_t next_ = 0;
};

}  // namespace unisono::comm
