// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>

#include <string_view>

namespace unisono {

// Restricts the calling thread to some cores until the end of the scope. Threads that it starts
// inherit them, and memory that it touches first is on their NUMA node.
class ScopedCpuAffinity {
 public:
  // `mask` has hexadecimal words of 32 cores separated by commas, the last holds core 0, as
  // topology files have them. Of these cores the thread keeps those that it may use already, or
  // takes all of them with `ignoreOwn`. Nothing changes if no core is left.
  ScopedCpuAffinity(std::string_view mask, bool ignoreOwn);
  ~ScopedCpuAffinity();
  ScopedCpuAffinity(const ScopedCpuAffinity&) = delete;
  ScopedCpuAffinity& operator=(const ScopedCpuAffinity&) = delete;

 private:
  bool changed_ = false;
  cpu_set_t before_;
};

}  // namespace unisono
