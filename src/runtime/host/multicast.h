// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "runtime/runtime.h"

// Multicast addresses of simulated devices: ranges of addresses that cannot be accessed, and stand
// for memory of several ranks. Device code looks up the members and accesses these.
namespace unisono::runtime::host {

// Makes a multicast address for the `bytes` bytes at each of `members`, which must live longer.
std::shared_ptr<MappedMemory> mapMulticast(std::span<std::byte* const> members, size_t bytes);

// Returns the memory that an address in such a range stands for. Throws Error for any other one.
std::vector<std::byte*> multicastMembers(const void* address);

// Of this process, that exist now.
size_t multicastRanges();

}  // namespace unisono::runtime::host
