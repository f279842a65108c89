// SPDX-License-Identifier: Apache-2.0
#include "diagnose/wait_clock.h"

#include <algorithm>

namespace unisono::diagnose {

bool WaitClock::look(int64_t now) {
  const int64_t gap = lastLook_ == 0 ? 0 : now - lastLook_;
  lastLook_ = now;
  time_ += std::clamp(gap, int64_t{0}, kLongestStep);
  if (gap <= longestGap_) return false;
  longestGap_ = 2 * gap;
  began_ = std::max(began_, time_ - patience_ / 4 * 3);
  return true;
}

int64_t WaitClock::waited(std::pair<uint64_t, uint64_t> call, int64_t since) {
  if (call != call_ || since != since_) {
    call_ = call;
    since_ = since;
    longestGap_ = kPause;
    began_ = time_ - std::clamp(lastLook_ - since, int64_t{0}, kLongestStep);
  }
  return time_ - began_;
}

}  // namespace unisono::diagnose
