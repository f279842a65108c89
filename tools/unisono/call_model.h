// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/settings.h"
#include "plan/plan.h"
#include "topo_view.h"
#include "tuning/messages.h"
#include "tuning/model.h"

// The cost model of a communicator that the commands do not create.
namespace unisono::explain {

struct Assumptions {
  bool asNccl = false;     // NCCL's algorithms, as if all were implemented, and none of ours
  bool multicast = false;  // NVLink multicast is there
  bool network = false;    // nodes exchange data over a network, not through shared memory
  bool sockets = false;    // that network is TCP sockets
  bool collnet = false;    // the network reduces
  // What it can do, as tuning::CommFacts::collnetReductions and the members after it.
  uint64_t collnetReductions = ~uint64_t{0};
  bool collnetAllGather = true, collnetReduceScatter = true;
};

// How the GPUs of a machine reach each other.
struct GpuReach {
  bool node = true;         // those of each node map each other's memory
  bool hostMemory = false;  // some exchange data through memory of the host
};
GpuReach reachOf(const topo::View& view);

// What UNISONO_TUNING_FILE says. Throws Error for a file that a communicator would refuse.
tuning::Measurements measurementsOf(const Settings& settings);

// What a communicator on the machine of `view` with these settings would choose by. Throws Error
// for settings or a UNISONO_TUNING_FILE that it would refuse.
tuning::ModelInput modelInputOf(const Settings& settings, const topo::View& view,
                                const Assumptions& assumptions);

// The part of its config that is about messages, with the model of `input`.
plan::CommConfig messageConfigOf(const Settings& settings, const topo::View& view,
                                 tuning::ModelInput input);

// What joins ranks that exchange messages, for the time that these are predicted to take: inside a
// node, and between nodes.
tuning::MessageLink linkInside(const topo::View& view);
tuning::MessageLink linkBetween(const topo::View& view, const tuning::CommFacts& facts,
                                tuning::MessageOperation operation);

}  // namespace unisono::explain
