// SPDX-License-Identifier: Apache-2.0
// Addresses, the choice of an interface, and unique ids: what needs no connection.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "bootstrap/interfaces.h"
#include "bootstrap/unique_id.h"

namespace unisono::bootstrap {
namespace {

Address address(const std::string& host) {
  return parseAddress(host + ":1", AddressFamily::any, "TEST");
}

NetworkInterface interface(const std::string& name, const std::string& host, uint32_t scope = 0) {
  NetworkInterface result = {name, address(host), true, name == "lo"};
  result.address.port = 0;
  result.address.scope = scope;
  return result;
}

const std::vector<NetworkInterface> kMachine = {
    interface("lo", "127.0.0.1"),         interface("docker0", "172.17.0.1"),
    interface("eth0", "192.0.2.10"),      interface("eth1", "198.51.100.10"),
    interface("ib0", "203.0.113.10"),     interface("lo", "[::1]"),
    interface("eth0", "[fe80::10]", 3),   interface("eth0", "[2001:db8::10]"),
    interface("eth10", "[2001:db8::20]"),
};

std::string chosen(const std::vector<NetworkInterface>& machine, const std::string& filter,
                   AddressFamily family = AddressFamily::any) {
  const NetworkInterface& result = chooseInterface(machine, filter, family);
  return result.name + " " + result.address.text();
}

TEST(ChooseInterface, AutomaticOrderIsInfiniBandThenOthersThenDockerThenLoopback) {
  std::vector<NetworkInterface> machine(kMachine.begin(), kMachine.begin() + 5);
  EXPECT_EQ(chosen(machine, ""), "ib0 203.0.113.10:0");
  machine.pop_back();
  EXPECT_EQ(chosen(machine, ""), "eth0 192.0.2.10:0");
  machine.resize(2);
  EXPECT_EQ(chosen(machine, ""), "docker0 172.17.0.1:0");
  machine.resize(1);
  EXPECT_EQ(chosen(machine, ""), "lo 127.0.0.1:0");
}

TEST(ChooseInterface, FilterForms) {
  EXPECT_EQ(chosen(kMachine, "eth"), "eth0 192.0.2.10:0");
  EXPECT_EQ(chosen(kMachine, "eth1"), "eth1 198.51.100.10:0");
  EXPECT_EQ(chosen(kMachine, "eth1", AddressFamily::ipv6), "eth10 [2001:db8::20]:0");
  EXPECT_THROW(chosen(kMachine, "=eth1", AddressFamily::ipv6), Error);
  EXPECT_EQ(chosen(kMachine, "=eth1,ib0"), "eth1 198.51.100.10:0");
  EXPECT_EQ(chosen(kMachine, "docker,eth"), "docker0 172.17.0.1:0");
  EXPECT_EQ(chosen(kMachine, "^ib"), "eth0 192.0.2.10:0");
  EXPECT_EQ(chosen(kMachine, "^ib,eth"), "docker0 172.17.0.1:0");
  EXPECT_EQ(chosen(kMachine, "^=ib0,eth0", AddressFamily::ipv4), "eth1 198.51.100.10:0");
  EXPECT_EQ(chosen(kMachine, "^=eth1", AddressFamily::ipv6), "eth0 [2001:db8::10]:0");
  EXPECT_EQ(chosen(kMachine, "^=ib,e"), "ib0 203.0.113.10:0") << "^= does not match by prefix";
}

TEST(ChooseInterfaces, TakesAllThatAListNamesAndElseThoseOfTheBestKind) {
  std::vector<NetworkInterface> machine = kMachine;
  const auto all = [&](const std::string& filter, AddressFamily family = AddressFamily::any) {
    std::string text;
    for (const NetworkInterface& each : chooseInterfaces(machine, filter, family)) {
      text += (text.empty() ? "" : ", ") + each.name + " " + each.address.text();
    }
    return text;
  };
  EXPECT_EQ(all(""), "ib0 203.0.113.10:0");
  EXPECT_EQ(all("^ib"), "eth0 192.0.2.10:0, eth1 198.51.100.10:0, eth10 [2001:db8::20]:0");
  EXPECT_EQ(all("^ib", AddressFamily::ipv4), "eth0 192.0.2.10:0, eth1 198.51.100.10:0");
  EXPECT_EQ(all("^=ib0,eth1", AddressFamily::ipv4), "eth0 192.0.2.10:0");
  EXPECT_EQ(all("^ib,eth"), "docker0 172.17.0.1:0");
  EXPECT_EQ(all("^ib,eth,docker"), "lo 127.0.0.1:0");
  EXPECT_EQ(all("=ib0,eth1"), "eth1 198.51.100.10:0, ib0 203.0.113.10:0");
  EXPECT_EQ(all("eth"), "eth0 192.0.2.10:0, eth1 198.51.100.10:0, eth10 [2001:db8::20]:0");
  EXPECT_EQ(all("eth", AddressFamily::ipv6), "eth0 [2001:db8::10]:0, eth10 [2001:db8::20]:0");
  EXPECT_THROW(all("wlan"), Error);
  // As those of containers on their host.
  machine.push_back(interface("veth1", "[fe80::20]", 9));
  machine.push_back(interface("virbr0", "192.0.2.99"));
  EXPECT_EQ(all("^ib,eth1"), "eth0 192.0.2.10:0");
  EXPECT_EQ(all("veth").substr(0, 15), "veth1 [fe80::20");
  EXPECT_EQ(all("^ib,eth").substr(0, 15), "veth1 [fe80::20");
  EXPECT_EQ(all("^ib,eth,docker,lo,veth"), "virbr0 192.0.2.99:0");
  for (int i = 0; i < 40; i++) machine.push_back(interface("en" + std::to_string(i), "192.0.2.1"));
  EXPECT_EQ(chooseInterfaces(machine, "en", AddressFamily::any).size(), 16u);
}

// As with NCCL: InfiniBand and a list count for more.
TEST(ChooseInterfaces, TakesTheOneInTheSubnetOfTheHint) {
  std::vector<NetworkInterface> machine = kMachine;
  std::erase_if(machine, [](const auto& each) { return each.name == "ib0"; });
  for (NetworkInterface& each : machine) {
    each.subnetBits = each.address.family == AddressFamily::ipv4 ? 25 : 63;
  }
  const auto all = [&](const std::string& hint, const std::string& filter = "",
                       AddressFamily family = AddressFamily::any) {
    std::string text;
    for (const NetworkInterface& each : chooseInterfaces(machine, filter, family, hint)) {
      text += (text.empty() ? "" : ", ") + each.name + " " + each.address.text();
    }
    return text;
  };
  const std::string without = all("");
  EXPECT_NE(without.find("eth0 192.0.2.10:0, eth1"), std::string::npos);
  EXPECT_EQ(all("192.0.2.127:5555"), "eth0 192.0.2.10:0");
  EXPECT_EQ(all("192.0.2.128:5555"), without) << "another subnet";
  EXPECT_EQ(all("198.51.100.1:5555"), "eth1 198.51.100.10:0");
  EXPECT_EQ(all("172.17.0.9:5555"), "docker0 172.17.0.1:0");
  EXPECT_EQ(all("[2001:db8:0:1::7]:5555"), "eth0 [2001:db8::10]:0");
  EXPECT_EQ(all("[2001:db8:0:2::7]:5555"), without);
  EXPECT_EQ(all("nonsense"), without);
  EXPECT_EQ(all("198.51.100.1:5555", "eth0", AddressFamily::ipv4), "eth0 192.0.2.10:0");
  machine[3].up = false;
  EXPECT_EQ(all("198.51.100.1:5555"), all(""));
  machine.push_back(interface("ib0", "203.0.113.10"));
  EXPECT_EQ(all("192.0.2.127:5555"), "ib0 203.0.113.10:0");
}

TEST(ChooseInterfaces, KnowsTheSubnetsOfThisMachine) {
  for (const NetworkInterface& each : listInterfaces()) {
    if (each.address.text() == "127.0.0.1:0") {
      EXPECT_EQ(each.subnetBits, 8);
    }
  }
}

TEST(ChooseInterface, LinkLocalIsTheLastResort) {
  std::vector<NetworkInterface> machine = {kMachine[6], kMachine[7]};
  EXPECT_EQ(chosen(machine, ""), "eth0 [2001:db8::10]:0");
  machine.pop_back();
  EXPECT_THAT(chosen(machine, ""), testing::StartsWith("eth0 [fe80::10%"));
}

TEST(ChooseInterface, InterfacesThatAreDownAreNotTaken) {
  std::vector<NetworkInterface> machine = {kMachine[0], kMachine[2]};
  machine[1].up = false;
  EXPECT_EQ(chosen(machine, ""), "lo 127.0.0.1:0");
}

TEST(ChooseInterface, ErrorListsWhatThereIs) {
  try {
    chosen(kMachine, "=wlan0");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalidUsage);
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("=wlan0"),
                                             testing::HasSubstr("eth1 198.51.100.10"),
                                             testing::HasSubstr("Set NCCL_SOCKET_IFNAME")));
  }
}

