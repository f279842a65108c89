// SPDX-License-Identifier: Apache-2.0
#include "plugin/profiler.h"

#include <fmt/format.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <variant>

#include "base/log.h"

namespace unisono::plugin {
namespace {

// The binary interface, as NCCL's public plug-in headers define it. Results are ncclResult_t.

// Types of events, which are bits of the word that says what a plug-in wants.
constexpr uint64_t kGroup = 1 << 0, kCollective = 1 << 1, kMessage = 1 << 2,
                   kProxyOperation = 1 << 3, kProxyStep = 1 << 4, kProxyControl = 1 << 5,
                   kChannel = 1 << 6, kNetwork = 1 << 7, kGroupApi = 1 << 8,
                   kCollectiveApi = 1 << 9, kMessageApi = 1 << 10, kLaunch = 1 << 11;
// A plug-in that wants an event is also told of those that it belongs to.
constexpr uint64_t kInsideOfCall = kProxyOperation | kProxyStep | kChannel | kNetwork;

// States that are recorded.
constexpr int kNetworkUpdates = 21, kChannelStops = 22, kGroupStarted = 23, kGroupEnds = 24;

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

void logOfProfiler(int level, unsigned long, const char*, int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  writePluginLog("profiler", level, format, arguments);
  va_end(arguments);
}

// As NCCL spells them in events.
const char* spellingOf(device::DataType type) {
  static constexpr const char* kNames[device::kDataTypes] = {
      "ncclInt8",    "ncclUint8",    "ncclInt32",      "ncclUint32",
      "ncclInt64",   "ncclUint64",   "ncclFloat16",    "ncclFloat32",
      "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  return kNames[static_cast<size_t>(type)];
}
const char* spellingOf(tuning::Algorithm algorithm) {
  static constexpr const char* kNames[device::kAlgorithms] = {
      "TREE",      "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS",
      "NVLS_TREE", "PAT",  "DIRECT",         "TWO_SHOT"};
  return kNames[static_cast<size_t>(algorithm)];
}
const char* spellingOf(tuning::Protocol protocol) {
  static constexpr const char* kNames[device::kProtocols] = {"LL", "LL128", "SIMPLE"};
  return kNames[static_cast<size_t>(protocol)];
}

// ncclFunc_t. Functions that version 1 does not have are those of messages.
uint8_t numberOf(const ProfiledCall& call) {
  static constexpr const char* kNames[] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                           "AllReduce", "SendRecv", "Send",      "Recv"};
  constexpr uint8_t kSendReceive = 5;
  for (size_t i = 0; i < std::size(kNames); i++) {
    if (std::strcmp(kNames[i], call.function) == 0) return static_cast<uint8_t>(i);
  }
  return kSendReceive;
}

uint8_t narrow(int number) {
  return static_cast<uint8_t>(std::clamp(number, 0, 255));
}

// The members that versions 1 to 3 and versions 2 to 6 have in common.
void fillName(auto& part, const ProfiledCommunicator& communicator) {
  part.name = communicator.name.c_str();
  part.communicator = communicator.id;
}
void fillCollective(auto& part, const ProfiledCall& call) {
  part.sequence = call.sequence;
  part.function = call.function;
  part.input = call.input;
  part.output = call.output;
  part.count = call.count;
  part.root = call.peer;
  part.datatype = spellingOf(call.type);
  part.channels = narrow(call.channels);
  part.warps = narrow(call.threads / 32);
  part.algorithm = spellingOf(call.algorithm);
  part.protocol = spellingOf(call.protocol);
}
void* bufferOf(const ProfiledCall& call) {
  return call.output != nullptr ? call.output : const_cast<void*>(call.input);
}
void fillMessage(auto& part, const ProfiledCall& call) {
  part.function = call.function;
  part.buffer = bufferOf(call);
  part.datatype = spellingOf(call.type);
  part.count = call.count;
  part.peer = call.peer;
}

// The event of a call for each version.
void fillCall(EventV1& event, const ProfiledCommunicator& communicator, const ProfiledCall& call) {
  if (call.isMessage) {
    auto& part = event.message;
    fillName(part, communicator);
    part.function = numberOf(call);
    part.buffer = bufferOf(call);
    part.datatype = static_cast<uint8_t>(call.type);
    part.count = call.count;
    part.peer = call.peer;
    return;
  }
  auto& part = event.collective;
  fillName(part, communicator);
  part.sequence = call.sequence;
  part.function = numberOf(call);
  part.input = call.input;
  part.output = call.output;
  part.count = call.count;
  part.root = call.peer;
  part.datatype = static_cast<uint8_t>(call.type);
  part.channels = narrow(call.channels);
  part.warps = narrow(call.threads / 32);
  part.algorithm = static_cast<uint8_t>(call.algorithm);
  part.protocol = static_cast<uint8_t>(call.protocol);
}
template <typename Event>
void fillCall(Event& event, const ProfiledCommunicator& communicator, const ProfiledCall& call) {
  constexpr bool kNamed = std::is_same_v<Event, EventV2> || std::is_same_v<Event, EventV3>;
  if (call.isMessage) {
    if constexpr (kNamed) fillName(event.message, communicator);
    if constexpr (!kNamed) event.message.channels = narrow(call.channels);
    fillMessage(event.message, call);
  } else {
    if constexpr (kNamed) fillName(event.collective, communicator);
    fillCollective(event.collective, call);
  }
}

template <typename Event>
constexpr bool kHasApi = std::is_same_v<Event, EventV6>;
template <typename Event>
constexpr bool kHasChannels = !std::is_same_v<Event, EventV1> && !std::is_same_v<Event, EventV2>;
template <typename Event>
constexpr bool kHasTimes = kHasChannels<Event> && !std::is_same_v<Event, EventV3>;

template <typename Event>
Event eventOf(uint64_t type, int rank, void* parent) {
  Event event;
  std::memset(&event, 0, sizeof(event));
  event.type = static_cast<decltype(event.type)>(type);
  event.parent = parent;
  event.rank = rank;
  return event;
}

template <typename Event, typename Init>
void* start(const Functions<Event, Init>& functions, void* context, Event event) {
  void* handle = nullptr;
  functions.startEvent(context, &handle, &event);
  return handle;
}

}  // namespace

class ProfilerLibrary {
 public:
  // Null if the library cannot be used, which is reported the first time.
  static ProfilerLibrary* open(const std::string& setting, const Warn& warn) {
    static auto* mutex = new std::mutex;
    static auto* opened = new std::map<std::string, std::unique_ptr<ProfilerLibrary>>;
    const std::lock_guard lock(*mutex);
    const auto [entry, isNew] = opened->try_emplace(setting);
    if (isNew) entry->second = load(setting, warn);
    return entry->second.get();
  }

