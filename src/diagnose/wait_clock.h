// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

namespace unisono::diagnose {

// How long a call has been waiting, in the time in which the watchdog ran. While the process or the
// whole machine is paused, kernels and the threads that answer other hosts do not run either, so
// that such time proves nothing. All times are in ns.
class WaitClock {
 public:
  // A longer gap between two looks adds only this to the time.
  static constexpr std::chrono::milliseconds kLongestStep{500};
  // A gap longer than this is a pause.
  static constexpr std::chrono::milliseconds kPause{1000};

  explicit WaitClock(int64_t patience) : patience_(patience) {}

  // To be called once a look. Returns whether there was a pause before it: what was read earlier
  // says little. A wait then lasts another quarter of the patience at least. A machine so busy that
  // every gap is long gets no such delay twice: for one wait, only a gap of twice the length is
  // the next pause.
  bool look(int64_t now);
  // The time that has passed, from an arbitrary moment.
  int64_t time() const { return time_; }
  // How long the wait of `call` has lasted, which began at `since`. Called at every look.
  int64_t waited(std::pair<uint64_t, uint64_t> call, int64_t since);

 private:
  const int64_t patience_;
  int64_t time_ = 0;
  int64_t lastLook_ = 0;                                           // 0: there was none
  int64_t longestGap_ = std::chrono::nanoseconds(kPause).count();  // that is no pause
  std::pair<uint64_t, uint64_t> call_;
  int64_t since_ = 0, began_ = 0;  // when the wait of call_ began: as told, and of time_
};

}  // namespace unisono::diagnose