TEST(LocalizeScope, TakesTheScopeOfThisMachine) {
  Address remote = address("[fe80::99]");
  remote.scope = 7;
  EXPECT_EQ(localizeScope(remote, kMachine, "").scope, 3u);
  const std::vector<NetworkInterface> two = {interface("eth0", "[fe80::10]", 3),
                                             interface("eth1", "[fe80::11]", 4)};
  EXPECT_EQ(localizeScope(remote, two, "eth1").scope, 4u);
  remote.bytes = two[1].address.bytes;
  EXPECT_EQ(localizeScope(remote, two, "eth0").scope, 4u) << "our own address keeps its interface";
  const Address global = address("[2001:db8::1]");
  EXPECT_EQ(localizeScope(global, {}, ""), global);
}

TEST(ListInterfaces, HasLoopback) {
  bool loopback = false;
  for (const NetworkInterface& entry : listInterfaces()) {
    loopback = loopback || (entry.loopback && entry.address.isLoopback());
  }
  EXPECT_TRUE(loopback);
}

TEST(ParseAddress, Forms) {
  auto parse = [](const char* text) { return parseAddress(text, AddressFamily::any, "X").text(); };
  EXPECT_EQ(parse("192.0.2.1:4000"), "192.0.2.1:4000");
  EXPECT_EQ(parse("[2001:db8::1]:65535"), "[2001:db8::1]:65535");
  EXPECT_EQ(parse("[fe80::1%lo]:5"), "[fe80::1%lo]:5");
  EXPECT_EQ(parseAddress("localhost:5", AddressFamily::ipv4, "X").text(), "127.0.0.1:5");
}

