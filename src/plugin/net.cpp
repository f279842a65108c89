// SPDX-License-Identifier: Apache-2.0
#include "plugin/net.h"

#include <strings.h>

#include <algorithm>
#include <cstdarg>
#include <map>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "plugin/net_properties.h"

namespace unisono::plugin {
namespace {

using ProfilerCallback = int (*)(void** event, int type, void* parent, int64_t plugin, void* data);

struct CommConfig {
  int trafficClass;
};

// A table of functions begins alike in all versions, but for the types of some arguments.
template <int kVersion>
struct NetTable {
  using RegionBytes = Since<8, kVersion, size_t, int>;
  using Bytes = Since<9, kVersion, size_t, int>;
  using Init = Since<11, kVersion, int (*)(void**, uint64_t, CommConfig*, Logger, ProfilerCallback),
                     Since<10, kVersion, int (*)(Logger, ProfilerCallback), int (*)(Logger)>>;
  using Listen = Since<11, kVersion, int (*)(void* context, int device, void* handle, void**),
                       int (*)(int device, void* handle, void**)>;
  using Connect = Since<
      11, kVersion, int (*)(void* context, int device, void* handle, void**, void** onDevice),
      Since<10, kVersion, int (*)(int device, CommConfig*, void* handle, void**, void** onDevice),
            Since<7, kVersion, int (*)(int device, void* handle, void**, void** onDevice),
                  int (*)(int device, void* handle, void**)>>>;
  using Accept = Since<7, kVersion, int (*)(void* listener, void**, void** onDevice),
                       int (*)(void* listener, void**)>;
  using Send = Since<10, kVersion,
                     int (*)(void*, void* data, Bytes, int tag, void* region, void* event, void**),
                     int (*)(void*, void* data, Bytes, int tag, void* region, void**)>;
  using Receive =
      Since<10, kVersion,
            int (*)(void*, int count, void** data, Bytes*, int* tags, void** regions, void** events,
                    void**),
            int (*)(void*, int count, void** data, Bytes*, int* tags, void** regions, void**)>;

  const char* name;
  Init init;
  int (*devices)(int*);
  int (*getProperties)(int device, PropertiesOf<kVersion>*);
  Listen listen;
  Connect connect;
  Accept accept;
  int (*regMr)(void* connection, void* data, RegionBytes, int type, void** region);
  int (*regMrDmaBuf)(void*, void*, size_t, int, uint64_t, int, void**);
  int (*deregMr)(void* connection, void* region);
  Send isend;
  Receive irecv;
  int (*iflush)(void*, int count, void** data, int* bytes, void** regions, void** request);
  int (*test)(void* request, int* done, int* bytes);
  int (*closeSend)(void*);
  int (*closeRecv)(void*);
  int (*closeListen)(void*);
};

// What follows in versions 11 and 12.
struct LaterNetTable {
  NetTable<11> common;  // as long as that of version 12
  void *getDeviceMr, *irecvConsumed, *makeVDevice;
  int (*finalize)(void* context);
  void* setNetAttr;
};
static_assert(sizeof(NetTable<8>) == 152 - 2 * sizeof(void*) && sizeof(LaterNetTable) == 176);

void logOfNet(int level, unsigned long, const char*, int, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  writePluginLog("net", level, format, arguments);
  va_end(arguments);
}

// What a plug-in tells of one of its events: `parent` is what it got with a slot, *event what it
// was given when the event began.
int noteEvent(void** event, int type, void* parent, int64_t plugin, void* data) {
  constexpr int kStart = 0, kStop = 1, kUpdate = 2, kUpdateAndStop = 3;
  if (event == nullptr) return kSuccess;
  if (type == kStart) {
    auto* events = static_cast<NetEvents*>(parent);
    *event = events == nullptr ? nullptr : events->start(plugin, data);
    return kSuccess;
  }
  auto* known = static_cast<NetEvent*>(*event);
  if (known == nullptr) return kSuccess;
  if (type == kUpdate || type == kUpdateAndStop) known->update(data);
  if (type != kStop && type != kUpdateAndStop) return kSuccess;
  *event = nullptr;
  known->stop();
  return kSuccess;
}

template <int kVersion>
class NetFunctionsOf final : public NetFunctions {
 public:
  NetFunctionsOf(OpenLibrary library, const void* table)
      : library_(std::move(library)), table_(*static_cast<const NetTable<kVersion>*>(table)) {}

  int version() const override { return kVersion; }
  const char* name() const override { return table_.name; }
  bool isComplete() const override {
    return table_.init && table_.devices && table_.getProperties && table_.listen &&
           table_.connect && table_.accept && table_.regMr && table_.deregMr && table_.isend &&
           table_.irecv && table_.test && table_.closeSend && table_.closeRecv &&
           table_.closeListen;
  }