  AnyFunctions functions;
  std::mutex initMutex;
  int wanted = 0;

 private:
  static std::unique_ptr<ProfilerLibrary> load(const std::string& setting, const Warn& warn) {
    auto library = std::make_unique<ProfilerLibrary>();
    library->library_ = openPlugin("profiler", setting, warn);
    if (library->library_ == nullptr) return nullptr;
    const std::string name = setting.empty() ? "libnccl-profiler.so" : setting;
    int version = 0;
    const auto find = [&]<typename Version>(const Version*, int number) {
      const void* found =
          findSymbol(library->library_, fmt::format("ncclProfiler_v{}", number).c_str());
      if (found == nullptr) return false;
      library->functions = static_cast<const Version*>(found);
      version = number;
      return true;
    };
    constexpr const FunctionsV6* kV6 = nullptr;
    const bool found = find(kV6, 6) || find(kV6, 5) ||
                       find(static_cast<const FunctionsV4*>(nullptr), 4) ||
                       find(static_cast<const FunctionsV3*>(nullptr), 3) ||
                       find(static_cast<const FunctionsV2*>(nullptr), 2) ||
                       find(static_cast<const FunctionsV1*>(nullptr), 1);
    const bool complete = found && std::visit(
                                       [](const auto* each) {
                                         return each->init && each->startEvent && each->stopEvent &&
                                                each->recordEventState && each->finalize;
                                       },
                                       library->functions);
    if (!complete) {
      warn(fmt::format("The profiler plug-in {} is ignored: it {}", name,
                       found ? "lacks a function of its interface"
                             : "has none of ncclProfiler_v1 to ncclProfiler_v6"));
      return nullptr;
    }
    const char* own = std::visit([](const auto* each) { return each->name; }, library->functions);
    logInfo("The profiler plug-in {} is used: {} (v{})", name, own == nullptr ? "no name" : own,
            version);
    return library;
  }

