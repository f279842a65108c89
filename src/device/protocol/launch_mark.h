// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"
#include "device/work.h"

namespace unisono::device::UNISONO_TARGET {

// By one thread of a group, when it begins and when it ends.
UNISONO_DEVICE void markStart(const LaunchMark& mark, int block, int group) {
  if (mark.times != nullptr && group == 0) storeForCpu(&mark.times[block].began, nanoseconds());
  if (mark.words == nullptr) return;
  storeForCpu(mark.words + block * kMarkGroups + group, 2 * mark.number);
  if (mark.replays != nullptr) addForCpu(mark.replays, 1);
}
// The last group of a block leaves the time of its end.
UNISONO_DEVICE void markEnd(const LaunchMark& mark, int block, int group) {
  if (mark.times != nullptr) storeForCpu(&mark.times[block].ended, nanoseconds());
  if (mark.words == nullptr) return;
  storeForCpu(mark.words + block * kMarkGroups + group, 2 * mark.number + 1);
}

// By one thread of a kernel before and after captured calls, whose replays do not overlap.
UNISONO_DEVICE void stampReplay(const StampArguments& arguments) {
  ReplayTimes& times = *arguments.times;
  const uint64_t now = nanoseconds();
  if (arguments.begins) {
    storeOrdered(&times.began, now);
    return;
  }
  const uint64_t number = loadRelaxed(&times.ended);
  ReplayTime& entry = times.entry[number % kReplayTimes];
  storeRelaxed(&entry.number, uint64_t{0});
  releaseStores();
  storeOrdered(&entry.captured, arguments.captured);
  storeOrdered(&entry.began, loadRelaxed(&times.began));
  storeOrdered(&entry.ended, now);
  storeOrdered(&times.ended, number + 1);
  storeRelease(&entry.number, number + 1);
}

}  // namespace unisono::device::UNISONO_TARGET
