// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "diagnose/rank_view.h"

namespace unisono::diagnose {

// What clients of NCCL's RAS protocol are told of the communicators in `views`, the ranks that this
// process can see: as JSON with NCCL's names, or as text. `verbose` adds the call of each rank.
std::string rasJson(const std::vector<RankView>& views, std::string_view ncclVersion);
std::string rasText(const std::vector<RankView>& views, std::string_view ncclVersion, bool verbose);

// A process that has ranks, for clients that watch which ones come and go.
struct RasPeer {
  std::set<int> devices;
  bool isDead = false;
};
using RasPeers = std::map<int64_t, RasPeer>;  // by process id
RasPeers rasPeers(const std::vector<RankView>& views);

// What has happened between two looks: a process is new, or has died. Those that have destroyed
// their communicators are forgotten.
struct RasEvent {
  const char* name;  // NCCL's
  int64_t process;
  RasPeer peer;
};
std::vector<RasEvent> rasEvents(const RasPeers& before, const RasPeers& after);
std::string rasText(const RasEvent& event);
std::string rasJson(const RasEvent& event);

}  // namespace unisono::diagnose