  OpenLibrary library_;
};

std::vector<std::unique_ptr<Profiler>> Profiler::open(const std::string& setting,
                                                      const ProfiledCommunicator& communicator,
                                                      const Warn& warn) {
  std::vector<std::unique_ptr<Profiler>> profilers;
  size_t begin = 0;
  while (begin <= setting.size()) {
    const size_t end = std::min(setting.find(',', begin), setting.size());
    ProfilerLibrary* library = ProfilerLibrary::open(setting.substr(begin, end - begin), warn);
    begin = end + 1;
    if (library == nullptr) continue;
    std::unique_ptr<Profiler> profiler(new Profiler(*library, communicator));
    const ProfiledCommunicator& told = profiler->communicator_;
    // Plug-ins write the word of the events that they want.
    std::unique_lock starting(library->initMutex);
    const int result = std::visit(
        [&](const auto* functions) {
          using Init = decltype(functions->init);
          if constexpr (std::is_same_v<Init, InitV1>) {
            return functions->init(&profiler->context_, &library->wanted);
          } else if constexpr (std::is_same_v<Init, InitV4>) {
            return functions->init(&profiler->context_, &library->wanted, told.name.c_str(),
                                   told.id, told.nodes, told.ranks, told.rank, logOfProfiler);
          } else {
            return functions->init(&profiler->context_, told.id, &library->wanted,
                                   told.name.c_str(), told.nodes, told.ranks, told.rank,
                                   logOfProfiler);
          }
        },
        library->functions);
    starting.unlock();
    if (result != kSuccess) {
      warn(fmt::format("A profiler plug-in is ignored: its init returned error {}", result));
      profiler->isStarted_ = false;
      continue;
    }
    profilers.push_back(std::move(profiler));
  }
  return profilers;
}

Profiler::~Profiler() {
  if (!isStarted_) return;
  std::visit([this](const auto* functions) { functions->finalize(context_); }, library_.functions);
}

// Read each time, since the plug-in may change it.
bool Profiler::wants(uint64_t events) const {
  const int wanted = __atomic_load_n(&library_.wanted, __ATOMIC_RELAXED);
  return (static_cast<uint64_t>(static_cast<uint32_t>(wanted)) & events) != 0;
}

void* Profiler::startGroupApi(bool captured, int depth) {
  const auto* functions = std::get_if<const FunctionsV6*>(&library_.functions);
  constexpr uint64_t kAny = kGroup | kCollective | kMessage | kInsideOfCall | kGroupApi |
                            kCollectiveApi | kMessageApi | kLaunch;
  if (functions == nullptr || !wants(kAny)) return nullptr;
  auto event = eventOf<EventV6>(kGroupApi, communicator_.rank, nullptr);
  event.groupApi.captured = captured;
  event.groupApi.depth = depth;
  return start(**functions, context_, event);
}

void Profiler::record(void* groupApi, GroupState state) {
  const auto* functions = std::get_if<const FunctionsV6*>(&library_.functions);
  if (groupApi == nullptr || functions == nullptr) return;
  (*functions)
      ->recordEventState(groupApi, state == GroupState::started ? kGroupStarted : kGroupEnds,
                         nullptr);
}

void* Profiler::startCallApi(const ProfiledCall& call, void* groupApi) {
  const auto* functions = std::get_if<const FunctionsV6*>(&library_.functions);
  const uint64_t type = call.isMessage ? kMessageApi : kCollectiveApi;
  const uint64_t inside = (call.isMessage ? kMessage : kCollective) | kInsideOfCall;
  if (functions == nullptr || !wants(type | inside)) return nullptr;
  auto event = eventOf<EventV6>(type, communicator_.rank, groupApi);
  if (call.isMessage) {
    event.messageApi = {call.function, call.count, spellingOf(call.type), call.stream,
                        call.captured};
  } else {
    event.collectiveApi = {call.function, call.count,  spellingOf(call.type),
                           call.peer,     call.stream, call.captured};
  }
  return start(**functions, context_, event);
}

void* Profiler::startGroup() {
  if (!wants(kGroup | kCollective | kMessage | kInsideOfCall)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        return start(*functions, context_, eventOf<Event>(kGroup, communicator_.rank, nullptr));
      },
      library_.functions);
}

