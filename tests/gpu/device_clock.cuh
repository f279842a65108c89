// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace unisono::test {

// Nanoseconds of the GPU's clock.
__device__ inline unsigned long long deviceNs() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace unisono::test