  int init(void** context, uint64_t communicator, int trafficClass) const override {
    if constexpr (kVersion >= 11) {
      CommConfig config{trafficClass};
      return table_.init(context, communicator, &config, logOfNet, noteEvent);
    } else if constexpr (kVersion == 10) {
      return table_.init(logOfNet, noteEvent);
    } else {
      return table_.init(logOfNet);
    }
  }
  int finalize(void* context) const override {
    if constexpr (kVersion >= 11) {
      const auto* table = reinterpret_cast<const LaterNetTable*>(&table_);
      return table->finalize == nullptr ? kSuccess : table->finalize(context);
    }
    return kSuccess;
  }
  int devices(int* count) const override { return table_.devices(count); }
  int describe(int device, NetPort& port) const override {
    PropertiesOf<kVersion> found{};
    const int result = table_.getProperties(device, &found);
    if (result != kSuccess) return result;
    describePort<kVersion>(found, port);
    port.takesDmaBufs = port.takesDmaBufs && table_.regMrDmaBuf != nullptr;
    return kSuccess;
  }
  int listen(void* context, int device, NetHandle& handle, void** listener) const override {
    if constexpr (kVersion >= 11) {
      return table_.listen(context, device, &handle, listener);
    } else {
      return table_.listen(device, &handle, listener);
    }
  }
  int connect(void* context, int trafficClass, int device, NetHandle& handle,
              void** sender) const override {
    // Null: nothing of a connection is handed to the GPU.
    [[maybe_unused]] void* onDevice = nullptr;
    if constexpr (kVersion >= 11) {
      return table_.connect(context, device, &handle, sender, &onDevice);
    } else if constexpr (kVersion == 10) {
      CommConfig config{trafficClass};
      return table_.connect(device, &config, &handle, sender, &onDevice);
    } else if constexpr (kVersion >= 7) {
      return table_.connect(device, &handle, sender, &onDevice);
    } else {
      return table_.connect(device, &handle, sender);
    }
  }
  int accept(void* listener, void** receiver) const override {
    if constexpr (kVersion >= 7) {
      void* onDevice = nullptr;
      return table_.accept(listener, receiver, &onDevice);
    } else {
      return table_.accept(listener, receiver);
    }
  }
  int registerMemory(void* connection, void* data, size_t bytes, int type,
                     void** region) const override {
    using RegionBytes = typename NetTable<kVersion>::RegionBytes;
    return table_.regMr(connection, data, static_cast<RegionBytes>(bytes), type, region);
  }
  int registerDmaBuf(void* connection, void* data, size_t bytes, uint64_t offset, int descriptor,
                     void** region) const override {
    return table_.regMrDmaBuf(connection, data, bytes, kDeviceMemory, offset, descriptor, region);
  }
  int deregisterMemory(void* connection, void* region) const override {
    return table_.deregMr(connection, region);
  }
  int send(void* sender, void* data, size_t bytes, void* region, [[maybe_unused]] NetEvents* events,
           void** request) const override {
    const auto length = static_cast<typename NetTable<kVersion>::Bytes>(bytes);
    if constexpr (kVersion >= 10) {
      return table_.isend(sender, data, length, 0, region, events, request);
    } else {
      return table_.isend(sender, data, length, 0, region, request);
    }
  }
  int receive(void* receiver, void* data, size_t bytes, void* region,
              [[maybe_unused]] NetEvents* events, void** request) const override {
    auto length = static_cast<typename NetTable<kVersion>::Bytes>(bytes);
    int tag = 0;
    if constexpr (kVersion >= 10) {
      void* parent = events;
      return table_.irecv(receiver, 1, &data, &length, &tag, &region, &parent, request);
    } else {
      return table_.irecv(receiver, 1, &data, &length, &tag, &region, request);
    }
  }
  int flush(void* receiver, void* data, int bytes, void* region, void** request) const override {
    if (table_.iflush == nullptr) return kSuccess;
    return table_.iflush(receiver, 1, &data, &bytes, &region, request);
  }
  int test(void* request, int* done, int* bytes) const override {
    return table_.test(request, done, bytes);
  }
  int closeSender(void* sender) const override { return table_.closeSend(sender); }
  int closeReceiver(void* receiver) const override { return table_.closeRecv(receiver); }
  int closeListener(void* listener) const override { return table_.closeListen(listener); }

