// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/settings.h"

namespace unisono::bootstrap {

using Clock = std::chrono::steady_clock;

// How long a rank tries to reach the root when the user sets no limit. A rank of a job may start
// long before the root at a fixed address.
inline constexpr std::chrono::seconds kDefaultConnectTimeout{600};
// How often a wait logs what it waits for.
inline constexpr std::chrono::seconds kReportInterval{60};

// UNISONO_BOOTSTRAP_TIMEOUT, or nothing if it is not set. It limits rendezvous and every later wait
// for another rank; without it, waits last as long as the other rank's process lives, as with NCCL:
// the user's framework knows how late a rank may be. Throws
// Error(invalidArgument) when it is not positive; values above three years are taken as three
// years.
inline std::optional<std::chrono::milliseconds> timeoutOf(const Settings& settings) {
  constexpr int64_t kMaxSeconds = 100'000'000;
  const int64_t seconds = settings.bootstrapTimeoutSeconds;
  if (seconds == Settings::kNoBootstrapTimeout) return std::nullopt;
  if (seconds <= 0) {
    throw invalidArgument("UNISONO_BOOTSTRAP_TIMEOUT={} leaves no time to connect", seconds)
        .remedy("Set it to a positive number of seconds, or unset it");
  }
  return std::chrono::seconds(std::min(seconds, kMaxSeconds));
}

inline std::chrono::milliseconds connectTimeoutOf(const Settings& settings) {
  return timeoutOf(settings).value_or(kDefaultConnectTimeout);
}

inline Error abortedWhile(std::string_view doing) {
  return invalidUsage("The communicator was aborted or revoked while {}", doing)
      .remedy("Make another communicator");
}

// Limits one wait: by a time, if there is one, and by a callback that tells whether the
// communicator is being aborted. A wait sleeps in slices, so that an abort is seen within
// `longestSlice()`.
class Wait {
 public:
  static constexpr std::chrono::milliseconds kSlice{50};

  // `aborted` may be empty, and must outlive the wait.
  Wait(std::optional<std::chrono::milliseconds> limit, const std::function<bool()>& aborted)
      : start_(Clock::now()), aborted_(aborted) {
    if (limit) deadline_ = start_ + *limit;
    waits_++;
  }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;
  ~Wait() { waits_--; }

  // kSlice, or more where hundreds of ranks of this process wait: looking at the callback must not
  // take the time of those that they wait for.
  static std::chrono::milliseconds longestSlice() {
    return std::max(kSlice, std::chrono::milliseconds(waits_ / 6));
  }

  bool isExpired() const { return deadline_ && Clock::now() >= *deadline_; }

  // Throws Error(invalidUsage) when the communicator is being aborted.
  void throwIfAborted(std::string_view doing) const {
    if (aborted_ && aborted_()) throw abortedWhile(doing);
  }

  // How long to sleep before looking at the callback and the clock again.
  std::chrono::milliseconds slice() const {
    if (!deadline_) return longestSlice();
    auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), longestSlice());
  }

  double secondsSinceStart() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

 private:
  inline static std::atomic<int> waits_{0};  // of this process

  Clock::time_point start_;
  std::optional<Clock::time_point> deadline_;
  const std::function<bool()>& aborted_;
};

// Tells when a wait should log what it waits for.
class Reminder {
 public:
  explicit Reminder(std::chrono::milliseconds interval)
      : interval_(interval), next_(Clock::now() + interval) {}

  // Returns true once per interval.
  bool isDue() {
    const Clock::time_point now = Clock::now();
    if (now < next_) return false;
    next_ = now + interval_;
    return true;
  }
  Clock::time_point next() const { return next_; }

 private:
  std::chrono::milliseconds interval_;
  Clock::time_point next_;
};

}  // namespace unisono::bootstrap
