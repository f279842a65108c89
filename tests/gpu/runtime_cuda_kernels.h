// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"

namespace unisono::runtime::test {

// Waits for `delayNs` on the device, then sets `bytes` bytes from `target` to `value`.
struct FillArguments {
  unsigned char* target;
  unsigned long long bytes;
  unsigned long long delayNs;
  unsigned char value;
};

Kernel fillKernel();

}  // namespace unisono::runtime::test
