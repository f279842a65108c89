// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plan/plan.h"

namespace unisono::diagnose {

// A call of int32 elements, as a journal takes it.
inline plan::Task task(plan::Call call, uint64_t count, int peer = -1) {
  plan::Task made{};
  made.call = call;
  made.count = count;
  made.peer = peer;
  made.reduction.type = device::DataType::int32;
  return made;
}

}  // namespace unisono::diagnose
