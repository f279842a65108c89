// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/runtime.h"

namespace unisono::comm {

// The clock that kernels of a device read, compared with that of the host. Used by one thread at a
// time.
class DeviceClock {
 public:
  DeviceClock(runtime::Runtime& runtime, int device);

  // Compares the clocks again if that was long ago, since they drift. Waits for the device at most
  // about a second.
  void renew();
  // A time of the device as one of diagnose::steadyNow(). Nothing until the clocks were compared,
  // which needs a device that is not busy.
  std::optional<int64_t> steadyOf(uint64_t time) const;
  // Corrects what is known of the clock so that `began` is not before `earliest` and `ended` not
  // after `latest`, or only the second if both cannot be. Comparisons are inexact where threads of
  // the host are kept from running.
  void fit(uint64_t began, uint64_t ended, int64_t earliest, int64_t latest);

 private:
  void compare();

  runtime::Runtime& runtime_;
  const int device_;
  const std::shared_ptr<runtime::PinnedMemory> times_;
  const std::shared_ptr<void> stream_;
  std::optional<int64_t> offset_;
  int64_t compared_ = 0;
};

}  // namespace unisono::comm
