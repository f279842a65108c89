// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "topology/search_try.h"

namespace unisono::topology {

// Moves channels from ports that serve many to ports as fast and as near that serve fewer, where
// the links have room and no path gets farther than the solution allows; the channel may have to
// begin at another of its GPUs for that. Only rings and trees that leave by the port they enter.
void balancePorts(const SearchSpace& space, Solution& solution);

}  // namespace unisono::topology
