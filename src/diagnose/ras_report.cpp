// SPDX-License-Identifier: Apache-2.0
#include "diagnose/ras_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <functional>
#include <map>
#include <set>

#include "base/system.h"
#include "diagnose/journal.h"

namespace unisono::diagnose {
namespace {

// The operations that NCCL counts, in its order. Messages are not among them: their numbers differ
// between ranks of a job that is in order.
constexpr plan::Call kCounted[] = {plan::Call::broadcast, plan::Call::reduce, plan::Call::allGather,
                                   plan::Call::reduceScatter, plan::Call::allReduce};

// Details of more ranks than this are shown only if `verbose`.
constexpr size_t kFewRanks = 10;

// NCCL's names of a communicator's status, by bit. With more than one the highest is shown.
enum Status : unsigned { kNoCommunicator = 1, kRunning = 4, kFinalize = 8, kAbort = 16 };
constexpr const char* kStatusNames[] = {"NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT"};
const char* nameOfStatus(unsigned status) {
  return kStatusNames[std::bit_width(status) - 1];
}

std::string nodeOf(const RankView& view) {
  std::string node = view.address;
  if (node.starts_with('[')) node = node.substr(1, node.find_first_of("%]") - 1);  // IPv6
  return node.empty() ? hostName() : node;
}
using Process = std::pair<std::string, int64_t>;  // its node, its id
Process processOf(const RankView& view) {
  return {nodeOf(view), view.pid};
}

bool isDead(const RankView& view) {
  return view.processState == "ended";
}
bool isThere(const RankView& view) {
  return view.isKnown && !view.hasLeft && !view.isSilent();
}
unsigned statusOf(const RankView& view) {
  return view.isAborted ? kAbort : view.isFinalized ? kFinalize : kRunning;
}
bool hasError(const RankView& view) {
  return view.error != 0 && view.error != 7;  // ncclInProgress
}

// A communicator.
struct Group {
  uint64_t id = 0;
  int ranks = 0;
  std::string name;
  std::vector<const RankView*> there;      // ranks that have answered, in order
  std::map<int, const RankView*> missing;  // null: nothing is known of it
  std::vector<int> incomplete;             // of these, those whose processes have not answered
  unsigned status = 0;
  bool mismatch = false, error = false;
  std::set<Process> processes;
  std::map<std::string, int> ranksOfNode;

