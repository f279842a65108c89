// SPDX-License-Identifier: Apache-2.0
#include "tuning/direct.h"

#include <algorithm>

#include "device/direct_work.h"

namespace unisono::tuning {

int directLineBits(int ranks) {
  int bits = 17;
  for (int most = 4; most < ranks; most *= 2) bits--;
  return bits;
}

DirectLimits directLimits(int lineBits) {
  DirectLimits limits;
  // Measured on 2 H200: faster than any ring as far as the streams reach.
  limits.shareBytes[static_cast<size_t>(Protocol::ll)] =
      (uint64_t{1} << lineBits) / device::kDirectShares * 8;
  return limits;
}

uint64_t shareOf(Operation operation, uint64_t bytes, int ranks) {
  const bool scatters = operation == Operation::allGather || operation == Operation::reduceScatter;
  if (!scatters) return bytes;
  const auto parts = static_cast<uint64_t>(ranks);
  return bytes / parts + (bytes % parts != 0 ? 1 : 0);
}

DirectShape directShape(uint64_t lines) {
  // Measured on H200 (shared by 2 and 4 GPUs): one block up to 4 KB, then one thread for each line.
  constexpr uint64_t kThreads = device::kDirectMaxThreads;
  const uint64_t blocks =
      std::clamp<uint64_t>((lines + kThreads - 1) / kThreads, 1, device::kDirectMaxBlocks);
  const uint64_t threads = std::clamp<uint64_t>((lines + 31) / 32 * 32, 64, kThreads);
  return {static_cast<int>(blocks), static_cast<int>(threads)};
}

}  // namespace unisono::tuning
