#pragma once

#include <nccl.h>

#include "comm/communicator.h"
#include "device/work.h"

// Checks of what callers pass. Each throws Error(invalidArgument or invalidUsage) that names the
// argument, says what is wrong and what to pass instead.
namespace unisono::api {

device::DataType checkType(ncclDataType_t type);
void checkRank(const comm::Communicator& communicator, int rank, const char* name);

// A buffer of `elements` elements; null is allowed only when there are none. It must be memory of
// the communicator's device, aligned to its elements. Returns what the runtime knows of it.
runtime::PointerInfo checkBuffer(const comm::Communicator& communicator, const void* buffer,
                                 uint64_t elements, device::DataType type, const char* name);

// The bytes of `count` elements for each of `parts` ranks must fit into 63 bits.
void checkCount(size_t count, int parts, device::DataType type);

device::ReductionSpec checkReduction(const comm::Communicator& communicator, ncclRedOp_t op,
                                     device::DataType type);

// The factor of a pre-multiplied sum: the bits that device::ReductionSpec::scalar wants of a value
// of `type` at `value`.
uint64_t scalarBits(const void* value, device::DataType type);

template <typename T>
void checkNotNull(const T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw invalidArgument("{} is null", name).remedy("Pass the address of a variable");
  }
}

}  // namespace unisono::api
