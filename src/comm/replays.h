// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "comm/launch_notes.h"
#include "diagnose/call_table.h"
#include "memory/arena.h"
#include "plan/plan.h"
#include "runtime/runtime.h"

namespace unisono::comm {

// The groups of calls of a communicator that were captured into CUDA graphs, and how often they
// were replayed: nobody but the kernels sees a launch of a graph, and these count in memory of the
// device (device::LaunchMark).
class Replays {
 public:
  Replays(runtime::Runtime& runtime, int device, std::shared_ptr<memory::Arena> arena)
      : runtime_(runtime), device_(device), arena_(std::move(arena)) {}

  // The number of a group that is being captured, and where its kernels count. `calls` may not be
  // empty; `marks` are those of captured launches, which stay where they are from now on.
  struct Captured {
    uint64_t number = 0;  // from 1, in the place of that of a plan
    uint64_t* begun = nullptr;
  };
  Captured add(std::span<const plan::Task> calls, const uint64_t* marks);
  // How many thread groups count in a replay of the group that was added last, and its launches.
  void setLaunches(uint64_t marks, std::vector<LaunchNote> launches);
  // Of a launch of any group.
  std::optional<LaunchNote> findLaunch(uint64_t number);

  // What the calls of all replays that have begun need, as last read.
  struct Counts {
    uint64_t collectives = 0;
    std::map<int, uint64_t> sends, receives;  // by peer
  };
  // Reads the counters and the marks of captured launches, while kernels run. Nothing if the device
  // does not answer.
  std::optional<diagnose::Replays> read(Counts& counts);

 private:
  struct Group {
    diagnose::Call call;  // that stands for the group
    std::vector<diagnose::Call> collectives;
    // By peer, and whether they are sent.
    std::map<std::pair<int, bool>, diagnose::MessageSum> messages;
    std::shared_ptr<const std::vector<LaunchNote>> launches;
    const uint64_t* begun = nullptr;
    uint64_t marks = 0;  // 0: it is still being captured
  };

  runtime::Runtime& runtime_;
  const int device_;
  const std::shared_ptr<memory::Arena> arena_;
  std::mutex mutex_;
  std::vector<Group> groups_;
  const uint64_t* marks_ = nullptr;  // set with the first group
  uint64_t* next_ = nullptr;         // of the words that are allocated
  size_t free_ = 0;                  // groups that they are for
};

}  // namespace unisono::comm
