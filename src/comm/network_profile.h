// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "plan/plan.h"
#include "plugin/net.h"
#include "plugin/profiler.h"
#include "transport/connector.h"
#include "transport/net/stream.h"
#include "transport/transport.h"

namespace unisono::comm {

// The profiler plug-ins of a communicator. They are called by one thread at a time.
struct ProfilerPlugins {
  std::mutex mutex;
  std::vector<std::unique_ptr<plugin::Profiler>> all;
};
using PluginEvents = std::vector<void*>;  // by plug-in

// Tells profiler plug-ins what the proxy moves for each call. The proxy knows no calls, so that
// graphs replay without it: which slots of a FIFO belong to a launch follows from counting them, on
// the CPU as the kernels do. Nobody counts replays. What passes over a FIFO that captured calls use
// is therefore not told any more.
class NetworkProfile : public std::enable_shared_from_this<NetworkProfile> {
 public:
  NetworkProfile(plan::CommConfig config, std::shared_ptr<const transport::ChannelGraphs> graphs,
                 std::shared_ptr<ProfilerPlugins> plugins);
  ~NetworkProfile();
  NetworkProfile(const NetworkProfile&) = delete;
  NetworkProfile& operator=(const NetworkProfile&) = delete;

  // The launches of `plan` follow, for `tasks`, whose events these are.
  void begin(const plan::Plan& plan, const std::vector<plan::Task>& tasks,
             const std::vector<PluginEvents>& events);
  // They follow in every replay.
  void capture(const plan::Plan& plan);
  // By the proxy's thread, or by the one that connects.
  std::unique_ptr<transport::StreamObserver> observe(const transport::NetworkEnd& end);
  void note(transport::ProxyActivity activity);
  // Stops all events. The plug-ins must still be there.
  void close();

 private:
  class Line;
  class Observer;
  // Slots that a launch takes of one FIFO.
  struct Use {
    transport::NetworkEnd end;
    size_t task;  // kNoTask: none
    uint64_t steps;
    uint64_t slotBytes;
  };
  static constexpr size_t kNoTask = ~size_t{0};
  std::vector<Use> usesOf(const plan::Plan& plan, const std::vector<plan::Task>& tasks) const;
  void addCollective(const device::CollectiveWork& work, size_t task, std::vector<Use>& uses) const;

  const plan::CommConfig config_;
  const std::shared_ptr<const transport::ChannelGraphs> graphs_;
  const std::shared_ptr<ProfilerPlugins> plugins_;  // its mutex protects what follows, too
  std::map<transport::NetworkEnd, std::shared_ptr<Line>> lines_;
  PluginEvents sleep_;  // while the proxy sleeps
  bool closed_ = false;
};

}  // namespace unisono::comm
