// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/settings.h"

namespace unisono::comm {

// Answers clients of NCCL's RAS protocol, from the first call in this process until it ends:
// NCCL_RAS_ENABLE, NCCL_RAS_ADDR. One process of a host gets the address; that the others do not is
// one warning of each.
void startRasService(const Settings& settings);

}  // namespace unisono::comm
