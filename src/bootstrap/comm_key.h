// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/frame.h"

namespace unisono::bootstrap {

// SipHash-2-4 (Aumasson and Bernstein, 2012) of `message` under a key of 128 bits.
uint64_t sipHash(const std::array<std::byte, 16>& key, std::span<const std::byte> message);

// Reads the file of UNISONO_COMM_KEY_FILE. Throws Error(invalidArgument) unless it is a regular
// file of at least 16 bytes that belongs to this user and that nobody else can read or write.
std::vector<std::byte> readCommKey(const std::string& path);

// The secret that all ranks derive from the text of NCCL_COMM_ID and a key. Only those who know the
// key can compute it.
Secret secretFromKey(std::span<const std::byte> key, std::string_view commId);

}  // namespace unisono::bootstrap
