// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/simt/simt.h"
#include "device/window.h"

// Use and removal of mapped windows. Every decision is one read-modify-write of an entry's state:
// an addition of a user that finds the window mapped comes before the removal, whose own
// read-modify-write then counts that user.
namespace unisono::device::UNISONO_TARGET {

// Returns the address of `place`, or null if its window is not mapped. unpinWindow() has to follow
// an address, and nothing in between may wait for another rank. Of the window's id, `known` are the
// bits that are given.
UNISONO_DEVICE std::byte* pinWindow(MappedWindow& entry, const WindowReference& place,
                                    uint64_t known = ~uint64_t{0}) {
  if ((fetchAddAcquire(&entry.state, 1) & kWindowMapped) != 0) {
    noteRead(&entry.window, sizeof(entry.window) + sizeof(entry.base));
    if ((entry.window & known) == place.window) return entry.base + place.offset;
  }
  addRelease(&entry.state, ~uint64_t{0});
  return nullptr;
}

// Follows the last access to the window by this thread, or by others that a barrier orders before.
UNISONO_DEVICE void unpinWindow(MappedWindow& entry) {
  addRelease(&entry.state, ~uint64_t{0});
}

// The same, after releaseStores().
UNISONO_DEVICE void unpinOrdered(MappedWindow& entry) {
  addOrdered(&entry.state, ~uint64_t{0});
}

// By one thread, and one launch of a table at a time.
UNISONO_DEVICE void changeWindow(const ChangeWindowArguments& arguments) {
  MappedWindow& entry = *arguments.entry;
  uint64_t state = 0;
  switch (arguments.change) {
    case WindowChange::map:
      noteWrite(&entry.window, sizeof(entry.window) + sizeof(entry.base));
      entry.window = arguments.window;
      entry.base = arguments.base;
      addRelease(&entry.state, kWindowMapped);
      break;
    case WindowChange::unmap:
      state = fetchAddAcquire(&entry.state, kWindowMapped);  // the bit is set, so this clears it
      break;
    case WindowChange::look:
      state = loadAcquire(&entry.state);
      break;
  }
  noteWrite(arguments.users, sizeof(*arguments.users));
  *arguments.users = state & ~kWindowMapped;
}

}  // namespace unisono::device::UNISONO_TARGET
