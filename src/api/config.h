// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

namespace unisono::api {

// Returns the caller's configuration as a structure of this version: fields that the caller's
// version does not have are undefined, as are all if `given` is null. Throws Error that names the
// field for values that NCCL refuses too.
ncclConfig_t readConfig(const ncclConfig_t* given);

}  // namespace unisono::api
