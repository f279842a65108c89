// SPDX-License-Identifier: Apache-2.0
#include "comm/device_clock.h"

#include <algorithm>
#include <cstring>

#include "device/kernels.h"
#include "diagnose/journal.h"

namespace unisono::comm {

using diagnose::steadyNow;

DeviceClock::DeviceClock(runtime::Runtime& runtime, int device)
    : runtime_(runtime),
      device_(device),
      times_(runtime.allocatePinned(sizeof(device::ReplayTimes))),
      stream_(runtime.createStream(device)) {
  std::memset(times_->hostAddress(), 0, sizeof(device::ReplayTimes));
  compare();
}

void DeviceClock::renew() {
  constexpr int64_t kAge = 10'000'000'000;
  if (!offset_ || steadyNow() - compared_ > kAge) compare();
}

std::optional<int64_t> DeviceClock::steadyOf(uint64_t time) const {
  if (!offset_) return std::nullopt;
  return static_cast<int64_t>(time) + *offset_;
}

void DeviceClock::fit(uint64_t began, uint64_t ended, int64_t earliest, int64_t latest) {
  if (!offset_) return;
  const int64_t least = earliest - static_cast<int64_t>(began);
  const int64_t most = latest - static_cast<int64_t>(ended);
  offset_ = std::min(std::max(*offset_, least), most);
}

// The clock is read between two looks at the steady one. When the GPU is busy that takes longer,
// and what was known before is kept; it may even be in a kernel that never ends.
void DeviceClock::compare() {
  constexpr int kAttempts = 5;
  constexpr int64_t kLongest = 1'000'000'000, kKept = 1'000'000, kExact = 20'000;
  const runtime::DeviceScope scope(runtime_, device_);
  const auto& times = *static_cast<device::ReplayTimes*>(times_->hostAddress());
  const device::StampArguments arguments{static_cast<device::ReplayTimes*>(times_->deviceAddress()),
                                         0, true};
  int64_t closest = offset_ ? kKept : kLongest;
  compared_ = steadyNow();
  for (int i = 0; i < kAttempts && closest > kExact; i++) {
    if (!runtime_.query(stream_.get())) return;
    const int64_t before = steadyNow();
    runtime_.launch(device::stampKernel(), {.argumentBytes = sizeof(arguments)}, &arguments,
                    stream_.get());
    while (!runtime_.query(stream_.get())) {
      if (steadyNow() - before > kLongest) return;
    }
    const int64_t after = steadyNow();
    if (after - before >= closest) continue;
    closest = after - before;
    offset_ = before + closest / 2 - static_cast<int64_t>(times.began);
  }
}

}  // namespace unisono::comm
