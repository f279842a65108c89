// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/unique_descriptor.h"

namespace unisono::runtime {

// Hands file descriptors of shared memory to other processes of this host over an abstract Unix
// socket. Each process has one service; the first offer starts its thread. It serves only callers
// that send the random token of an offer and run as the same user. Connections that send nothing
// are closed soon and never keep others from being served.
struct DescriptorTicket {
  std::array<char, 48> service;     // abstract socket name without the leading zero, NUL padded
  std::array<std::byte, 16> token;  // secret of this offer
};

// An offer is valid while the object lives. It does not own `descriptor`, which must stay open
// until then.
class DescriptorOffer {
 public:
  virtual ~DescriptorOffer() = default;
  virtual const DescriptorTicket& ticket() const = 0;
};
std::unique_ptr<DescriptorOffer> offerDescriptor(int descriptor);

// Fetches the descriptor of a ticket. Throws Error if the other process has ended, cannot be
// reached from here or does not answer within 10 s, or if the offer is no longer valid.
UniqueDescriptor fetchDescriptor(const DescriptorTicket& ticket);

// Identifies the network namespace of this process, 0 if the system does not tell: only processes
// in the same one reach each other's service.
uint64_t networkNamespace();

}  // namespace unisono::runtime
