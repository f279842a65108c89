// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace unisono::transport {

// The FIFOs of the tests. The files of a test program may be compiled together, so that a constant
// of several of them is defined once.
inline constexpr uint32_t kSlots = 4, kSlotBytes = 4096;

}  // namespace unisono::transport