void* Profiler::startCall(const ProfiledCall& call, void* callApi, void* group) {
  const uint64_t type = call.isMessage ? kMessage : kCollective;
  if (!wants(type | kInsideOfCall)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        auto event = eventOf<Event>(type, communicator_.rank, group);
        fillCall(event, communicator_, call);
        if constexpr (kHasApi<Event>) {
          event.parent = callApi;
          (call.isMessage ? event.message.group : event.collective.group) = group;
        }
        return start(*functions, context_, event);
      },
      library_.functions);
}

void* Profiler::startLaunch(void* stream, void* groupApi) {
  const auto* functions = std::get_if<const FunctionsV6*>(&library_.functions);
  if (functions == nullptr || !wants(kLaunch)) return nullptr;
  auto event = eventOf<EventV6>(kLaunch, communicator_.rank, groupApi);
  event.launch.stream = stream;
  return start(**functions, context_, event);
}

void Profiler::stop(void* event) {
  if (event == nullptr) return;
  std::visit([&](const auto* functions) { functions->stopEvent(event); }, library_.functions);
}

void Profiler::addChannel(void* call, int channel, uint64_t start, uint64_t end) {
  if (call == nullptr || !wants(kChannel)) return;
  std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        if constexpr (kHasChannels<Event>) {
          auto event = eventOf<Event>(kChannel, communicator_.rank, call);
          event.channel.number = narrow(channel);
          if constexpr (kHasTimes<Event>) event.channel.time = start;
          void* handle = plugin::start(*functions, context_, event);
          if (handle == nullptr) return;
          StateArguments arguments{};
          arguments.time = end;
          if constexpr (kHasTimes<Event>) {
            functions->recordEventState(handle, kChannelStops, &arguments);
          }
          functions->stopEvent(handle);
        }
      },
      library_.functions);
}

void* Profiler::startProxyOperation(const ProxyOperation& operation, void* call) {
  if (call == nullptr || !wants(kProxyOperation | kProxyStep | kNetwork)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        auto event = eventOf<Event>(kProxyOperation, communicator_.rank, call);
        event.proxyOperation = {::getpid(),          narrow(operation.channel),
                                operation.peer,      operation.slots,
                                operation.slotBytes, operation.sends ? 1 : 0};
        return plugin::start(*functions, context_, event);
      },
      library_.functions);
}

void* Profiler::startProxyStep(int number, void* operation) {
  if (operation == nullptr || !wants(kProxyStep | kNetwork)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        auto event = eventOf<Event>(kProxyStep, communicator_.rank, operation);
        event.proxyStep.number = number;
        return plugin::start(*functions, context_, event);
      },
      library_.functions);
}

void* Profiler::startProxyControl() {
  if (!wants(kProxyControl)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        return plugin::start(*functions, context_,
                             eventOf<Event>(kProxyControl, communicator_.rank, nullptr));
      },
      library_.functions);
}

void Profiler::record(void* event, ProxyState state, size_t number) {
  if (event == nullptr) return;
  std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        constexpr bool kIsOld = !kHasTimes<Event>;
        if (kIsOld && state >= ProxyState::inProgress) return;
        const bool isControl = state >= ProxyState::idle && state <= ProxyState::hasAppended;
        StateArguments arguments{};
        // Before version 4 slots had no arguments.
        if (isControl) arguments.appended = static_cast<int>(number);
        if (!isControl && !kIsOld) arguments.bytes[0] = number;
        functions->recordEventState(event, static_cast<int>(state), &arguments);
      },
      library_.functions);
}

void* Profiler::startNetEvent(int64_t plugin, void* data, void* step) {
  if (step == nullptr || !wants(kNetwork)) return nullptr;
  return std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) -> void* {
        if constexpr (kHasChannels<Event>) {
          auto event = eventOf<Event>(kNetwork, communicator_.rank, step);
          event.network = {plugin, data};
          return plugin::start(*functions, context_, event);
        } else {
          return nullptr;
        }
      },
      library_.functions);
}

void Profiler::updateNetEvent(void* event, void* data) {
  if (event == nullptr) return;
  std::visit(
      [&]<typename Event, typename Init>(const Functions<Event, Init>* functions) {
        if constexpr (kHasTimes<Event>) {
          StateArguments arguments{};
          arguments.data = data;
          functions->recordEventState(event, kNetworkUpdates, &arguments);
        }
      },
      library_.functions);
}

}  // namespace unisono::plugin
