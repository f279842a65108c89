// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/settings.h"
#include "bootstrap/address.h"
#include "bootstrap/frame.h"

namespace unisono::bootstrap {

// What the ranks of a communicator share before they know each other: where the root listens and
// a secret. It is passed around as the 128 bytes of ncclUniqueId.
struct UniqueId {
  Address root;
  Secret secret = {};
  // The address is the one of NCCL_COMM_ID: nobody listens there until rank 0 connects.
  bool fixedAddress = false;

  bool operator==(const UniqueId&) const = default;
};

inline constexpr size_t kUniqueIdBytes = 128;

std::array<std::byte, kUniqueIdBytes> packUniqueId(const UniqueId& id);
// Throws Error(invalidArgument) when the bytes are not an id of this version of the library.
UniqueId unpackUniqueId(std::span<const std::byte, kUniqueIdBytes> bytes);

// Makes an id and starts its root in this process: a thread that serves one rendezvous and then
// ends, or ends with the process. With NCCL_COMM_ID nothing is started, and every process that
// makes an id from the same text, and the same key if there is UNISONO_COMM_KEY_FILE, gets the same
// secret. Throws Error(invalidUsage, invalidArgument, systemError).
UniqueId createUniqueId(const Settings& settings);

}  // namespace unisono::bootstrap
