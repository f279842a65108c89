// SPDX-License-Identifier: Apache-2.0
#include "runtime/host/exact_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace unisono::runtime::host {
namespace {

using SharedView = WeakMemory::SharedView;

// A walk gives way once in about so many steps, by the seed.
constexpr uint64_t kWalkPeriods[] = {2, 4, 16};

const char* nameOf(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return "relaxed";
    case std::memory_order_acquire:
      return "acquire";
    case std::memory_order_release:
      return "release";
    case std::memory_order_acq_rel:
      return "acquire-release";
    default:
      return "sequentially consistent";
  }
}

const char* nameOf(Access::Kind kind) {
  static constexpr const char* kNames[] = {"none", "load", "store", "exchange", "add", "fence"};
  return kNames[static_cast<size_t>(kind)];
}

const char* nameOfRace(bool writes, bool isAtomic) {
  if (isAtomic) return writes ? "an atomic store" : "an atomic load";
  return writes ? "a plain write" : "a plain read";
}

}  // namespace

void MemoryNames::add(const void* address, size_t bytes, std::string name) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto range = ranges_.lower_bound(begin);
  if (range != ranges_.begin() && std::prev(range)->second.end > begin) --range;
  while (range != ranges_.end() && range->first < begin + bytes) range = ranges_.erase(range);
  ranges_.emplace(begin, Range{begin + bytes, std::move(name)});
}

std::string MemoryNames::nameOf(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto range = ranges_.upper_bound(at);
  if (range == ranges_.begin() || at >= (--range)->second.end) return fmt::format("{:#x}", at);
  if (at == range->first) return range->second.name;
  return fmt::format("{} + {:#x}", range->second.name, at - range->first);
}

ExactSchedule::ExactSchedule(const Schedule& schedule, const MemoryNames& names, WeakMemory& memory)
    : schedule_(schedule),
      names_(names),
      memory_(memory),
      lowestPriority_(static_cast<uint64_t>(std::max(schedule.depth, 1))),
      random_(mix64(static_cast<uint64_t>(schedule.seed) + 1)) {
  walkPeriod_ = kWalkPeriods[splitMix64(random_) % std::size(kWalkPeriods)];
  for (int i = 1; i < schedule.depth; i++) {
    changes_.push_back(1 + splitMix64(random_) % std::max<uint64_t>(schedule.steps, 1));
  }
  std::sort(changes_.begin(), changes_.end(), std::greater<>());
}

ExactSchedule::TaskState& ExactSchedule::add(const TaskInfo& info, uint64_t number,
                                             const SyncPoint& before) {
  if (live_.empty()) {
    // All that was done before is ordered before what comes.
    states_.clear();
    memory_.clear();
    ended_ = nullptr;
  }
  TaskState& task = states_.emplace_back();
  task.info = info;
  task.number = number;
  // Above all priorities that change points assign.
  task.priority = (splitMix64(random_) | uint64_t{1} << 63) - (number & 0xff);
  if (checksRaces()) {
    const SyncPoint& known = before != nullptr ? before : ended_;
    task.memory = memory_.addTask(std::static_pointer_cast<const WeakMemory::View>(known));
  }
  live_.push_back(&task);
  newcomers_ = true;
  counts_.tasks++;
  return task;
}

void ExactSchedule::end(TaskState& task, bool isRoot) {
  std::erase(live_, &task);
  if (isRoot) ended_ = published(task, ended_);
}

bool ExactSchedule::givesWay(TaskState& task, const Access& access) {
  task.pending = access;
  counts_.steps++;
  if (schedule_.explorer != nullptr) return true;
  if (schedule_.depth == 0) return splitMix64(random_) % walkPeriod_ == 0;
  bool changes = std::exchange(newcomers_, false);
  while (!changes_.empty() && changes_.back() <= counts_.steps) {
    changes_.pop_back();
    task.priority = --lowestPriority_;
    changes = true;
  }
  return changes;
}

uint64_t ExactSchedule::perform(TaskState& task, const Access& access) {
  task.pending = {};
  if (access.kind == Access::Kind::none) return 0;
  if (access.kind == Access::Kind::fence) {
    if (isWeak()) memory_.fence(task.memory, access.order);
    return 0;
  }
  if (checksRaces()) checkRace(task, access.address, access.bytes, access.writes(), true);
  uint64_t value;
  uint64_t newest = 0;
  if (!checksRaces()) {
    value = newest = performNow(access);
  } else if (access.kind == Access::Kind::load) {
    const WeakMemory::Loaded loaded =
        memory_.load(task.memory, access, !isWeak() || task.readsNewest, [this](size_t count) {
          if (schedule_.explorer != nullptr) return schedule_.explorer->chooseStore(count);
          return static_cast<size_t>(splitMix64(random_) % count);
        });
    value = loaded.value;
    newest = loaded.newest;
    task.advanced |= loaded.advanced;
    task.sawStale |= loaded.isStale;
    counts_.staleLoads += loaded.isStale;
  } else if (access.kind == Access::Kind::store) {
    memory_.store(task.memory, access);
    value = newest = 0;
  } else {
    value = newest = memory_.modify(task.memory, access);
  }
  if (access.kind == Access::Kind::store) value = newest = access.operand;
  task.steps[task.stepCount++ % TaskState::kSteps] = {counts_.steps, access, value, newest};
  if (access.reads() &&
      std::find(task.watched.begin(), task.watched.end(), access.address) == task.watched.end()) {
    task.watched.push_back(access.address);
  }
  if (access.writes()) {
    for (TaskState* other : live_) {
      if (other == &task) continue;
      const auto& watched = other->watched;
      if (std::find(watched.begin(), watched.end(), access.address) == watched.end()) continue;
      other->newsCame = true;
      newcomers_ |= std::exchange(other->blocked, false);
    }
  }
  return value;
}

