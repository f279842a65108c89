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
  int groups = 1;  // calls, a launch each
};
inline void PrintTo(const Instance& instance, std::ostream* out) {
  *out << instance.name;
}
const std::vector<Instance>& instances();
const Geometry& proofGeometry(const std::string& name);

// Runs the instance once. Empty, or what is wrong.
std::string runInstance(const Instance& instance, const runtime::host::Schedule& schedule);

// The largest numbers of tasks and steps over some runs under `schedule` with other seeds.
runtime::host::ScheduleCounts measure(const Instance& instance, runtime::host::Schedule schedule);

}  // namespace unisono::protocol