TEST(ParseAddress, Refused) {
  for (const char* text :
       {"", "192.0.2.1", "192.0.2.1:", "192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:x",
        "192.0.2.1:80x", ":80", "2001:db8::1:80", "[::1]", "[::1:80", "[]:80", "192.0.2.1:-1"}) {
    try {
      parseAddress(text, AddressFamily::any, "NCCL_COMM_ID");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalidArgument) << text;
      EXPECT_THAT(error.what(), testing::HasSubstr("NCCL_COMM_ID")) << text;
    }
  }
  EXPECT_THROW(parseAddress("192.0.2.1:80", AddressFamily::ipv6, "X"), Error);
}

TEST(ParseFamily, KnowsTwoFamilies) {
  EXPECT_EQ(parseFamily(""), AddressFamily::any);
  EXPECT_EQ(parseFamily("AF_INET"), AddressFamily::ipv4);
  EXPECT_EQ(parseFamily("AF_INET6"), AddressFamily::ipv6);
  EXPECT_THROW(parseFamily("inet"), Error);
}

TEST(UniqueIdTest, RoundTrip) {
  UniqueId id = {address("[fe80::1%lo]"), randomSecret(), true};
  EXPECT_EQ(unpackUniqueId(packUniqueId(id)), id);
  id = {address("192.0.2.1"), randomSecret(), false};
  EXPECT_EQ(unpackUniqueId(packUniqueId(id)), id);
}

TEST(UniqueIdTest, ForeignBytesAreRefused) {
  std::array<std::byte, kUniqueIdBytes> bytes = {};
  EXPECT_THROW(unpackUniqueId(bytes), Error);
  const auto good = packUniqueId({address("192.0.2.1"), randomSecret(), false});
  for (size_t header : {0u, 8u, 12u, 16u}) {  // magic, version, flag, family
    bytes = good;
    bytes[header] ^= std::byte{0x40};
    EXPECT_THROW(unpackUniqueId(bytes), Error) << header;
  }
}

TEST(UniqueIdTest, EachIdHasItsOwnSecretAndPort) {
  const UniqueId a = createUniqueId({});
  const UniqueId b = createUniqueId({});
  EXPECT_NE(a.secret, b.secret);
  EXPECT_NE(a.root, b.root);
  EXPECT_NE(a.root.port, 0);
  EXPECT_FALSE(a.fixedAddress);
}

TEST(UniqueIdTest, CommIdGivesEveryProcessTheSameId) {
  Settings settings;
  settings.commId = "127.0.0.1:4567";
  const UniqueId a = createUniqueId(settings);
  EXPECT_EQ(a, createUniqueId(settings));
  EXPECT_EQ(a.root.text(), "127.0.0.1:4567");
  EXPECT_TRUE(a.fixedAddress);
  settings.commId = "127.0.0.1:4568";
  EXPECT_NE(a.secret, createUniqueId(settings).secret);
}

TEST(UniqueIdTest, FollowsTheSettings) {
  Settings settings;
  settings.socketInterface = "lo";
  settings.socketFamily = "AF_INET";
  EXPECT_TRUE(createUniqueId(settings).root.isLoopback());
  settings.socketInterface = "=no-such-interface";
  EXPECT_THROW(createUniqueId(settings), Error);
}

}  // namespace
}  // namespace unisono::bootstrap
