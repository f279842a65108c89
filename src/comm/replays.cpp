// SPDX-License-Identifier: Apache-2.0
#include "comm/replays.h"

#include <algorithm>

#include "diagnose/journal.h"
#include "diagnose/rank_view.h"

namespace unisono::comm {
namespace {

constexpr size_t kGroupsOfABlock = 512;  // 4 KiB of counters

}  // namespace

Replays::Captured Replays::add(std::span<const plan::Task> calls, const uint64_t* marks) {
  const std::lock_guard lock(mutex_);
  marks_ = marks;
  if (free_ == 0) {
    const size_t bytes = kGroupsOfABlock * sizeof(uint64_t);
    next_ = reinterpret_cast<uint64_t*>(arena_->allocate(bytes).address);
    free_ = kGroupsOfABlock;
  }
  Group group;
  const auto isMessage = [](const plan::Task& call) {
    return call.call == plan::Call::send || call.call == plan::Call::receive;
  };
  const auto collective = std::ranges::find_if_not(calls, isMessage);
  group.call = diagnose::callOf(collective == calls.end() ? calls.front() : *collective);
  group.call.index = groups_.size() + 1;
  group.call.launch = 1;
  for (const plan::Task& call : calls) {
    if (isMessage(call)) {
      group.messages[{call.peer, call.call == plan::Call::send}].add(
          diagnose::callOf(call).bytes());
    } else {
      group.collectives.push_back(diagnose::callOf(call));
    }
  }
  group.begun = next_;
  groups_.push_back(std::move(group));
  free_--;
  return {groups_.size(), next_++};
}

void Replays::setLaunches(uint64_t marks, std::vector<LaunchNote> launches) {
  const std::lock_guard lock(mutex_);
  groups_.back().marks = marks;
  groups_.back().launches = std::make_shared<const std::vector<LaunchNote>>(std::move(launches));
}

std::optional<LaunchNote> Replays::findLaunch(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const uint64_t group = planOf(number);
  if (group == 0 || group > groups_.size()) return std::nullopt;
  const auto& launches = groups_[group - 1].launches;
  if (launches == nullptr) return std::nullopt;
  const auto found = std::ranges::find(*launches, number, &LaunchNote::number);
  return found == launches->end() ? std::nullopt : std::optional(*found);
}

std::optional<diagnose::Replays> Replays::read(Counts& counts) {
  std::vector<Group> groups;
  const uint64_t* marks = nullptr;
  {
    const std::lock_guard lock(mutex_);
    groups = groups_;
    marks = marks_;
  }
  counts = {};
  if (groups.empty()) return diagnose::Replays{};
  std::vector<const uint64_t*> addresses;
  for (const Group& group : groups) addresses.push_back(group.begun);
  for (int word = 0; word < device::kMarkWords; word++) addresses.push_back(marks + word);
  std::vector<uint64_t> values(addresses.size());
  if (!runtime_.readWords(device_, addresses, values)) return std::nullopt;
  const auto isInKernel = [&](size_t group) {
    return std::any_of(
        values.begin() + static_cast<ptrdiff_t>(groups.size()), values.end(),
        [&](uint64_t mark) { return mark != 0 && mark % 2 == 0 && planOf(mark / 2) == group + 1; });
  };
  diagnose::Replays replays;
  std::map<uint64_t, size_t> kinds;  // places in replays.kinds
  for (size_t i = 0; i < groups.size(); i++) {
    Group& group = groups[i];
    if (group.marks == 0) continue;
    const uint64_t begun = (values[i] + group.marks - 1) / group.marks;
    counts.collectives += begun * group.collectives.size();
    for (const diagnose::Call& call : group.collectives) {
      const uint64_t kind = diagnose::hashOfKind(call);
      replays.hash += begun * kind;
      const auto [known, isNew] = kinds.try_emplace(kind, replays.kinds.size());
      if (isNew) {
        replays.kinds.push_back(call);
        replays.kinds.back().index = replays.kinds.size();
        replays.kinds.back().replay = 0;
      }
      replays.kinds[known->second].replay += begun;
    }
    for (const auto& [flow, sum] : group.messages) {
      const auto& [peer, sends] = flow;
      (sends ? counts.sends : counts.receives)[peer] += begun * sum.count;
      replays.messages[flow] += {begun * sum.count, begun * sum.bytes, begun * sum.hash};
    }
    const bool isDone = values[i] % group.marks == 0 && !isInKernel(i);
    if (isDone || replays.running) continue;
    group.call.replay = begun;
    replays.running = group.call;
  }
  replays.collectives = counts.collectives;
  if (replays.running) replays.running->sequence = counts.collectives;
  return replays;
}

}  // namespace unisono::comm
