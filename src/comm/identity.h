// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/settings.h"

namespace unisono::comm {

// Hashes that tell whether two processes run on the same operating system, and whether they count
// as one node: those that can hand each other memory, as they have one network namespace and user,
// unless NCCL_HOSTID says otherwise.
uint64_t machineHash();
uint64_t hostHash(const Settings& settings);

// The device number of /dev/shm: processes of one host that see the same can share host memory. 0
// if there is none.
uint64_t sharedMemoryDevice();

}  // namespace unisono::comm
