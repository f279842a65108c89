// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/work.h"
#include "plugin/library.h"
#include "tuning/choice.h"

// Profiler plug-ins: libraries that are told of calls and launches as they happen. The interface is
// that of NCCL, versions 1 to 6.
namespace unisono::plugin {

// The library of a profiler plug-in. It stays loaded, and so does the word in which the plug-in
// says which events it wants: it may change that at any time, whatever communicators there are.
class ProfilerLibrary;

// What a plug-in is told of a communicator.
struct ProfiledCommunicator {
  uint64_t id = 0;
  std::string name;
  int nodes = 1, ranks = 1, rank = 0;
};

// What a plug-in is told of a call.
struct ProfiledCall {
  const char* function = "";  // as NCCL spells it: "AllReduce", "Recv"
  bool isMessage = false;
  uint64_t sequence = 0;  // of a collective, among those with the same function
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  int peer = 0;  // of a message; else the root
  device::DataType type = device::DataType::int8;
  void* stream = nullptr;
  bool captured = false;
  int channels = 0;
  // Of a collective that has a choice.
  tuning::Algorithm algorithm = tuning::Algorithm::ring;
  tuning::Protocol protocol = tuning::Protocol::simple;
  int threads = 0;
};

// A plug-in of one rank of a communicator. Each start function returns the plug-in's handle of an
// event, or null if the plug-in wants neither the event nor what belongs to it. The functions take
// null handles. Calls come from one thread at a time.
class Profiler {
 public:
  // Starts the plug-ins that `setting` names (see openPlugin()), separated by commas. Those that
  // cannot be used are reported to `warn`.
  static std::vector<std::unique_ptr<Profiler>> open(const std::string& setting,
                                                     const ProfiledCommunicator& communicator,
                                                     const Warn& warn);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // From the first call of a group until the group's last function returns.
  void* startGroupApi(bool captured, int depth);
  enum class GroupState { started, ends };
  void record(void* groupApi, GroupState state);
  // While a function of the API runs that makes a call.
  void* startCallApi(const ProfiledCall& call, void* groupApi);
  // While the launches of a group are enqueued, each of its calls, and the kernels alone.
  void* startGroup();
  void* startCall(const ProfiledCall& call, void* callApi, void* group);
  void* startLaunch(void* stream, void* groupApi);
  void stop(void* event);
  // A call ran on a channel of the device from `start` to `end`, in nanoseconds since 1970.
  void addChannel(void* call, int channel, uint64_t start, uint64_t end);

  // What a proxy does for a call on one connection of the network, from when the call is launched
  // until all of its slots have passed, and for each of these slots.
  struct ProxyOperation {
    int channel, peer;
    bool sends;
    int slots, slotBytes;  // how many, and what one can hold
  };
  void* startProxyOperation(const ProxyOperation& operation, void* call);
  void* startProxyStep(int number, void* operation);
  // While the proxy does anything else.
  void* startProxyControl();
  // As NCCL numbers them.
  enum class ProxyState {
    sendWaitsForGpu = 8,
    sendWaits = 9,  // until the network has sent the data
    receiveWaits = 10,
    receiveFlushes = 11,
    receiveWaitsForGpu = 12,
    idle = 13,
    active = 14,
    sleeps = 15,
    wakes = 16,
    appends = 17,
    hasAppended = 18,
    inProgress = 19,
    sendWaitsForPeer = 20,
  };
  // `number`: the bytes of a slot that are known, or the operations that were appended.
  void record(void* event, ProxyState state, size_t number = 0);
  // Of a net plug-in, whose number and data are its own, for one slot.
  void* startNetEvent(int64_t plugin, void* data, void* step);
  void updateNetEvent(void* event, void* data);

 private:
  Profiler(ProfilerLibrary& library, const ProfiledCommunicator& communicator)
      : library_(library), communicator_(communicator) {}
  bool wants(uint64_t events) const;

  ProfilerLibrary& library_;
  const ProfiledCommunicator communicator_;
  void* context_ = nullptr;
  bool isStarted_ = true;
};

}  // namespace unisono::plugin
