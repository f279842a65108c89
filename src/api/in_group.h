// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/boundary.h"
#include "comm/group.h"

namespace unisono::api {

// Runs `body`, which adds to the group, as a group of its own or inside the caller's.
template <typename Body>
ncclResult_t inGroup(Body body) {
  return guarded([&]() -> ncclResult_t {
    comm::CallGroup& group = comm::CallGroup::current();
    group.start();
    group.attempt(body);
    return group.end() ? ncclSuccess : ncclInProgress;
  });
}

}  // namespace unisono::api
