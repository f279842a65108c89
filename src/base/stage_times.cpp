// SPDX-License-Identifier: Apache-2.0
#include "base/stage_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace unisono {

void StageTimes::endAt(const char* stage, Clock::time_point now) {
  const auto found = std::ranges::find_if(
      stages_, [&](const auto& known) { return std::string_view(known.first) == stage; });
  if (found == stages_.end()) {
    stages_.emplace_back(stage, now - last_);
  } else {
    found->second += now - last_;
  }
  last_ = now;
}

std::string StageTimes::describe() const {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  Clock::duration total{};
  std::string text;
  for (const auto& [stage, time] : stages_) {
    total += time;
    text += fmt::format("{}{} {:.1f}", text.empty() ? "" : ", ", stage, Milliseconds(time).count());
  }
  return fmt::format("{:.1f} ms ({})", Milliseconds(total).count(), text);
}

}  // namespace unisono
