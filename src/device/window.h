// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// Buffers of the application that other ranks have mapped (docs/decisions/0009-windows.md).
namespace unisono::device {

// A place in a window of the rank that uses this: an allocation that its peers may have mapped.
// Window 0: none.
struct WindowReference {
  uint64_t window;
  uint64_t offset;
};

// How many windows of one peer can be mapped at a time. The low bits of an id are its index.
inline constexpr uint64_t kWindowSlots = 128;

// A window of a peer that this rank has mapped, or none.
struct MappedWindow {
  uint64_t state;   // kWindowMapped and the number of users
  uint64_t window;  // its id; valid for users only, as is `base`
  std::byte* base;
};
inline constexpr uint64_t kWindowMapped = uint64_t{1} << 63;

// Where a communicator's table has a window of `peer`.
constexpr uint64_t windowIndex(int peer, uint64_t window) {
  return static_cast<uint64_t>(peer) * kWindowSlots + window % kWindowSlots;
}

enum class WindowChange : uint32_t {
  map,    // sets the entry
  unmap,  // lets nobody use the entry from now on
  look,   // changes nothing
};

// Changes one entry of a table that kernels use. Writes the number of users to `users`: after an
// unmap, the window may be removed once it has been 0.
struct ChangeWindowArguments {
  MappedWindow* entry;
  WindowChange change;
  uint64_t window;
  std::byte* base;
  uint64_t* users;  // in host memory
};

}  // namespace unisono::device
