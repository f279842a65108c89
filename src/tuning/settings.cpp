// SPDX-License-Identifier: Apache-2.0
#include "tuning/settings.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace unisono::tuning {

TuningSettings tuningSettingsOf(const Settings& settings) {
  TuningSettings result;
  result.threads = settings.threads;
  result.ll128Threads = settings.ll128Threads;
  std::istringstream words(settings.threadThresholds);
  words >> std::setbase(0);
  for (int64_t& threshold : result.thresholds) {
    int64_t value = 0;
    if (!(words >> value)) break;
    threshold = std::max<int64_t>(value, -1);
  }
  result.netOverheadNs = std::max<int64_t>(settings.netOverhead, -1);
  result.ll128C2c = settings.ll128C2c ? 1 : 0;
  result.patEnable = settings.pat;
  result.p2pLlThreshold = settings.p2pLlThreshold;
  result.deterministic = settings.deterministic ? 1 : 0;
  return result;
}

}  // namespace unisono::tuning