void ExactSchedule::notePlain(TaskState& task, const void* address, size_t bytes, bool writes) {
  if (checksRaces()) checkRace(task, address, bytes, writes, false);
}

void ExactSchedule::checkRace(TaskState& task, const void* address, size_t bytes, bool writes,
                              bool isAtomic) {
  const auto race = memory_.note(task.memory, address, bytes, writes, isAtomic);
  if (race) reportRace(*race);
}

void ExactSchedule::reportRace(const WeakMemory::Race& race) const {
  throw internalError(
      "Data race on {}: {} by {} is not ordered after {} by {}. The last steps of each task:\n{}",
      names_.nameOf(race.address), nameOfRace(race.writes, race.isAtomic),
      describeTask(states_[race.task].info), nameOfRace(race.otherWrites, race.otherIsAtomic),
      describeTask(states_[race.other].info), lastSteps());
}

void ExactSchedule::polled(TaskState& task) {
  // Something that was old when it was read may have become known since, by a load that acquired.
  const bool newer =
      isWeak() && (task.sawStale ||
                   std::any_of(task.watched.begin(), task.watched.end(), [&](const void* address) {
                     return memory_.hasNewer(task.memory, address);
                   }));
  // Old stores do not stay visible for ever: a look that brought nothing new, though there was
  // something, is followed by one at the newest.
  task.readsNewest = newer && !task.advanced;
  task.blocked = !task.newsCame && !newer && !task.watched.empty();
  task.hasLooked = true;
  task.pending = {};
}

void ExactSchedule::beginLook(TaskState& task) {
  task.hasLooked = task.newsCame = task.advanced = task.sawStale = false;
  task.watched.clear();
}

void ExactSchedule::progressed(TaskState& task) {
  task.readsNewest = false;
  beginLook(task);
}

size_t ExactSchedule::choose(const std::vector<TaskState*>& tasks) {
  newcomers_ = false;
  const size_t chosen = chooseAmong(tasks);
  if (tasks[chosen]->hasLooked) beginLook(*tasks[chosen]);
  return chosen;
}

size_t ExactSchedule::chooseAmong(const std::vector<TaskState*>& tasks) {
  if (schedule_.explorer != nullptr) {
    std::vector<Explorer::Candidate> candidates;
    for (const TaskState* task : tasks) candidates.push_back({task->number, task->pending});
    return schedule_.explorer->chooseTask(candidates);
  }
  if (schedule_.depth == 0) return splitMix64(random_) % tasks.size();
  const auto first = std::max_element(tasks.begin(), tasks.end(),
                                      [](auto* a, auto* b) { return a->priority < b->priority; });
  return static_cast<size_t>(first - tasks.begin());
}

SyncPoint ExactSchedule::published(TaskState& task, const SyncPoint& together) {
  if (!checksRaces()) return nullptr;
  SharedView own = memory_.release(task.memory);
  if (together != nullptr) {
    WeakMemory::View both = *own;
    both.join(*std::static_pointer_cast<const WeakMemory::View>(together));
    own = std::make_shared<const WeakMemory::View>(std::move(both));
  }
  return own;
}

void ExactSchedule::observed(TaskState& task, const SyncPoint& what) {
  if (!checksRaces() || what == nullptr) return;
  memory_.acquire(task.memory, *std::static_pointer_cast<const WeakMemory::View>(what));
}

std::string ExactSchedule::lastSteps() const {
  std::string text;
  auto out = std::back_inserter(text);
  for (const TaskState& task : states_) {
    if (task.stepCount == 0) continue;
    fmt::format_to(out, "  {}:\n", describeTask(task.info));
    const size_t kept = std::min(task.stepCount, TaskState::kSteps);
    for (size_t i = task.stepCount - kept; i < task.stepCount; i++) {
      const Step& step = task.steps[i % TaskState::kSteps];
      fmt::format_to(out, "    step {}: {} {} {}, {} {}", step.number, nameOf(step.access.order),
                     nameOf(step.access.kind), names_.nameOf(step.access.address),
                     step.access.kind == Access::Kind::store ? "to" : "which held", step.value);
      if (step.value != step.newest) {
        fmt::format_to(out, " (stale: {} was stored before)", step.newest);
      }
      text += '\n';
    }
  }
  return text;
}

}  // namespace unisono::runtime::host
