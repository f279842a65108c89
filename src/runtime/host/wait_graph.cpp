// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/wait_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

namespace unisono::runtime::host {
namespace {

constexpr size_t kMaxListed = 64;

using Edges = std::map<int, std::set<int>>;

// Extends `path` to a cycle; what was `visited` without success is not tried again.
bool findCycle(const Edges& edges, std::vector<int>& path, std::set<int>& visited) {
  auto outgoing = edges.find(path.back());
  if (outgoing == edges.end()) return false;
  for (int next : outgoing->second) {
    auto seen = std::find(path.begin(), path.end(), next);
    if (seen != path.end()) {
      path.erase(path.begin(), seen);
      path.push_back(next);
      return true;
    }
    if (!visited.insert(next).second) continue;
    path.push_back(next);
    if (findCycle(edges, path, visited)) return true;
    path.pop_back();
  }
  return false;
}

std::vector<int> cycleOf(const Edges& edges) {
  std::set<int> visited;
  for (const auto& [rank, peers] : edges) {
    if (!visited.insert(rank).second) continue;
    std::vector<int> path{rank};
    if (findCycle(edges, path, visited)) return path;
  }
  return {};
}

}  // namespace

std::string describeTask(const TaskInfo& info) {
  static constexpr const char* kRoles[] = {" worker", " waiter", " poster"};
  return fmt::format("{} block {} group {}{} on device {}", info.name, info.block, info.group,
                     info.role >= 0 ? kRoles[info.role] : "", info.device);
}

std::string describeWaits(const std::vector<Waiter>& waiters) {
  std::string text = fmt::format("{} {} wait and none can move: ", waiters.size(),
                                 waiters.size() == 1 ? "task" : "tasks");
  auto out = std::back_inserter(text);
  Edges edges;
  for (size_t i = 0; i < waiters.size(); i++) {
    const auto& [info, reason] = waiters[i];
    if (reason.rank >= 0 && reason.peer >= 0) edges[reason.rank].insert(reason.peer);
    if (i >= kMaxListed) continue;
    fmt::format_to(out, "{}{}: ", i > 0 ? "; " : "", describeTask(info));
    if (reason.rank >= 0) fmt::format_to(out, "rank {} ", reason.rank);
    fmt::format_to(out, "waits");
    if (reason.peer >= 0) fmt::format_to(out, " for rank {}", reason.peer);
    fmt::format_to(out, " ({}", reason.what);
    if (reason.channel >= 0) fmt::format_to(out, ", channel {}", reason.channel);
    if (reason.wanted > 0) fmt::format_to(out, ", wanted {}, seen {}", reason.wanted, reason.seen);
    fmt::format_to(out, ")");
  }
  if (waiters.size() > kMaxListed) {
    fmt::format_to(out, "; and {} more", waiters.size() - kMaxListed);
  }
  if (std::vector<int> cycle = cycleOf(edges); !cycle.empty()) {
    fmt::format_to(out, "; cycle of ranks {}", fmt::join(cycle, " -> "));
  }
  return text;
}

}  // namespace unisono::runtime::host
