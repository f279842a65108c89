// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "seeds.h"

// Small instances of every protocol, whose runs differ in nothing but the schedule. docs/proof.md
// says what running them shows.
namespace unisono::protocol {

struct Instance {
  const char* name;
  const char* protocol;
  plan::Call call;
  int ranks;
  const char* geometry;
  uint64_t count;  // 4-byte integers: of the call, or of a rank's share
  int groups = 1;  // a launch each
  int calls = 1;   // of a group
};
inline void PrintTo(const Instance& instance, std::ostream* out) {
  *out << instance.name;
}
const std::vector<Instance>& instances();
// The core cases, small enough for all their schedules.
const std::vector<Instance>& cores();
const Geometry& proofGeometry(const std::string& name);

// Runs the instance once. Empty, or what is wrong.
std::string runInstance(const Instance& instance, const runtime::host::Schedule& schedule);

// The same with an abort of every rank within about the first `steps` steps, after which each rank
// frees its buffers as soon as its own launches have ended. With no steps the aborts come before
// the launches, and the buffers are freed at any time. What the outputs hold does not matter.
std::string runAborted(const Instance& instance, const runtime::host::Schedule& schedule,
                       uint64_t steps);

// The largest numbers of tasks and steps over some runs under `schedule` with other seeds.
runtime::host::ScheduleCounts measure(const Instance& instance, runtime::host::Schedule schedule);

}  // namespace unisono::protocol
