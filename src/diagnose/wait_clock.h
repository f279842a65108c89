// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

namespace unisono::diagnose {

// How long a call has been waiting, in the time in which the watchdog ran. While the process or the
// whole machine is paused, kernels and the threads that answer other hosts do not run either, so
// that such time proves nothing. All times are in ns.
class WaitClock {
 public:
  explicit WaitClock(int64_t patience) : patience_(patience) {}

  // Called once per look of the watchdog. Returns whether there was a pause before this look, so
  // that what was read earlier is out of date. After a pause, a wait lasts at least another quarter
  // of the patience. On a machine so busy that every gap is long, this delays a report only once:
  // for the same wait, only a gap of more than twice the length counts as another pause.
  bool look(int64_t now);
  // The time that has passed, from an arbitrary moment.
  int64_t time() const { return time_; }
  // How long the wait of `call` has lasted, which began at `since`. Called at every look.
  int64_t waited(std::pair<uint64_t, uint64_t> call, int64_t since);

 private:
  static constexpr int64_t kLongestStep = 500'000'000;  // what a look adds to the time at most
  static constexpr int64_t kPause = 1'000'000'000;      // a longer gap between looks is a pause

  const int64_t patience_;
  int64_t time_ = 0;
  int64_t lastLook_ = 0;         // 0: there was none
  int64_t longestGap_ = kPause;  // a longer one is the next pause of this wait
  std::pair<uint64_t, uint64_t> call_;
  int64_t since_ = 0;  // when the wait of call_ began, as its caller said
  int64_t began_ = 0;  // the same, of time_
};

}  // namespace unisono::diagnose
