#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string_view>

#include "base/error.h"
#include "base/settings.h"

namespace unisono::bootstrap {

using Clock = std::chrono::steady_clock;

// UNISONO_BOOTSTRAP_TIMEOUT. Throws Error(invalidArgument) when it is not positive; more than three
// years are three years.
inline std::chrono::milliseconds timeoutOf(const Settings& settings) {
  constexpr int64_t kLongestSeconds = 100'000'000;
  if (settings.bootstrapTimeoutSeconds <= 0) {
    throw invalidArgument("UNISONO_BOOTSTRAP_TIMEOUT={} leaves no time to connect",
                          settings.bootstrapTimeoutSeconds)
        .remedy("Set it to a positive number of seconds, or unset it");
  }
  return std::chrono::seconds(std::min(settings.bootstrapTimeoutSeconds, kLongestSeconds));
}

// Limits one wait: by a time, and by a callback that says that the communicator is being aborted.
// A wait sleeps in slices, so that an abort is seen within `kSlice`.
class Wait {
 public:
  static constexpr std::chrono::milliseconds kSlice{50};

  // `aborted` may be empty, and must outlive the wait.
  Wait(std::chrono::milliseconds limit, const std::function<bool()>& aborted)
      : deadline_(Clock::now() + limit), aborted_(aborted) {}

  bool expired() const { return Clock::now() >= deadline_; }

  // Throws Error(internalError) when the communicator is being aborted.
  void throwIfAborted(std::string_view doing) const {
    if (aborted_ && aborted_()) throw internalError("Aborted while {}", doing);
  }

  // How long to sleep before looking at the callback and the clock again.
  std::chrono::milliseconds slice() const {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), kSlice);
  }

 private:
  Clock::time_point deadline_;
  const std::function<bool()>& aborted_;
};

}  // namespace unisono::bootstrap
