// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "diagnose/rank_view.h"

namespace unisono::diagnose {

// What clients of NCCL's RAS protocol are told of the communicators in `views`, the ranks that this
// process can see: as JSON with NCCL's names, or as text. `verbose` adds the call of each rank.
std::string rasJson(const std::vector<RankView>& views, std::string_view ncclVersion);
std::string rasText(const std::vector<RankView>& views, std::string_view ncclVersion, bool verbose);

}  // namespace unisono::diagnose
