// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/launch_notes.h"
#include "diagnose/call_table.h"

namespace unisono::comm {

// How far a launch of the direct family is, for reports of hangs. Kernels count nothing for this:
// flags of lines and words of the windows tell it.
class DirectLinks {
 public:
  // As runtime::Runtime::readWords.
  using ReadWords = std::function<bool(std::span<const uint64_t* const>, std::span<uint64_t>)>;

  // Memory of a family that is not connected has no window. `marks`: those of the kernels.
  DirectLinks(const plan::CommConfig& config, const device::DirectMemory& lines,
              const device::WideMemory& wide, const LaunchNote& note,
              std::span<const uint64_t> marks, ReadWords read);

  // For each peer from which data are awaited, of the block that waits. Nothing if the device does
  // not answer.
  std::optional<std::vector<diagnose::Link>> run();

 private:
  bool isUnfinished(int block, int group = 0) const;
  bool addLines();
  bool addSteps();
  bool addStreams();
  bool addBuffers();
  // A FIFO over LL128 from a peer, in one block. `lastLine` says which line of a step comes last.
  struct Fifo {
    int peer, block;
    uint64_t base = 0, head = 0, tail = 0;
    uint64_t steps = 0;         // of the launch; 0: unknown
    uint64_t stepsPerPass = 1;  // that are acknowledged together
  };
  bool readHeads(std::vector<Fifo>& fifos);
  template <typename LastLine>
  bool readTails(std::vector<Fifo>& fifos, LastLine lastLine);
  void add(const Fifo& fifo, bool waits);
  uint64_t shareOf(int rank, uint64_t stride) const;

  const plan::CommConfig& config_;
  const int rank_, ranks_;  // among those of the node
  const int lineBits_;
  const device::DirectMemory& lines_;
  const device::WideMemory& wide_;
  const int windowBlocks_;
  const uint32_t slotLines_;
  const LaunchNote& note_;
  std::span<const uint64_t> marks_;
  ReadWords read_;
  std::vector<diagnose::Link> links_;
};

}  // namespace unisono::comm
