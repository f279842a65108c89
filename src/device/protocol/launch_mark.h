// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"
#include "device/work.h"

namespace unisono::device::UNISONO_TARGET {

// By one thread of a group, when it begins and when it ends.
UNISONO_DEVICE void markStart(const LaunchMark& mark, int block, int group) {
  if (mark.words != nullptr) storeForCpu(mark.words + block * kMarkGroups + group, 2 * mark.number);
}
UNISONO_DEVICE void markEnd(const LaunchMark& mark, int block, int group) {
  if (mark.words == nullptr) return;
  storeForCpu(mark.words + block * kMarkGroups + group, 2 * mark.number + 1);
}

}  // namespace unisono::device::UNISONO_TARGET
