// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "device/work.h"

// How many steps of a FIFO a work takes, as the kernels count them (device/collective,
// device/protocol): for what the CPU tells of the slots that pass.
namespace unisono::plan {

// A rank's place in the ring of a channel.
struct RingPlace {
  int rank, ranks;
  int previous, next;
  int position;
};
struct RingSteps {
  uint64_t received = 0, sent = 0;
};
RingSteps ringSteps(const device::CollectiveWork& work, int channel, const RingPlace& place);
// On each edge of the tree of a channel, in each direction.
uint64_t treeSteps(const device::CollectiveWork& work, int channel);
// The same between the heads of nodes (NVLSTree), of which a node has `heads`.
uint64_t headSteps(const device::CollectiveWork& work, int channel, int heads);
// Of channel `index` of those that carry a message.
uint64_t messageSteps(const device::Message& message, int index);

}  // namespace unisono::plan
