// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace unisono {

// The 64-bit hash FNV-1a (Fowler, Noll and Vo). It is the same on every machine, and not
// cryptographic.
class Fnv {
 public:
  explicit Fnv(uint64_t offset = 0xcbf29ce484222325) : hash_(offset) {}

  // The bytes of `value`, the lowest first.
  void add(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) addByte(static_cast<uint8_t>(value >> shift));
  }
  void add(std::string_view text) {
    for (const char letter : text) addByte(static_cast<uint8_t>(letter));
  }
  uint64_t value() const { return hash_; }

 private:
  void addByte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3; }

  uint64_t hash_;
};

}  // namespace unisono
