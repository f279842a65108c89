// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "plugin/library.h"

// The binary interface of profiler plug-ins, versions 1 to 6, as NCCL's public plug-in headers
// define it. Results are ncclResult_t.
namespace unisono::plugin::profiler_interface {

// Types of events, which are bits of the word that says what a plug-in wants.
inline constexpr uint64_t kGroup = 1 << 0, kCollective = 1 << 1, kMessage = 1 << 2,
                          kProxyOperation = 1 << 3, kProxyStep = 1 << 4, kProxyControl = 1 << 5,
                          kChannel = 1 << 6, kNetwork = 1 << 7, kGroupApi = 1 << 8,
                          kCollectiveApi = 1 << 9, kMessageApi = 1 << 10, kLaunch = 1 << 11;
// A plug-in that wants an event is also told of those that it belongs to.
inline constexpr uint64_t kInsideOfCall = kProxyOperation | kProxyStep | kChannel | kNetwork;

// States that are recorded.
inline constexpr int kNetworkUpdates = 21, kChannelStops = 22, kGroupStarted = 23, kGroupEnds = 24;

// Parts that are the same in all versions that have them.
struct ProxyOperationPart {
  pid_t process;
  uint8_t channel;
  int peer, steps, chunkBytes, sends;
};
struct ProxyStepPart {
  int number;
};
struct NetworkPart {
  int64_t plugin;
  void* data;
};

// Descriptions of events. The members of a union are told apart by `type`.
struct EventV1 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct {
      const char* name;
      uint64_t communicator, sequence;
      uint8_t function;
      const void* input;
      void* output;
      size_t count;
      int root;
      uint8_t datatype;
      uint32_t operation;
      size_t trafficBytes;
      uint8_t channels, warps, algorithm, protocol;
      int collNet, nvls;
    } collective;
    struct {
      const char* name;
      uint64_t communicator;
      uint8_t function;
      void* buffer;
      uint8_t datatype;
      size_t count;
      int peer;
    } message;
    ProxyOperationPart proxyOperation;
    ProxyStepPart proxyStep;
  };
};
struct MessageV2 {
  const char* name;
  uint64_t communicator;
  const char* function;
  void* buffer;
  const char* datatype;
  size_t count;
  int peer;
};
struct EventV2 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct {
      const char* name;
      uint64_t communicator, sequence;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char* datatype;
      size_t trafficBytes;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } collective;
    MessageV2 message;
    ProxyOperationPart proxyOperation;
    ProxyStepPart proxyStep;
  };
};
struct EventV3 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct {
      const char* name;
      uint64_t communicator, sequence;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } collective;
    MessageV2 message;
    ProxyOperationPart proxyOperation;
    ProxyStepPart proxyStep;
    struct {
      uint8_t number;
    } channel;
    NetworkPart network;
  };
};
struct EventV4 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct {
      uint64_t sequence;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } collective;
    struct {
      const char* function;
      void* buffer;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t channels;
    } message;
    ProxyOperationPart proxyOperation;
    ProxyStepPart proxyStep;
    struct {
      uint8_t number;
      uint64_t time;
    } channel;
    NetworkPart network;
  };
};
// Of version 6, which adds members to the union of version 5.
struct EventV6 {
  uint64_t type;
  void* parent;
  int rank;
  union {
    struct {
      bool captured;
      int depth;
    } groupApi;
    struct {
      const char* function;
      size_t count;
      const char* datatype;
      int root;
      void* stream;
      bool captured;
    } collectiveApi;
    struct {
      const char* function;
      size_t count;
      const char* datatype;
      void* stream;
      bool captured;
    } messageApi;
    struct {
      void* stream;
    } launch;
    struct {
      uint64_t sequence;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
      void* group;
    } collective;
    struct {
      const char* function;
      void* buffer;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t channels;
      void* group;
    } message;
    ProxyOperationPart proxyOperation;
    ProxyStepPart proxyStep;
    struct {
      uint8_t number;
      uint64_t time;
    } channel;
    NetworkPart network;
    // Of copy engines, which no call of ours uses.
    struct {
      uint64_t sequence;
      const char* function;
      const void* input;
      void* output;
      size_t count;
      int root;
      const char *datatype, *strategy;
      bool syncsInside;
      uint32_t batchSize, batches, number;
      void* stream;
    } copies;
  };
};
// On the 64-bit systems that NCCL runs on.
static_assert(sizeof(EventV1) == 120 && sizeof(EventV2) == 128 && sizeof(EventV3) == 120 &&
              sizeof(EventV4) == 104 && sizeof(EventV6) == 112);
static_assert(offsetof(EventV1, collective.protocol) == 107 &&
              offsetof(EventV2, collective.protocol) == 120 &&
              offsetof(EventV3, collective.protocol) == 112 &&
              offsetof(EventV4, collective.protocol) == 96 &&
              offsetof(EventV6, collective.protocol) == 96);

union StateArguments {
  size_t bytes[2];
  int appended;
  uint64_t time;
  void* data;
};

// The functions of one version. Those of a group of versions differ in the event alone.
template <typename Event, typename Init>
struct Functions {
  const char* name;
  Init init;
  int (*startEvent)(void* context, void** handle, Event* event);
  int (*stopEvent)(void* handle);
  int (*recordEventState)(void* handle, int state, StateArguments* arguments);
  int (*finalize)(void* context);
};
using InitV1 = int (*)(void** context, int* wanted);
using InitV4 = int (*)(void** context, int* wanted, const char* name, uint64_t communicator,
                       int nodes, int ranks, int rank, Logger logger);
using InitV5 = int (*)(void** context, uint64_t communicator, int* wanted, const char* name,
                       int nodes, int ranks, int rank, Logger logger);
using FunctionsV1 = Functions<EventV1, InitV1>;
using FunctionsV2 = Functions<EventV2, InitV1>;
using FunctionsV3 = Functions<EventV3, InitV1>;
using FunctionsV4 = Functions<EventV4, InitV4>;
using FunctionsV6 = Functions<EventV6, InitV5>;  // also of version 5
using AnyFunctions = std::variant<const FunctionsV1*, const FunctionsV2*, const FunctionsV3*,
                                  const FunctionsV4*, const FunctionsV6*>;

template <typename Event>
inline constexpr bool kHasApi = std::is_same_v<Event, EventV6>;
template <typename Event>
inline constexpr bool kHasChannels =
    !std::is_same_v<Event, EventV1> && !std::is_same_v<Event, EventV2>;
template <typename Event>
inline constexpr bool kHasTimes = kHasChannels<Event> && !std::is_same_v<Event, EventV3>;

}  // namespace unisono::plugin::profiler_interface
