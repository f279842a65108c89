// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

// What a proxy does with slots of protocol LL, in memory that kernels access at the same time. A
// line is two words, each with half of the data and the flag (device/simt/common.h): a word is
// loaded and stored as one.
namespace unisono::transport {

inline constexpr size_t kLineBytes = 16, kLineDataBytes = 8;

// Returns how many of the first `lines` lines may not hold data of a step yet, as those after them
// do. The last ones are looked at first: a kernel writes them last, and is not slowed down.
size_t countOpenLines(const std::byte* slot, uint64_t step, size_t lines);
// Takes the data out of lines that hold some.
void unpackLines(const std::byte* slot, std::span<std::byte> data);
// Makes lines of data, whose size is a multiple of kLineDataBytes; the first one last, as a kernel
// waits for it.
void packLines(std::span<const std::byte> data, std::byte* slot, uint64_t step);
// Makes lines that hold no data of any step.
void clearLines(std::byte* slot, size_t slotBytes);

}  // namespace unisono::transport
