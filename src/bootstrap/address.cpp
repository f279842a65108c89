// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace unisono::bootstrap {
namespace {

int systemFamily(AddressFamily family) {
  switch (family) {
    case AddressFamily::ipv4:
      return AF_INET;
    case AddressFamily::ipv6:
      return AF_INET6;
    case AddressFamily::any:
      break;
  }
  return AF_UNSPEC;
}

[[noreturn]] void throwBadAddress(std::string_view text, std::string_view variable) {
  throw invalidArgument("{}={} is not an address with a port", variable, text)
      .remedy("Write it as 192.0.2.1:4000, [2001:db8::1]:4000 or name:4000");
}

}  // namespace

bool Address::isLinkLocal() const {
  return family == AddressFamily::ipv6 && bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

bool Address::isLoopback() const {
  if (family == AddressFamily::ipv4) return bytes[0] == 127;
  static constexpr std::array<uint8_t, 16> kLoopback = {0, 0, 0, 0, 0, 0, 0, 0,
                                                        0, 0, 0, 0, 0, 0, 0, 1};
  return family == AddressFamily::ipv6 && bytes == kLoopback;
}

bool Address::isUnspecified() const {
  return bytes == std::array<uint8_t, 16>{};
}

std::string Address::text() const {
  char host[INET6_ADDRSTRLEN] = {};
  if (family == AddressFamily::any) return "(no address)";
  ::inet_ntop(systemFamily(family), bytes.data(), host, sizeof(host));
  if (family == AddressFamily::ipv4) return fmt::format("{}:{}", host, port);
  if (scope == 0) return fmt::format("[{}]:{}", host, port);
  char name[IF_NAMESIZE] = {};
  if (::if_indextoname(scope, name) == nullptr) return fmt::format("[{}%{}]:{}", host, scope, port);
  return fmt::format("[{}%{}]:{}", host, name, port);
}

SystemAddress toSystem(const Address& address) {
  SystemAddress result;
  if (address.family == AddressFamily::ipv4) {
    sockaddr_in value = {};
    value.sin_family = AF_INET;
    value.sin_port = htons(address.port);
    std::memcpy(&value.sin_addr, address.bytes.data(), sizeof(value.sin_addr));
    std::memcpy(&result.storage, &value, sizeof(value));
    result.length = sizeof(value);
  } else {
    sockaddr_in6 value = {};
    value.sin6_family = AF_INET6;
    value.sin6_port = htons(address.port);
    value.sin6_scope_id = address.scope;
    std::memcpy(&value.sin6_addr, address.bytes.data(), sizeof(value.sin6_addr));
    std::memcpy(&result.storage, &value, sizeof(value));
    result.length = sizeof(value);
  }
  return result;
}

Address fromSystem(const sockaddr* address) {
  Address result;
  if (address->sa_family == AF_INET) {
    sockaddr_in value;
    std::memcpy(&value, address, sizeof(value));
    result.family = AddressFamily::ipv4;
    result.port = ntohs(value.sin_port);
    std::memcpy(result.bytes.data(), &value.sin_addr, sizeof(value.sin_addr));
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 value;
    std::memcpy(&value, address, sizeof(value));
    result.family = AddressFamily::ipv6;
    result.port = ntohs(value.sin6_port);
    result.scope = value.sin6_scope_id;
    std::memcpy(result.bytes.data(), &value.sin6_addr, sizeof(value.sin6_addr));
  }
  return result;
}

Address parseAddress(std::string_view text, AddressFamily family, std::string_view variable) {
  std::string host;
  std::string_view portText;
  if (text.starts_with('[')) {
    size_t end = text.find("]:");
    if (end == std::string_view::npos) throwBadAddress(text, variable);
    host = text.substr(1, end - 1);
    portText = text.substr(end + 2);
  } else {
    size_t colon = text.find(':');
    // A second colon is an IPv6 address without brackets, where the port cannot be told.
    if (colon == std::string_view::npos || text.find(':', colon + 1) != std::string_view::npos) {
      throwBadAddress(text, variable);
    }
    host = text.substr(0, colon);
    portText = text.substr(colon + 1);
  }
  uint16_t port = 0;
  auto parsed = std::from_chars(portText.data(), portText.data() + portText.size(), port);
  if (host.empty() || parsed.ec != std::errc() || port == 0 ||
      parsed.ptr != portText.data() + portText.size()) {
    throwBadAddress(text, variable);
  }

  addrinfo hints = {};
  hints.ai_family = systemFamily(family);
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  if (status != 0 || found == nullptr) {
    throw Error(ErrorCode::systemError, fmt::format("{}={}: cannot resolve {}: {}", variable, text,
                                                    host, ::gai_strerror(status)))
        .remedy(
            "Check the name, or set a numeric address of the family that NCCL_SOCKET_FAMILY "
            "allows");
  }
  Address result = fromSystem(found->ai_addr);
  result.port = port;
  return result;
}

AddressFamily parseFamily(std::string_view text) {
  if (text.empty()) return AddressFamily::any;
  if (text == "AF_INET") return AddressFamily::ipv4;
  if (text == "AF_INET6") return AddressFamily::ipv6;
  throw invalidArgument("NCCL_SOCKET_FAMILY={} is not an address family", text)
      .remedy("Set it to AF_INET or AF_INET6, or unset it");
}

}  // namespace unisono::bootstrap
