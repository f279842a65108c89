// SPDX-License-Identifier: Apache-2.0
#include "plugin/profiler.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <mutex>
#include <variant>

#include "plugin/profiler_library.h"

namespace unisono::plugin {

using namespace profiler_interface;

namespace {

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
  static constexpr const char* kNames[] = {
      "TREE",      "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS",
      "NVLS_TREE", "PAT",  "DIRECT",         "TWO_SHOT",      "DIRECT_TREE"};
  static_assert(std::size(kNames) == device::kAlgorithms);
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
