// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/address.h"

namespace unisono::bootstrap {

// One address of one network interface; an interface with several addresses is listed for each.
struct NetworkInterface {
  std::string name;
  Address address;  // port 0
  bool up = true;
  bool loopback = false;
  int subnetBits = 0;  // of the address, from the first one; 0: unknown
};

// The interfaces of this machine that have an IPv4 or IPv6 address.
std::vector<NetworkInterface> listInterfaces();

// Chooses where to listen, by the rules of NCCL_SOCKET_IFNAME (`filter`):
//   empty       names starting with "ib" first, then any that is neither loopback nor docker*,
//               then docker*, then loopback, then virbr*;
//   "eth,ib"    names starting with one of the prefixes, in the order of the list of interfaces;
//   "=eth0,ib0" names equal to one of these;
//   "^eth"      as empty, but without names starting with a prefix;
//   "^=eth0"    as empty, but without names equal to one of these.
// An interface that is down or of another family than `family` is never taken. Among equals, IPv4
// comes before IPv6, and IPv6 link-local last. Throws Error(invalidUsage) that lists what there is.
const NetworkInterface& chooseInterface(const std::vector<NetworkInterface>& interfaces,
                                        std::string_view filter, AddressFamily family);

// Where data are exchanged: all interfaces that a list without ^ names, or else all that
// chooseInterface() prefers to the others, without those that have nothing but a link-local
// address where some have more. Each with one address, in the order of `interfaces`, at most 16 as
// with NCCL. Without a filter and InfiniBand the first interface alone in whose subnet `hint` is,
// the address of NCCL_COMM_ID, if there is one.
std::vector<NetworkInterface> chooseInterfaces(const std::vector<NetworkInterface>& interfaces,
                                               std::string_view filter, AddressFamily family,
                                               std::string_view hint = {});

// An IPv6 link-local address comes from another machine with the scope of that machine. Returns
// the address as this machine must write it: the interface that owns the address if it is our
// own, otherwise the link-local interface that `filter` chooses. Other addresses stay as they are.
Address localizeScope(const Address& address, const std::vector<NetworkInterface>& interfaces,
                      std::string_view filter);

}  // namespace unisono::bootstrap
