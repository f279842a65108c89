// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "runtime/host/task.h"

namespace unisono::runtime::host {

// What one task that polls waits for.
struct Waiter {
  TaskInfo info;
  WaitReason reason;
};

// "collective block 0 group 1 on device 2", with the role of a task of a split group.
std::string describeTask(const TaskInfo& info);

// Tells in words who waits for whom, with a cycle of ranks if there is one:
//   "2 tasks wait and none can move: ring block 0 group 1 on device 0: rank 0 waits for rank 1
//    (slot, channel 0, wanted 5, seen 4); ...; cycle of ranks 0 -> 1 -> 0"
std::string describeWaits(const std::vector<Waiter>& waiters);

}  // namespace unisono::runtime::host
