// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/unique_id.h"

#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "bootstrap/comm_key.h"
#include "bootstrap/interfaces.h"
#include "bootstrap/root_service.h"

namespace unisono::bootstrap {
namespace {

constexpr uint64_t kIdMagic = 0x6469656e75;  // "uneid" read as text
constexpr uint32_t kIdVersion = 1;

struct PackedId {
  uint64_t magic;
  uint32_t version;
  uint32_t fixedAddress;
  Address root;
  Secret secret;
  std::array<std::byte, 72> reserved;
};
static_assert(sizeof(PackedId) == kUniqueIdBytes);

// Keeps jobs with different values of NCCL_COMM_ID apart, but is known to everybody who knows the
// value: only a key file protects against them.
Secret secretFromText(std::string_view text) {
  Fnv first, second(0x84222325cbf29ce4);
  first.add(text);
  second.add(text);
  return {first.value(), second.value()};
}

}  // namespace

std::array<std::byte, kUniqueIdBytes> packUniqueId(const UniqueId& id) {
  PackedId packed = {kIdMagic, kIdVersion, id.fixedAddress ? 1u : 0u, id.root, id.secret, {}};
  std::array<std::byte, kUniqueIdBytes> bytes;
  std::memcpy(bytes.data(), &packed, sizeof(packed));
  return bytes;
}

UniqueId unpackUniqueId(std::span<const std::byte, kUniqueIdBytes> bytes) {
  PackedId packed;
  std::memcpy(&packed, bytes.data(), sizeof(packed));
  const AddressFamily family = packed.root.family;
  const bool known = packed.magic == kIdMagic && packed.version == kIdVersion;
  if (!known || packed.fixedAddress > 1 || packed.root.port == 0 ||
      (family != AddressFamily::ipv4 && family != AddressFamily::ipv6)) {
    throw invalidArgument("The unique id was not made by this library")
        .remedy(
            "Pass the 128 bytes of ncclGetUniqueId unchanged to every rank, and load the same "
            "version of the library in every process");
  }
  return {packed.root, packed.secret, packed.fixedAddress == 1};
}

UniqueId createUniqueId(const Settings& settings) {
  const AddressFamily family = parseFamily(settings.socketFamily);
  if (!settings.commId.empty()) {
    const Secret secret = settings.commKeyFile.empty()
                              ? secretFromText(settings.commId)
                              : secretFromKey(readCommKey(settings.commKeyFile), settings.commId);
    return {parseAddress(settings.commId, family, "NCCL_COMM_ID"), secret, true};
  }
  const std::vector<NetworkInterface> interfaces = listInterfaces();
  const NetworkInterface& chosen = chooseInterface(interfaces, settings.socketInterface, family);
  const std::function<bool()> never;
  Listener listener(chosen.address, Wait(std::chrono::milliseconds(0), never));
  UniqueId id = {listener.address(), randomSecret(), false};
  logInfo("unique id: the root listens at {} ({})", id.root.text(), chosen.name);
  keepUntilExit(std::make_unique<RootService>(std::move(listener), id.secret,
                                              RootTimes{.timeout = timeoutOf(settings)}));
  return id;
}

}  // namespace unisono::bootstrap
