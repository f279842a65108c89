// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "diagnose/job_inquiry.h"

namespace unisono::diagnose {

// What clients of NCCL's RAS protocol are told of a job: as JSON with NCCL's names, or as text with
// NCCL's tables and phrases. `verbose` adds the call of each rank.
std::string rasJson(const JobState& job, std::string_view ncclVersion);
std::string rasText(const JobState& job, std::string_view ncclVersion, bool verbose);

// A process that has ranks, for clients that watch which ones come and go.
struct RasPeer {
  std::set<int> devices;
  bool isDead = false;
};
using RasPeers = std::map<std::pair<std::string, int64_t>, RasPeer>;  // by address, process id
RasPeers rasPeers(const JobState& job);

// What has happened between two looks: a process is new, or has died. Those that have destroyed
// their communicators are forgotten.
struct RasEvent {
  const char* name;  // NCCL's
  std::string address;
  int64_t process;
  RasPeer peer;
};
std::vector<RasEvent> rasEvents(const RasPeers& before, const RasPeers& after);
std::string rasText(const RasEvent& event);
std::string rasJson(const RasEvent& event);

}  // namespace unisono::diagnose
