// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "runtime/runtime.h"

namespace unisono::memory {

// Identifies a block of an arena to another rank: plain data to send.
struct SharedBlock {
  runtime::MemoryHandle handle;  // of the slab
  uint64_t offset;               // of the block inside the slab
};

struct Block {
  std::byte* address;
  SharedBlock shared;
};

// Memory of one communicator that other ranks map, allocated in multiples of `slabBytes`, so
// that a peer maps a few large ranges instead of many small ones and no memory is lost to the
// granularity of the device. Blocks live as long as the arena.
class Arena {
 public:
  // Of the device, or of its host.
  enum class Place { device, host };

  Arena(runtime::Runtime& runtime, int device, size_t slabBytes, Place place = Place::device);

  // Zero-filled, aligned to 4 KiB.
  Block allocate(size_t bytes);

  // Memory in use, in bytes.
  size_t bytes() const;

  // How much is allocated at some point.
  class Mark {
   public:
    size_t bytes() const { return bytes_; }  // of memory in use

   private:
    friend class Arena;
    std::vector<size_t> used_;  // of each slab
    size_t bytes_ = 0;
  };
  Mark mark() const;
  // Frees the blocks that were allocated since, and all memory but that of the mark. Nothing may
  // use them any more.
  void release(const Mark& mark);

 private:
  struct Slab {
    std::shared_ptr<runtime::DeviceMemory> memory;
    runtime::MemoryHandle handle;
    size_t used;
  };

  runtime::Runtime& runtime_;
  int device_;
  size_t slabBytes_;
  Place place_;
  std::vector<Slab> slabs_;
};

}  // namespace unisono::memory
