// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.h"
#include "bootstrap/wait.h"
#include "plugin/net.h"
#include "transport/net/network.h"
#include "transport/net/plugin_stream.h"
#include "transport/net/slot_registration.h"

namespace unisono::transport {
namespace {

using plugin::NetHandle;

constexpr std::chrono::microseconds kPollInterval{100};

class PluginNetwork final : public Network {
 public:
  PluginNetwork(const TransportContext& context, std::shared_ptr<const plugin::Net> net)
      : context_(context), net_(std::move(net)) {
    logInfo("rank {}: the network is {} with {} device(s)", context_.config.rank, net_->name(),
            net_->ports().size());
  }
  ~PluginNetwork() override;

  std::vector<std::byte> listen(const NetworkGroup& group) override;
  std::vector<NetworkConnection> connect(const NetworkGroup& group,
                                         std::span<const std::byte> offer) override;
  std::vector<NetworkConnection> accept(const NetworkGroup& group) override;
  bool tryConnect(const NetworkGroup& group, std::span<std::byte> offer,
                  std::vector<NetworkConnection>& connections) override;

 private:
  // The receiver's end of a FIFO that is not connected yet.
  struct Listening {
    int peer;
    void* listener = nullptr;
    void* receiver = nullptr;
  };

  const plugin::NetFunctions& functions() const { return net_->functions(); }
  int portOf(const NetworkGroup& group, size_t fifo) const {
    return choosePort(context_, net_->ports(), group.ports[fifo], group.memory->slotBytes(fifo));
  }
  const plugin::NetPort& factsOf(int port) const {
    return net_->ports()[static_cast<size_t>(port)];
  }
  // Of slots in memory of the device. Returns how data pass, as registerOnDevice().
  std::string registerSlots(const NetworkGroup& group, size_t fifo, void* connection,
                            std::optional<void*>& region) const;
  bool flushes(int port) const;
  std::string nameOf(int port) const {
    return fmt::format("through device {} of {}", factsOf(port).name, net_->name());
  }
  void check(const char* function, int result, int peer) const;
  void acceptAll();
  template <typename IsDone>
  void waitUntil(const NetworkGroup& group, IsDone isDone);

