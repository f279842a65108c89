// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include "comm/communicator.h"
#include "device/work.h"

// Checks of arguments. Each throws Error(invalidArgument or invalidUsage) that names the argument
// and says what is wrong and what to pass instead.
namespace unisono::api {

device::DataType checkType(ncclDataType_t type);
void checkRank(const comm::Communicator& communicator, int rank, const char* name);

// Checks a buffer of `elements` elements, which may be null only if there are none: it has to be
// memory that the communicator's device can access, aligned to the element size. Returns what the
// runtime knows about it.
runtime::PointerInfo checkBuffer(const comm::Communicator& communicator, const void* buffer,
                                 uint64_t elements, device::DataType type, const char* name);

// Checks that the size in bytes of `count` elements for each of `parts` ranks fits into 63 bits.
void checkCount(size_t count, int parts, device::DataType type);

device::ReductionSpec checkReduction(const comm::Communicator& communicator, ncclRedOp_t op,
                                     device::DataType type);

// Returns the value of `type` at `value` as device::ReductionSpec::scalar, the factor of a
// pre-multiplied sum.
uint64_t scalarBits(const void* value, device::DataType type);

template <typename T>
void checkNotNull(const T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw invalidArgument("{} is null", name).remedy("Pass the address of a variable");
  }
}

}  // namespace unisono::api
