// SPDX-License-Identifier: Apache-2.0
#include "diagnose/ras_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <set>

#include "base/system.h"
#include "diagnose/journal.h"

namespace unisono::diagnose {
namespace {

// The ranks of a communicator that are known, in order.
struct Group {
  int ranks = 0;
  std::vector<const RankView*> known;

  std::vector<int> missing() const {
    std::vector<int> numbers;
    size_t next = 0;
    for (int rank = 0; rank < ranks; rank++) {
      if (next < known.size() && known[next]->rank == rank) {
        next++;
      } else {
        numbers.push_back(rank);
      }
    }
    return numbers;
  }
};

std::map<uint64_t, Group> groupsOf(const std::vector<RankView>& views) {
  std::map<uint64_t, Group> groups;
  for (const RankView& view : views) {
    if (!view.isKnown || view.hasLeft) continue;
    Group& group = groups[view.id];
    group.ranks = view.ranks;
    group.known.push_back(&view);
  }
  for (auto& [id, group] : groups) {
    std::ranges::sort(group.known, {}, &RankView::rank);
    const auto isSameRank = [](const RankView* a, const RankView* b) { return a->rank == b->rank; };
    group.known.erase(std::unique(group.known.begin(), group.known.end(), isSameRank),
                      group.known.end());
  }
  return groups;
}

bool isDead(const RankView& view) {
  return view.processState == "ended";
}

std::string countsText(const RankView& view) {
  std::vector<std::string> parts;
  for (size_t call = 0; call < view.counts.size(); call++) {
    parts.push_back(
        fmt::format("\"{}\": {}", nameOf(static_cast<plan::Call>(call)), view.counts[call]));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

// Numbers and names that NCCL's clients expect; -1 is an unknown number.
std::string rankJson(const RankView& view) {
  constexpr auto yesNo = [](bool value) { return value ? "true" : "false"; };
  return fmt::format(
      "{{\"rank\": {}, \"host\": {}, \"pid\": {}, \"cuda_dev\": {}, \"nvml_dev\": -1, \"status\": "
      "{{\"init_state\": 0, \"async_error\": {}, \"finalize_called\": {}, \"destroy_flag\": false, "
      "\"abort_flag\": {}}}, \"collective_counts\": {{{}}}}}",
      view.rank, quoteJson(hostName()), view.pid, view.device, view.error, yesNo(view.isFinalized),
      yesNo(view.isAborted), countsText(view));
}

std::string missingJson(int rank, const RankView* view) {
  return fmt::format(
      "{{\"rank\": {}, \"host\": {}, \"pid\": {}, \"cuda_dev\": {}, \"nvml_dev\": -1, \"status\": "
      "{{\"unresponsive\": {}, \"considered_dead\": {}}}}}",
      rank, view == nullptr ? "\"\"" : quoteJson(hostName()), view == nullptr ? -1 : view->pid,
      view == nullptr ? -1 : view->device, view == nullptr ? "false" : "true",
      view != nullptr && isDead(*view) ? "true" : "false");
}

std::string timestamp() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local);
  return text;
}

// What a rank does. Progress is known to a quarter of a second.
std::string callText(const RankView& view) {
  constexpr int64_t kBriefly = 500'000'000;
  if (view.calls.empty()) return "no call";
  const Call* current = view.current();
  if (current != nullptr && steadyNow() - view.waitsSince(*current) > kBriefly) {
    return "waits in " + describe(*current);
  }
  return "last call " + describe(view.calls.back());
}

std::string placeText(const RankView& view) {
  return fmt::format("Rank {} -- GPU {} managed by process {} on node {}", view.rank, view.device,
                     view.pid, hostName());
}

}  // namespace

std::string rasJson(const std::vector<RankView>& views, std::string_view ncclVersion) {
  std::vector<std::string> communicators;
  for (const auto& [id, group] : groupsOf(views)) {
    std::vector<std::string> ranks, missing;
    for (const RankView* view : group.known) {
      (view->isSilent() ? missing : ranks)
          .push_back(view->isSilent() ? missingJson(view->rank, view) : rankJson(*view));
    }
    for (const int rank : group.missing()) missing.push_back(missingJson(rank, nullptr));
    communicators.push_back(fmt::format(
        "{{\"hash\": \"0x{:x}\", \"secondary_hash\": \"0x0:0x0\", \"name\": {}, \"size\": {}, "
        "\"ranks_count\": {}, \"missing_ranks_count\": {},\n\"ranks\": [{}],\n\"missing_ranks\": "
        "[{}]}}",
        id, quoteJson(group.known.front()->name), group.ranks, ranks.size(), missing.size(),
        fmt::join(ranks, ",\n"), fmt::join(missing, ",\n")));
  }
  return fmt::format(
      "{{\"nccl_version\": {}, \"cuda_runtime_version\": 0, \"cuda_driver_version\": 0, "
      "\"timestamp\": \"{}\", \"communicators_count\": {},\n\"communicators\": [{}],\n\"ras\": "
      "{{\"collection_time_sec\": 0.000, \"timeouts_count\": 0}}}}\n",
      quoteJson(ncclVersion), timestamp(), communicators.size(), fmt::join(communicators, ",\n"));
}

std::string rasText(const std::vector<RankView>& views, std::string_view ncclVersion,
                    bool verbose) {
  const auto groups = groupsOf(views);
  std::set<int64_t> processes;
  std::set<int> devices;
  for (const auto& [id, group] : groups) {
    for (const RankView* view : group.known) {
      processes.insert(view->pid);
      devices.insert(view->device);
    }
  }
  std::string text = fmt::format(
      "NCCL version {}\n\nJob summary (this node)\n===========\n\n"
      "Processes: {}, GPUs: {}, communicators: {}\n\nCommunicators\n=============\n\n",
      ncclVersion, processes.size(), devices.size(), groups.size());
  std::string errors, warnings;
  text += "            Hash     Ranks   Missing    Status  Errors  Name\n";
  for (const auto& [id, group] : groups) {
    const auto silent = [](const RankView* view) { return view->isSilent(); };
    const auto missing = group.missing();
    const auto gone =
        static_cast<size_t>(std::ranges::count_if(group.known, silent)) + missing.size();
    const bool failed =
        std::ranges::any_of(group.known, [](const RankView* view) { return view->error != 0; });
    const bool finalized = group.known.front()->isFinalized;
    text += fmt::format("{:016x}  {:8}  {:8}  {:>8}  {:>6}  {}\n", id, group.ranks, gone,
                        finalized ? "FINALIZE" : "RUNNING",
                        failed      ? "ERROR"
                        : gone != 0 ? "INCOMPL"
                                    : "OK",
                        group.known.front()->name);
    if (gone != 0) errors += fmt::format("{:016x} INCOMPLETE\n", id);
    for (const int rank : missing) errors += fmt::format("  Rank {} -- no information\n", rank);
    std::set<uint64_t> collectives;
    for (const RankView* view : group.known) {
      const std::string place = placeText(*view);
      if (view->isSilent()) {
        errors += fmt::format("  {}: {}\n", place,
                              isDead(*view)                ? "dead"
                              : view->processState.empty() ? "does not answer"
                                                           : view->processState);
      }
      if (view->error != 0) {
        errors +=
            fmt::format("{:016x} ERROR\n  {}: asynchronous error {}\n", id, place, view->error);
      }
      collectives.insert(view->lastCollective());
      if (!verbose) continue;
      text += fmt::format("    {}: {}\n", place, callText(*view));
    }
    if (collectives.size() < 2) continue;
    warnings += fmt::format(
        "{:016x} MISMATCH\n  Communicator ranks have made different numbers of "
        "collective calls\n",
        id);
    for (const RankView* view : group.known) {
      warnings += fmt::format("  {}: up to {}\n", placeText(*view), view->lastCollective());
    }
  }
  text += fmt::format("\nErrors\n======\n\n{}\nWarnings\n========\n\n{}", errors, warnings);
  return text;
}

RasPeers rasPeers(const std::vector<RankView>& views) {
  RasPeers peers;
  for (const RankView& view : views) {
    if (!view.isKnown || view.hasLeft) continue;
    RasPeer& peer = peers[view.pid];
    peer.devices.insert(view.device);
    peer.isDead = isDead(view);
  }
  return peers;
}

std::vector<RasEvent> rasEvents(const RasPeers& before, const RasPeers& after) {
  std::vector<RasEvent> events;
  for (const auto& [process, peer] : after) {
    const auto known = before.find(process);
    const bool isNew = known == before.end();
    if (isNew) events.push_back({"PEER_NEW", process, peer});
    if (peer.isDead && (isNew || !known->second.isDead)) {
      events.push_back({"PEER_DEAD", process, peer});
    }
  }
  return events;
}

// The blank at the end precedes details, which NCCL leaves empty for these events.
std::string rasText(const RasEvent& event) {
  return fmt::format("[{}] {}: Process {} on node {} managing GPU{} {} \n", timestamp(), event.name,
                     event.process, hostName(), event.peer.devices.size() > 1 ? "s" : "",
                     fmt::join(event.peer.devices, ","));
}

std::string rasJson(const RasEvent& event) {
  return fmt::format(
      "{{\n  \"timestamp\": \"{}\",\n  \"group\": \"LIFECYCLE\",\n  \"event\": \"{}\",\n  "
      "\"peer\": {{\n    \"host\": {},\n    \"pid\": {},\n    \"cuda_devs\": [{}],\n    "
      "\"nvml_devs\": []\n  }},\n  \"details\": \"\"\n}}\n",
      timestamp(), event.name, quoteJson(hostName()), event.process,
      fmt::join(event.peer.devices, ","));
}

}  // namespace unisono::diagnose
