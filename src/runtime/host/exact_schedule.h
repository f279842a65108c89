// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "runtime/host/executor.h"
#include "runtime/host/explorer.h"
#include "runtime/host/wait_graph.h"
#include "runtime/host/weak_memory.h"

namespace unisono::runtime::host {

// Names of ranges of memory, for reports.
class MemoryNames {
 public:
  void add(const void* address, size_t bytes, std::string name);
  // "tail of connection 3 -> 2, channel 0", "+ 16" if it is inside, or the number.
  std::string nameOf(const void* address) const;

 private:
  struct Range {
    uintptr_t end;
    std::string name;
  };
  std::map<uintptr_t, Range> ranges_;
};

// The order of tasks when every access is a step: who runs, when a task has to give way, who waits
// for what, and what loads return. A task that polls runs again only when something that it looked
// at has changed.
class ExactSchedule {
 public:
  struct Step {
    uint64_t number;
    Access access;
    uint64_t value;   // stored or read
    uint64_t newest;  // what a load would have found, had it not read an older store
  };
  // What is kept of a task until the next schedule.
  struct TaskState {
    TaskInfo info;
    uint64_t number = 0;
    uint64_t priority = 0;
    size_t memory = 0;  // its number in the WeakMemory
    Access pending;     // what it does when it runs; Kind::none: not known
    // Since its look at a condition began:
    std::vector<const void*> watched;
    bool newsCame = false;   // one of them was written
    bool hasLooked = false;  // the look has ended without success
    bool advanced = false;   // it read a newer store than before
    bool sawStale = false;   // it read a store that was not the newest
    bool blocked = false;
    bool readsNewest = false;
    static constexpr size_t kSteps = 8;
    std::array<Step, kSteps> steps{};
    size_t stepCount = 0;
  };

  ExactSchedule(const Schedule& schedule, const MemoryNames& names, WeakMemory& memory);

  // `before`: what the task that started it had done by then; null: no task did.
  TaskState& add(const TaskInfo& info, uint64_t number, const SyncPoint& before);
  void end(TaskState& task, bool isRoot);

  // Whether the running task has to let the schedule choose before it makes `access`.
  bool givesWay(TaskState& task, const Access& access);
  // Makes it. Throws Error for a data race.
  uint64_t perform(TaskState& task, const Access& access);
  void notePlain(TaskState& task, const void* address, size_t bytes, bool writes);

  void forgetMemory(const void* address, size_t bytes) { memory_.forget(address, bytes); }

  void polled(TaskState& task);
  void progressed(TaskState& task);
  // Which of `tasks`, none blocked, runs.
  size_t choose(const std::vector<TaskState*>& tasks);

  SyncPoint published(TaskState& task, const SyncPoint& together);
  void observed(TaskState& task, const SyncPoint& what);

  ScheduleCounts counts() const { return counts_; }
  std::string lastSteps() const;

 private:
  size_t chooseAmong(const std::vector<TaskState*>& tasks);
  static void beginLook(TaskState& task);
  bool checksRaces() const { return schedule_.memory != Schedule::Memory::machine; }
  bool isWeak() const { return schedule_.memory == Schedule::Memory::weak; }
  void checkRace(TaskState& task, const void* address, size_t bytes, bool writes, bool isAtomic);
  [[noreturn]] void reportRace(const WeakMemory::Race& race) const;

  Schedule schedule_;
  const MemoryNames& names_;
  WeakMemory& memory_;
  std::deque<TaskState> states_;  // in the order of their numbers in memory_
  std::vector<TaskState*> live_;
  std::vector<uint64_t> changes_;  // PCT: the steps at which priorities change, last first
  uint64_t lowestPriority_;
  bool newcomers_ = false;  // a task became able to run since the last choice
  uint64_t random_;
  uint64_t walkPeriod_;
  ScheduleCounts counts_;
  SyncPoint ended_;  // what tasks did that no task started
};

}  // namespace unisono::runtime::host
