#pragma once

#include <cstdint>
#include <string_view>

namespace unisono {

// FNV-1a (Fowler, Noll and Vo) of 64 bits: the same on every machine, and no protection against
// someone who wants two equal ones.
class Fnv {
 public:
  explicit Fnv(uint64_t offset = 0xcbf29ce484222325) : hash_(offset) {}

  void add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }
  void add(std::string_view text) {
    for (const char letter : text) add(static_cast<uint8_t>(letter));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_;
};

}  // namespace unisono