 private:
  const OpenLibrary library_;
  const NetTable<kVersion>& table_;
};

bool sameName(const std::string& a, const std::string& b) {
  return ::strcasecmp(a.c_str(), b.c_str()) == 0;
}

std::vector<std::string> splitList(const std::string& list) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    if (end > begin) names.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

}  // namespace

struct Net::Loaded {
  OpenLibrary library;  // never closed: threads of the plug-in may run its code
  std::shared_ptr<const NetFunctions> functions;  // null: it cannot be used
  std::string problem;                            // why; empty also where there is no library
  bool started = false;                           // init() has succeeded once
};

std::string describeResult(int result) {
  constexpr const char* kNames[] = {
      "ncclSuccess",         "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError",
      "ncclInvalidArgument", "ncclInvalidUsage",       "ncclRemoteError", "ncclInProgress"};
  if (result < 0 || static_cast<size_t>(result) >= std::size(kNames)) return fmt::to_string(result);
  return fmt::format("{} ({})", result, kNames[result]);
}

// Under the lock of open().
Net::Loaded& Net::load(const std::string& plugin) {
  // Never destroyed: a communicator may outlive the end of main(). A library has several names.
  static auto& byName = *new std::map<std::string, std::shared_ptr<Loaded>>;
  static auto& byLibrary = *new std::map<const void*, std::shared_ptr<Loaded>>;
  std::shared_ptr<Loaded>& loaded = byName[plugin];
  if (loaded != nullptr) return *loaded;
  std::string problem;
  const OpenLibrary library =
      openPlugin("net", plugin, [&](const std::string& text) { problem = text; });
  std::shared_ptr<Loaded> none;
  std::shared_ptr<Loaded>& known = library == nullptr ? none : byLibrary[library.get()];
  const bool isNew = known == nullptr;
  if (isNew) known = std::make_shared<Loaded>();
  loaded = known;
  if (!isNew) return *loaded;
  loaded->library = library;
  loaded->problem = problem;
  if (library == nullptr) return *loaded;
  loaded->functions = findFunctions<NetFunctions, NetFunctionsOf>(library, "ncclNetPlugin_v");
  if (loaded->functions == nullptr || !loaded->functions->isComplete()) {
    loaded->problem = fmt::format(
        "The net plug-in {} is ignored: it {}", plugin.empty() ? "libnccl-net.so" : plugin,
        loaded->functions != nullptr ? "lacks a function of its interface"
                                     : "has none of ncclNetPlugin_v6 to _v12");
    loaded->functions = nullptr;
  }
  return *loaded;
}

std::string Net::start(Loaded& loaded) {
  if (functions_->hasContexts() || !loaded.started) {
    const int result = functions_->init(&context_, member_.communicator, member_.trafficClass);
    if (result != kSuccess) return fmt::format("its init returned {}", describeResult(result));
    loaded.started = true;
  }
  started_ = true;
  int count = 0;
  if (const int result = functions_->devices(&count); result != kSuccess) {
    return fmt::format("its devices returned {}", describeResult(result));
  }
  if (count <= 0) return "it has no devices";
  for (int device = 0; device < count; device++) {
    NetPort& port = ports_.emplace_back();
    if (const int result = functions_->describe(device, port); result != kSuccess) {
      return fmt::format("its getProperties of device {} returned {}", device,
                         describeResult(result));
    }
    if (port.name.empty()) port.name = fmt::format("device {}", device);
    if (port.deviceType != 0) {
      return fmt::format("its device {} needs code on the GPU (type {}), which is not supported",
                         port.name, port.deviceType);
    }
    if (port.messageBytes == 0) return fmt::format("its device {} sends no messages", port.name);
  }
  return "";
}

std::shared_ptr<const Net> Net::open(const std::string& plugins, const std::string& name,
                                     const Member& member, const Warn& warn) {
  static std::mutex mutex;
  const bool isOwn = sameName(name, "Socket") || sameName(name, "IB");
  std::vector<std::string> list = splitList(plugins);
  if (list.empty()) list.emplace_back();
  if (isOwn || sameName(plugins, "none")) list.clear();
  std::string others;
  // Held during init(): plug-ins were written for NCCL, which starts one at a time.
  const std::lock_guard lock(mutex);
  for (const std::string& plugin : list) {
    Loaded& loaded = load(plugin);
    if (!loaded.problem.empty()) warn(loaded.problem);
    if (loaded.functions == nullptr) continue;
    const char* own = loaded.functions->name();
    const std::string called = own == nullptr ? plugin : own;
    if (!name.empty() && !sameName(name, called)) {
      others += (others.empty() ? "" : ", ") + called;
      continue;
    }
    std::shared_ptr<Net> net(new Net(loaded.library, loaded.functions, member));
    net->name_ = fmt::format("{} (v{})", called, loaded.functions->version());
    const std::string problem = net->start(loaded);
    if (problem.empty()) {
      noteStartedNet(loaded.library);
      return net;
    }
    // As with NCCL, what has failed once is not tried by later communicators.
    loaded.functions = nullptr;
    loaded.problem = fmt::format("The net plug-in {} is ignored: {}", net->name_, problem);
    warn(loaded.problem);
  }
  if (name.empty() || isOwn) return nullptr;
  throw invalidUsage("NCCL_NET or ncclConfig_t.netName names the unknown network \"{}\"", name)
      .remedy(fmt::format("Use Socket{}{}, or set NCCL_NET_PLUGIN to the plug-in that has it",
                          others.empty() ? "" : ", ", others));
}

Net::~Net() {
  if (!started_ || !functions_->hasContexts()) return;
  if (const int result = functions_->finalize(context_); result != kSuccess) {
    logWarn("finalize of the net plug-in {} returned {}", name_, describeResult(result));
  }
}

}  // namespace unisono::plugin