  const TransportContext& context_;
  const std::shared_ptr<const plugin::Net> net_;
  std::map<std::pair<uint64_t, size_t>, Listening> listening_;  // by group and FIFO
};

PluginNetwork::~PluginNetwork() {
  for (const auto& [fifo, end] : listening_) {
    if (end.receiver != nullptr) static_cast<void>(functions().closeReceiver(end.receiver));
    if (end.listener != nullptr) static_cast<void>(functions().closeListener(end.listener));
  }
}

void PluginNetwork::check(const char* function, int result, int peer) const {
  if (result == plugin::kSuccess) return;
  throw Error(ErrorCode::systemError,
              fmt::format("A network connection cannot be made: {} of the net plug-in {} returned "
                          "{}",
                          function, net_->name(), plugin::describeResult(result)))
      .rank(context_.config.rank)
      .peer(peer)
      .remedy(
          "NCCL_DEBUG=INFO shows what the plug-in logs. NCCL_NET=Socket uses sockets in place of "
          "it");
}

std::string PluginNetwork::registerSlots(const NetworkGroup& group, size_t fifo, void* connection,
                                         std::optional<void*>& region) const {
  return registerOnDevice(context_, *group.memory, fifo, factsOf(portOf(group, fifo)),
                          registrationWith(functions(), connection,
                                           fmt::format("net plug-in {}", net_->name()), region));
}

// Whether kernels see what arrives in memory of the device through a port only after a flush.
bool PluginNetwork::flushes(int port) const {
  const auto& direct = context_.options.direct;
  return factsOf(port).forcesFlush || direct[static_cast<size_t>(port)].flushes;
}

std::vector<std::byte> PluginNetwork::listen(const NetworkGroup& group) {
  std::vector<std::byte> offer;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    NetHandle handle;
    Listening end{group.peer};
    check("listen", functions().listen(net_->context(), portOf(group, fifo), handle, &end.listener),
          group.peer);
    listening_.emplace(std::pair(group.tag, fifo), end);
    offer.insert(offer.end(), handle.bytes.begin(), handle.bytes.end());
  }
  return offer;
}

// Accepts what can be accepted now.
void PluginNetwork::acceptAll() {
  for (auto& [fifo, end] : listening_) {
    if (end.receiver != nullptr) continue;
    check("accept", functions().accept(end.listener, &end.receiver), end.peer);
    if (end.receiver == nullptr) continue;
    const int result = functions().closeListener(std::exchange(end.listener, nullptr));
    check("closeListen", result, end.peer);
  }
}

template <typename IsDone>
void PluginNetwork::waitUntil(const NetworkGroup& group, IsDone isDone) {
  const std::function<bool()> never = [] { return false; };
  const bootstrap::Wait wait(context_.options.timeout, never);
  for (;;) {
    if (isDone()) return;
    // A sender may be connected only once its receiver has accepted it. This comes after connect(),
    // because some older plug-ins wait in accept().
    acceptAll();
    context_.checkState();
    if (wait.isExpired()) throw connectionTimeout(context_, group, wait.secondsSinceStart());
    std::this_thread::sleep_for(kPollInterval);
  }
}

std::vector<NetworkConnection> PluginNetwork::connect(const NetworkGroup& group,
                                                      std::span<const std::byte> offer) {
  std::vector<std::byte> own(offer.begin(), offer.end());
  std::vector<NetworkConnection> connections;
  waitUntil(group, [&] { return tryConnect(group, own, connections); });
  return connections;
}

bool PluginNetwork::tryConnect(const NetworkGroup& group, std::span<std::byte> offer,
                               std::vector<NetworkConnection>& connections) {
  const size_t count = group.memory->fifos();
  if (offer.size() != count * sizeof(NetHandle)) {
    throw internalError("An offer of {} FIFOs has {} bytes", count, offer.size());
  }
  connections.resize(count);
  bool done = true;
  for (size_t fifo = 0; fifo < count; fifo++) {
    if (connections[fifo].stream != nullptr) continue;
    const int port = portOf(group, fifo);
    void* sender = nullptr;
    // In it plug-ins note how far they are.
    std::byte* const place = offer.data() + fifo * sizeof(NetHandle);
    NetHandle handle;
    std::memcpy(&handle, place, sizeof(handle));
    const int result =
        functions().connect(net_->context(), net_->trafficClass(), port, handle, &sender);
    check("connect", result, group.peer);
    std::memcpy(place, &handle, sizeof(handle));
    if (sender == nullptr) {
      done = false;
      continue;
    }
    std::optional<void*> region;
    const std::string how = registerSlots(group, fifo, sender, region);
    connections[fifo] = {
        std::make_unique<PluginSendStream>(net_, sender, group.memory->streamOf(fifo), region),
        nameOf(port) + how, factsOf(port).name};
  }
  return done;
}

std::vector<NetworkConnection> PluginNetwork::accept(const NetworkGroup& group) {
  const auto begin = listening_.lower_bound({group.tag, 0});
  const auto end = listening_.upper_bound({group.tag, group.memory->fifos()});
  waitUntil(group, [&] {
    return std::all_of(begin, end,
                       [](const auto& entry) { return entry.second.receiver != nullptr; });
  });
  std::vector<NetworkConnection> connections;
  for (size_t fifo = 0; fifo < group.memory->fifos(); fifo++) {
    const auto entry = listening_.extract({group.tag, fifo});
    const int port = portOf(group, fifo);
    void* const receiver = entry.mapped().receiver;
    std::optional<void*> region;
    const std::string how = registerSlots(group, fifo, receiver, region);
    const StreamMemory memory = group.memory->streamOf(fifo);
    connections.push_back({std::make_unique<PluginReceiveStream>(
                               net_, receiver, memory.onDevice && flushes(port), memory, region),
                           nameOf(port) + how, factsOf(port).name});
  }
  return connections;
}

}  // namespace

std::unique_ptr<Network> makePluginNetwork(const TransportContext& context,
                                           std::shared_ptr<const plugin::Net> net) {
  return std::make_unique<PluginNetwork>(context, std::move(net));
}

}  // namespace unisono::transport
