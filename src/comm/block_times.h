// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/work.h"
#include "plan/plan.h"
#include "runtime/runtime.h"

namespace unisono::comm {

// Memory of the host in which the blocks of launches note when they begin and end. It is allocated
// once, because allocating may wait for kernels that run, and is taken and given back in the order
// of the launches.
class BlockTimes {
 public:
  explicit BlockTimes(runtime::Runtime& runtime);

  // The times of one launch. Nobody has noted any yet.
  struct Launch {
    device::BlockTime* onDevice = nullptr;
    std::span<device::BlockTime> blocks;
    uint64_t end = 0;  // for giveBack()
  };
  // Nothing if too much is taken. By one thread at a time, as the next one.
  std::optional<Launch> take(int blocks);
  // Gives back what was taken up to a launch. By one thread at a time.
  void giveBack(uint64_t end) { returned_.store(end, std::memory_order_release); }

  // What a block has noted; a time that it has not noted is 0. May be called while kernels run.
  static device::BlockTime read(device::BlockTime& block);

 private:
  static constexpr uint64_t kEntries = 32768;

  const std::shared_ptr<runtime::PinnedMemory> memory_;
  uint64_t taken_ = 0;
  std::atomic<uint64_t> returned_{0};
};

// Blocks of a launch that carry a call of a group.
struct CallBlocks {
  size_t call;
  int first, count;
};
// Launches do not name their calls. Which of `calls` a block carries follows from the buffers, so
// that calls that use the same buffer get the blocks of each other, too.
std::vector<CallBlocks> blocksByCall(const plan::Launch& launch, std::span<const plan::Task> calls,
                                     int ranks);

}  // namespace unisono::comm