  std::string errors() const {
    std::vector<const char*> names;
    if (!incomplete.empty()) names.push_back("INCOMPL");
    if (error) names.push_back("ERROR");
    if (mismatch) names.push_back("MISMATCH");
    return names.empty() ? "OK" : fmt::format("{}", fmt::join(names, "|"));
  }
};

struct Overview {
  std::vector<Group> groups;  // the largest first
  std::map<Process, RasPeer> processes;
  std::set<Process> answering;
};

Overview overviewOf(const JobState& job) {
  Overview overview;
  std::map<uint64_t, Group> groups;
  for (const RankView& view : job.views) {
    if (view.hasLeft) continue;
    RasPeer& process = overview.processes[processOf(view)];
    process.devices.insert(view.device);
    process.isDead = process.isDead || isDead(view);
    if (isThere(view)) overview.answering.insert(processOf(view));
    Group& group = groups[view.id];
    group.id = view.id;
    group.ranks = view.ranks;
    if (isThere(view)) {
      group.there.push_back(&view);
    } else {
      group.missing[view.rank] = &view;
    }
    if (!view.name.empty()) group.name = view.name;
  }
  for (auto& [id, group] : groups) {
    // Nobody is left who could say that it exists.
    if (group.there.empty() && group.missing.empty()) continue;
    std::ranges::sort(group.there, {}, &RankView::rank);
    std::set<int> known;
    for (const RankView* view : group.there) {
      known.insert(view->rank);
      group.status |= statusOf(*view);
      group.error = group.error || hasError(*view);
      group.processes.insert(processOf(*view));
      group.ranksOfNode[nodeOf(*view)]++;
      for (const plan::Call call : kCounted) {
        const auto index = static_cast<size_t>(call);
        if (view->counts[index] != group.there.front()->counts[index]) group.mismatch = true;
      }
    }
    for (int rank = 0; rank < group.ranks; rank++) {
      if (!known.contains(rank)) group.missing.try_emplace(rank, nullptr);
    }
    for (const auto& [rank, view] : group.missing) {
      if (view != nullptr && overview.answering.contains(processOf(*view))) {
        group.status |= kNoCommunicator;
        group.mismatch = true;
      } else {
        group.incomplete.push_back(rank);
      }
    }
    if (group.status == 0) group.status = kNoCommunicator;
    if (!std::has_single_bit(group.status)) group.mismatch = true;
    overview.groups.push_back(std::move(group));
  }
  std::ranges::stable_sort(overview.groups, std::ranges::greater(), &Group::ranks);
  return overview;
}

std::string countsText(const RankView& view) {
  std::vector<std::string> parts;
  for (const plan::Call call : kCounted) {
    parts.push_back(
        fmt::format("\"{}\": {}", nameOf(call), view.counts[static_cast<size_t>(call)]));
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
      view.rank, quoteJson(nodeOf(view)), view.pid, view.device, view.error,
      yesNo(view.isFinalized), yesNo(view.isAborted), countsText(view));
}

std::string missingJson(int rank, const RankView* view, bool isUnresponsive) {
  return fmt::format(
      "{{\"rank\": {}, \"host\": {}, \"pid\": {}, \"cuda_dev\": {}, \"nvml_dev\": -1, \"status\": "
      "{{\"unresponsive\": {}, \"considered_dead\": {}}}}}",
      rank, view == nullptr ? "\"unknown\"" : quoteJson(nodeOf(*view)),
      view == nullptr ? -1 : view->pid, view == nullptr ? -1 : view->device,
      isUnresponsive ? "true" : "false", view != nullptr && isDead(*view) ? "true" : "false");
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

std::string placeText(const RankView* view) {
  if (view == nullptr) return "[process information not found]";
  return fmt::format("GPU {} managed by process {} on node {}", view->device, view->pid,
                     nodeOf(*view));
}

std::string processText(const Process& process, const RasPeer& peer) {
  return fmt::format("Process {} on node {} managing GPU{} {}", process.second, process.first,
                     peer.devices.size() > 1 ? "s" : "", fmt::join(peer.devices, ","));
}

// "2", or "2-3" where numbers differ.
std::string rangeText(const std::vector<int>& numbers) {
  if (numbers.empty()) return "0";
  const auto [least, most] = std::ranges::minmax_element(numbers);
  return *least == *most ? fmt::format("{}", *least) : fmt::format("{}-{}", *least, *most);
}

const char* errorText(int error) {
  static constexpr const char* kNames[] = {"Success",
                                           "Unhandled CUDA error",
                                           "System error",
                                           "Internal error",
                                           "Invalid argument",
                                           "Invalid usage",
                                           "Remote process error",
                                           "NCCL operation in progress",
                                           "Remote process error"};
  const auto index = static_cast<size_t>(error);
  return index < std::size(kNames) ? kNames[index] : "Unexpected error";
}

// Ranks by what they have in common, which `say` tells of several and of one of them.
template <typename Key, typename Say>
std::string breakdown(const std::vector<const RankView*>& ranks, bool verbose, Key key, Say say) {
  std::map<decltype(key(*ranks.front())), std::vector<const RankView*>> parts;
  for (const RankView* view : ranks) parts[key(*view)].push_back(view);
  std::vector<const std::vector<const RankView*>*> ordered;
  for (const auto& [value, part] : parts) ordered.push_back(&part);
  std::ranges::stable_sort(ordered, std::ranges::greater(),
                           [](auto* part) { return part->size(); });
  std::string text;
  for (const auto* part : ordered) {
    const auto value = key(*part->front());
    if (part->size() == 1) {
      const RankView* view = part->front();
      text += fmt::format("  Rank {} {} -- {}\n", view->rank, say(value, false), placeText(view));
      continue;
    }
    text += fmt::format("  {} ranks {}\n", part->size(), say(value, true));
    // Only those that stand out.
    const bool isRare = part->size() * 4 <= ranks.size() && part->size() <= kFewRanks;
    if (!isRare && !(verbose && part->size() * 2 <= ranks.size())) continue;
    for (const RankView* view : *part) {
      text += fmt::format("  Rank {} -- {}\n", view->rank, placeText(view));
    }
  }
  return text;
}

std::string mismatchText(const Group& group, bool verbose) {
  std::string text;
  if (!std::has_single_bit(group.status)) {
    text += "  Communicator ranks have different status\n";
    if (!group.there.empty()) {
      text += breakdown(group.there, verbose, statusOf, [](unsigned status, bool several) {
        return fmt::format("{} status {}", several ? "have" : "has", nameOfStatus(status));
      });
    }
    for (const auto& [rank, view] : group.missing) {
      if (std::ranges::find(group.incomplete, rank) != group.incomplete.end()) continue;
      text += fmt::format("  Rank {} has status NOCOMM -- {}\n", rank, placeText(view));
    }
    text += "\n";
  }
  for (const plan::Call call : kCounted) {
    const auto count = [&](const RankView& view) { return view.counts[static_cast<size_t>(call)]; };
    const auto isFirst = [&](const RankView* view) {
      return count(*view) == count(*group.there.front());
    };
    if (std::ranges::all_of(group.there, isFirst)) continue;
    text += fmt::format("  Communicator ranks have different {} operation counts\n", nameOf(call));
    text += breakdown(group.there, verbose, count, [](uint64_t number, bool several) {
      const char* have = several ? "have" : "has";
      return number == 0 ? fmt::format("{} not launched any operations", have)
                         : fmt::format("{} launched up to operation {}", have, number);
    });
    text += "\n";
  }
  return text;
}

std::string incompleteText(const Group& group, bool verbose) {
  const size_t count = group.incomplete.size();
  std::string text =
      fmt::format("  Missing communicator data from {} rank{}\n", count, count > 1 ? "s" : "");
  if (count > kFewRanks && !verbose) return text + "\n";
  for (const int rank : group.incomplete) {
    text += fmt::format("  Rank {} -- {}\n", rank, placeText(group.missing.at(rank)));
  }
  return text + "\n";
}

std::string errorsText(const Group& group, bool verbose) {
  std::vector<const RankView*> failed;
  for (const RankView* view : group.there) {
    if (hasError(*view)) failed.push_back(view);
  }
  const char* plural = failed.size() > 1 ? "s" : "";
  return fmt::format("  Asynchronous error{} on {} rank{}\n", plural, failed.size(), plural) +
         breakdown(
             failed, verbose, [](const RankView& view) { return view.error; },
             [](int error, bool) { return fmt::format("reported {}", errorText(error)); }) +
         "\n";
}

std::string processesText(const Overview& overview, bool dead) {
  std::vector<std::string> lines;
  for (const auto& [process, peer] : overview.processes) {
    if (overview.answering.contains(process) || dead != peer.isDead) continue;
    lines.push_back(fmt::format("  {}\n", processText(process, peer)));
  }
  if (lines.empty()) return "";
  const size_t count = lines.size();
  return fmt::format(
      "{}\n  {}\n{}\n", dead ? "DEAD" : "INCOMPLETE",
      dead ? fmt::format("{} job process{} considered dead", count, count > 1 ? "es are" : " is")
           : fmt::format("Missing communicator data from {} job process{}", count,
                         count > 1 ? "es" : ""),
      fmt::join(lines, ""));
}

std::string summaryText(const Overview& overview) {
  std::map<std::string, int> processesOfNode;
  std::vector<int> devices;
  int gpus = 0;
  for (const auto& [process, peer] : overview.processes) {
    processesOfNode[process.first]++;
    devices.push_back(static_cast<int>(peer.devices.size()));
    gpus += devices.back();
  }
  std::vector<int> processes;
  for (const auto& [node, count] : processesOfNode) processes.push_back(count);
  return fmt::format(
      "Job summary\n===========\n\n"
      "  Nodes  Processes         GPUs  Processes     GPUs\n"
      "(total)   per node  per process    (total)  (total)\n"
      "{:7}  {:>9}  {:>11}  {:9}  {:7}\n",
      processes.size(), rangeText(processes), rangeText(devices), overview.processes.size(), gpus);
}

}  // namespace

std::string rasJson(const JobState& job, std::string_view ncclVersion) {
  const Overview overview = overviewOf(job);
  std::vector<std::string> communicators;
  for (const Group& group : overview.groups) {
    std::vector<std::string> ranks, missing;
    for (const RankView* view : group.there) ranks.push_back(rankJson(*view));
    for (const auto& [rank, view] : group.missing) {
      const bool isUnresponsive =
          std::ranges::find(group.incomplete, rank) != group.incomplete.end();
      missing.push_back(missingJson(rank, view, isUnresponsive));
    }
    communicators.push_back(fmt::format(
        "{{\"hash\": \"0x{:x}\", \"secondary_hash\": \"0x0:0x0\", \"name\": {}, \"size\": {}, "
        "\"ranks_count\": {}, \"missing_ranks_count\": {},\n\"ranks\": [{}],\n\"missing_ranks\": "
        "[{}]}}",
        group.id, quoteJson(group.name), group.ranks, ranks.size(), missing.size(),
        fmt::join(ranks, ",\n"), fmt::join(missing, ",\n")));
  }
  return fmt::format(
      "{{\"nccl_version\": {}, \"cuda_runtime_version\": 0, \"cuda_driver_version\": 0, "
      "\"timestamp\": \"{}\", \"communicators_count\": {},\n\"communicators\": [{}],\n\"ras\": "
      "{{\"collection_time_sec\": {:.3f}, \"timeouts_count\": {}}}}}\n",
      quoteJson(ncclVersion), timestamp(), communicators.size(), fmt::join(communicators, ",\n"),
      job.seconds, job.timeouts);
}

std::string rasText(const JobState& job, std::string_view ncclVersion, bool verbose) {
  const Overview overview = overviewOf(job);
  std::string text = fmt::format("NCCL version {}\n\n{}", ncclVersion, summaryText(overview));
  text += fmt::format("\nCommunicators... ({:.2f}s)\n=============\n\n", job.seconds);
  if (overview.groups.empty()) text += "No communicator data collected!\n";
  // Those that look the same are one line.
  std::map<const Group*, std::string> numbers;
  std::vector<std::vector<const Group*>> lines;
  for (const Group& group : overview.groups) {
    const auto line = std::ranges::find_if(lines, [&](const auto& like) {
      return like.front()->ranks == group.ranks && like.front()->status == group.status &&
             like.front()->errors() == group.errors() &&
             like.front()->ranksOfNode.size() == group.ranksOfNode.size();
    });
    auto& where = line == lines.end() ? lines.emplace_back() : *line;
    numbers[&group] =
        fmt::format("#{}-{} ({:016x})", &where - lines.data(), where.size(), group.id);
    where.push_back(&group);
  }
  if (!lines.empty()) {
    text +=
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n";
  }
  for (const auto& like : lines) {
    std::set<std::tuple<std::string, int64_t, int>> gpus;
    std::vector<int> perNode;
    for (const Group* group : like) {
      for (const RankView* view : group->there) {
        gpus.emplace(nodeOf(*view), view->pid, view->device);
      }
      for (const auto& [node, count] : group->ranksOfNode) perNode.push_back(count);
    }
    const Group& first = *like.front();
    text += fmt::format("{:5}  {:8}  {:8}  {:>8}  {:8}  {:8}  {:>8}  {:>6}\n", &like - lines.data(),
                        like.size(), first.ranksOfNode.size(), rangeText(perNode), first.ranks,
                        gpus.size(), nameOfStatus(first.status), first.errors());
  }
  if (verbose) {
    for (const Group& group : overview.groups) {
      text += fmt::format("\n{}{}{}\n", numbers[&group], group.name.empty() ? "" : " ", group.name);
      for (const RankView* view : group.there) {
        text += fmt::format("  Rank {} {} -- {}\n", view->rank, callText(*view), placeText(view));
      }
    }
  }
  text += "\nErrors\n======\n\n" + processesText(overview, false) + processesText(overview, true);
  for (const Group& group : overview.groups) {
    if (!group.incomplete.empty()) {
      text += numbers[&group] + " INCOMPLETE\n" + incompleteText(group, verbose);
    }
    if (group.error) text += numbers[&group] + " ERROR\n" + errorsText(group, verbose);
  }
  text += "Warnings\n========\n\n";
  if (job.timeouts > 0) {
    text += fmt::format(
        "TIMEOUT\n  Encountered {} communication timeout{} while gathering "
        "communicator data\n\n",
        job.timeouts, job.timeouts > 1 ? "s" : "");
  }
  for (const Group& group : overview.groups) {
    if (group.mismatch) text += numbers[&group] + " MISMATCH\n" + mismatchText(group, verbose);
  }
  return text;
}

RasPeers rasPeers(const JobState& job) {
  RasPeers peers;
  for (const auto& [process, peer] : overviewOf(job).processes) peers[process] = peer;
  return peers;
}

std::vector<RasEvent> rasEvents(const RasPeers& before, const RasPeers& after) {
  std::vector<RasEvent> events;
  for (const auto& [process, peer] : after) {
    const auto known = before.find(process);
    const bool isNew = known == before.end();
    if (isNew) events.push_back({"PEER_NEW", process.first, process.second, peer});
    if (peer.isDead && (isNew || !known->second.isDead)) {
      events.push_back({"PEER_DEAD", process.first, process.second, peer});
    }
  }
  return events;
}

// The blank at the end precedes details, which NCCL leaves empty for these events.
std::string rasText(const RasEvent& event) {
  return fmt::format("[{}] {}: {} \n", timestamp(), event.name,
                     processText({event.address, event.process}, event.peer));
}

std::string rasJson(const RasEvent& event) {
  return fmt::format(
      "{{\n  \"timestamp\": \"{}\",\n  \"group\": \"LIFECYCLE\",\n  \"event\": \"{}\",\n  "
      "\"peer\": {{\n    \"host\": {},\n    \"pid\": {},\n    \"cuda_devs\": [{}],\n    "
      "\"nvml_devs\": []\n  }},\n  \"details\": \"\"\n}}\n",
      timestamp(), event.name, quoteJson(event.address), event.process,
      fmt::join(event.peer.devices, ","));
}

}  // namespace unisono::diagnose
