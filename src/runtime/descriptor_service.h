#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/unique_descriptor.h"

namespace unisono::runtime {

// Hands file descriptors of shared memory to other processes of this host over an abstract Unix
// socket. One service a process, its thread started by the first offer. Only a caller that shows
// the random token of an offer, and has our user id, is served.
struct DescriptorTicket {
  std::array<char, 48> service;     // abstract socket name without the leading zero, NUL padded
  std::array<std::byte, 16> token;  // secret of this offer
};

// An offer stands while the object lives; `descriptor` is duplicated.
class DescriptorOffer {
 public:
  virtual ~DescriptorOffer() = default;
  virtual const DescriptorTicket& ticket() const = 0;
};
std::unique_ptr<DescriptorOffer> offerDescriptor(int descriptor);

// Fetches the descriptor of a ticket. Throws Error after 10 s, if the other process has ended, or
// if the offer no longer stands.
UniqueDescriptor fetchDescriptor(const DescriptorTicket& ticket);

}  // namespace unisono::runtime
