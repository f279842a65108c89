// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "plugin/net.h"

// What the tables of net plug-ins and of CollNet plug-ins share, as NCCL's public plug-in headers
// define it. Results of functions are ncclResult_t.
namespace unisono::plugin {

inline constexpr int kDmaBuf =
    4;  // NCCL_PTR_DMABUF: a bit of "pointers" in addition to those of memory
// Of versions whose plug-ins do not say it.
inline constexpr size_t kLargestOldMessage = size_t{1} << 30;
inline constexpr size_t kLargestOldCollective = size_t{1} << 29;

struct PropertiesV6 {
  char *name, *pciPath;
  uint64_t guid;
  int pointers, speed, port;
  float latency;
  int maxComms, maxRecvs;
};
struct PropertiesV7 {
  char *name, *pciPath;
  uint64_t guid;
  int pointers, speed, port;
  float latency;
  int maxComms, maxRecvs, deviceType, deviceVersion;
};
struct PropertiesV8 {
  char *name, *pciPath;
  uint64_t guid;
  int pointers, regIsGlobal, speed, port;
  float latency;
  int maxComms, maxRecvs, deviceType, deviceVersion;
};
template <int kDevices = 4>
struct PropertiesV9 {  // and 10
  char *name, *pciPath;
  uint64_t guid;
  int pointers, regIsGlobal, forceFlush, speed, port;
  float latency;
  int maxComms, maxRecvs, deviceType, deviceVersion;
  int members, memberDevices[kDevices];  // of a virtual device
  size_t maxP2pBytes, maxCollBytes;
};
struct PropertiesV11 : PropertiesV9<> {
  int maxMultiRequestSize;
};
struct PropertiesV12 : PropertiesV9<8> {
  int maxMultiRequestSize;
  int16_t rail, plane;
};
static_assert(sizeof(PropertiesV8) == 64 && sizeof(PropertiesV9<>) == 104 &&
              sizeof(PropertiesV11) == 112 && sizeof(PropertiesV12) == 128);

template <int kFrom, int kVersion, typename Then, typename Else>
using Since = std::conditional_t<(kVersion >= kFrom), Then, Else>;

template <int kVersion>
using PropertiesOf = Since<
    12, kVersion, PropertiesV12,
    Since<11, kVersion, PropertiesV11,
          Since<9, kVersion, PropertiesV9<>,
                Since<8, kVersion, PropertiesV8, Since<7, kVersion, PropertiesV7, PropertiesV6>>>>>;

template <int kVersion>
void describePort(const PropertiesOf<kVersion>& found, NetPort& port) {
  port.name = found.name == nullptr ? "" : found.name;
  port.pciPath = found.pciPath == nullptr ? "" : found.pciPath;
  port.guid = found.guid;
  port.reachesGpus = (found.pointers & kDeviceMemory) != 0;
  port.takesDmaBufs = (found.pointers & kDmaBuf) != 0;
  port.megabits = found.speed;
  port.number = found.port;
  port.latency = found.latency;
  port.connections = found.maxComms;
  port.receives = found.maxRecvs;
  port.messageBytes = kLargestOldMessage;
  port.collectiveBytes = kLargestOldCollective;
  if constexpr (kVersion >= 7) port.deviceType = found.deviceType;
  if constexpr (kVersion >= 9) {
    port.forcesFlush = found.forceFlush != 0;
    port.messageBytes = found.maxP2pBytes;
    port.collectiveBytes = found.maxCollBytes;
  }
}

// The newest version of an interface that a library has, whose tables are called `prefix` and the
// version; null without any.
template <typename Functions, template <int> typename FunctionsOf, int kVersion = 12>
std::shared_ptr<const Functions> findFunctions(const OpenLibrary& library,
                                               const std::string& prefix) {
  if constexpr (kVersion >= 6) {
    const std::string symbol = prefix + std::to_string(kVersion);
    if (const void* table = findSymbol(library, symbol.c_str())) {
      return std::make_shared<FunctionsOf<kVersion>>(library, table);
    }
    return findFunctions<Functions, FunctionsOf, kVersion - 1>(library, prefix);
  }
  return nullptr;
}

}  // namespace unisono::plugin
