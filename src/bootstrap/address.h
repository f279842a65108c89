// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace unisono::bootstrap {

enum class AddressFamily : uint16_t { any = 0, ipv4 = 4, ipv6 = 6 };

// Where a TCP socket listens. Plain data of fixed size: unique ids and messages contain it.
struct Address {
  AddressFamily family = AddressFamily::any;
  uint16_t port = 0;                   // host byte order
  uint32_t scope = 0;                  // interface index of an IPv6 link-local address, or 0
  std::array<uint8_t, 16> bytes = {};  // network byte order; IPv4 uses the first four

  bool operator==(const Address&) const = default;

  bool isLinkLocal() const;  // fe80::/10: means nothing without a scope
  bool isLoopback() const;
  bool isUnspecified() const;  // 0.0.0.0 or ::
  bool sameHostPart(const Address& other) const {
    return family == other.family && bytes == other.bytes;
  }
  // "192.0.2.1:80", "[2001:db8::1]:80", "[fe80::1%eth0]:80".
  std::string text() const;
};
static_assert(sizeof(Address) == 24);

// The form that system calls take.
struct SystemAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  const sockaddr* pointer() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
SystemAddress toSystem(const Address& address);
// Returns family `any` for an address that is neither IPv4 nor IPv6.
Address fromSystem(const sockaddr* address);

// Reads "host:port", where host is an IPv4 address, an IPv6 address in brackets (with %scope where
// it is link-local) or a name, which is looked up. Throws Error(invalidArgument) that quotes
// `variable` and the text; a name that cannot be resolved is a systemError.
Address parseAddress(std::string_view text, AddressFamily family, std::string_view variable);

// Reads NCCL_SOCKET_FAMILY: AF_INET, AF_INET6 or nothing.
AddressFamily parseFamily(std::string_view text);

}  // namespace unisono::bootstrap
