// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

// How long each stage of something takes, for a line of the log.
class StageTimes {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StageTimes(Clock::time_point begin = Clock::now()) : last_(begin) {}

  // Ends a stage that began where the one before ended, the first one at `begin`. Stages of the
  // same name are added up.
  void end(const char* stage) { endAt(stage, Clock::now()); }
  void endAt(const char* stage, Clock::time_point now);

  // All of them in milliseconds, in the order of their first ends: "12.3 ms (first 10.1, second
  // 2.2)".
  std::string describe() const;

 private:
  Clock::time_point last_;
  std::vector<std::pair<const char*, Clock::duration>> stages_;
};

}  // namespace unisono
