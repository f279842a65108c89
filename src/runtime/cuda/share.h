// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "runtime/runtime.h"

// Handing memory to other ranks: ours and what the application allocated, to this process by
// pointer and to other processes by POSIX descriptor or fabric handle (VMM memory) or legacy CUDA
// IPC (cudaMalloc memory).
namespace unisono::runtime {

// See Runtime::retainRun. A VMM allocation is retained once, and kept until the allocation goes:
// ours withdraws its offer; an application's is found gone at a later export, so that the physical
// memory of a freed one can outlive it until then.
void retainCudaMemory(const void* address);

// See Runtime::exportMemory. The allocation was retained.
MemoryHandle exportCudaMemory(const void* address, size_t bytes);

// See Runtime::importRun. Ranges of one allocation share one mapping. A descriptor is preferred;
// a fabric handle serves where the exporter's service of descriptors cannot be reached: from
// another host, or from a container with a network namespace of its own.
std::shared_ptr<MappedMemory> importCudaMemory(std::span<const MemoryHandle> handles, int device);

// Ends the offer of the allocation that starts at `base`, if there is one.
void withdrawOffer(const void* base);

// Ends the offers of all allocations that were freed.
void withdrawFreedOffers();

// What the driver knows about an address, without making a context or leaving an error.
PointerInfo inspectPointer(const void* address);

// See Runtime::findAllocation.
Allocation findCudaAllocation(const void* address);

}  // namespace unisono::runtime
