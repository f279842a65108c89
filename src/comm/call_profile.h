// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/settings.h"
#include "comm/block_times.h"
#include "comm/device_clock.h"
#include "comm/network_profile.h"
#include "diagnose/timeline.h"
#include "plan/plan.h"
#include "plugin/profiler.h"
#include "runtime/runtime.h"
#include "transport/transport.h"

namespace unisono::comm {

class GroupProfile;

// Tells the timeline of UNISONO_TRACE and the profiler plug-ins of NCCL_PROFILER_PLUGIN what one
// rank of a communicator does and when.
class CallProfile : public std::enable_shared_from_this<CallProfile> {
 public:
  // What is told of the communicator.
  struct Subject {
    int device = 0;
    uint64_t id = 0;  // the same on all ranks
    int nodes = 1;
    std::string name, description;
    plan::CommConfig config;
  };
  // Null if nobody wants to know.
  static std::shared_ptr<CallProfile> create(
      runtime::Runtime& runtime, const Settings& settings, const Subject& subject,
      std::shared_ptr<const transport::ChannelGraphs> graphs);

  // The communicator is complete. Its creation began at `begin`.
  void created(int64_t begin);
  // The profile of a group of calls that begins now.
  std::shared_ptr<GroupProfile> beginGroup();
  // Looks which launches have ended. May be called from any thread.
  void collect();
  // May be called from any thread, also after close().
  void addTransfer(const transport::Transfer& transfer);
  // What passes over the network, for plug-ins; null without.
  NetworkProfile* network() const { return network_.get(); }
  // Nothing else is told after it. The device must be done, unless calls were aborted.
  void close();

 private:
  friend class GroupProfile;

  // One launch whose blocks note their times.
  struct Kernel {
    BlockTimes::Launch times;
    std::string text;               // of the timeline
    std::vector<CallBlocks> calls;  // for plug-ins
  };
  using Kernels = std::vector<Kernel>;
  // The launches of a group, between two points of their stream.
  struct Launches {
    std::string name, arguments;  // of the slice
    diagnose::Timeline::Track launcher;
    int64_t launched = 0;  // when they were enqueued
    uint64_t stream = 0;
    // The channels of each call, and its events by plug-in.
    struct Channels {
      int count;
      PluginEvents events;
    };
    std::vector<Channels> calls;
    Kernels kernels;
    std::unique_ptr<runtime::TimedPoint> start, end;
  };

  CallProfile(runtime::Runtime& runtime, const Subject& subject);
  // For replays of captured calls, whose kernels are between two that note the time.
  void prepareReplays();
  void stamp(uint64_t captured, bool begins, runtime::Stream stream);
  void reportReplays();
  std::unique_ptr<runtime::TimedPoint> takePoint();
  void addLaunches(Launches launches);
  void report(const Launches& launches, int64_t start, int64_t end);
  // When a block ran, by the steady clock; nothing if it is not known.
  struct Span {
    int64_t start, end;
  };
  std::optional<Span> spanOf(device::BlockTime& block) const;
  void fitClock(const Kernels& kernels, int64_t start, int64_t end);
  void tellChannels(const Launches& launches, int64_t start, int64_t end);
  void showChannels(const Kernels& kernels, std::string_view name);
  bool isCaptured(runtime::Stream stream) const;
  uint64_t nextSequence(plan::Call call);
  // Calls `use` with each plug-in and its index, until close().
  template <typename Use>
  void tellPlugins(Use use) {
    const std::lock_guard lock(plugins_->mutex);
    for (size_t i = 0; i < plugins_->all.size(); i++) use(*plugins_->all[i], i);
  }

  runtime::Runtime& runtime_;
  const Subject subject_;
  std::shared_ptr<diagnose::Timeline> timeline_;  // null without
  const std::shared_ptr<ProfilerPlugins> plugins_ = std::make_shared<ProfilerPlugins>();
  std::shared_ptr<NetworkProfile> network_;
  std::array<uint64_t, plan::kCallKinds>
      sequences_{};  // calls of each function, by launching thread

  std::mutex collectMutex_;  // taken before the others
  // collectMutex_ protects what follows, mutex_ the captured calls.
  DeviceClock clock_;
  BlockTimes times_;
  // Without a timeline null.
  std::shared_ptr<runtime::PinnedMemory> replayTimes_;
  std::unique_ptr<BlockTimes> capturedTimes_;  // of captured launches, until the end
  uint64_t replaysShown_ = 0;
  struct Captured {
    std::string name, arguments;
    std::shared_ptr<const Kernels> kernels;  // null while they are being captured
  };
  std::vector<Captured> captured_;
  std::vector<uint64_t> namedStreams_;  // collectMutex_ protects it
  std::mutex mutex_;
  std::vector<Launches> running_;
  std::vector<std::unique_ptr<runtime::TimedPoint>> points_;  // that can be used again
  bool closed_ = false;
  // Threads of the timeline: of the process and, by channel, of the device.
  std::map<transport::NetworkEnd, int64_t> connections_;
  std::map<int, int64_t> channels_;  // collectMutex_ protects it
};

// What is told of one group of calls on one communicator. Used by the thread of the group, and then
// by the one that connects and launches it, if that is another one. Its last owner ends the group.
class GroupProfile {
 public:
  explicit GroupProfile(std::shared_ptr<CallProfile> profile) : profile_(std::move(profile)) {}
  ~GroupProfile();
  GroupProfile(const GroupProfile&) = delete;
  GroupProfile& operator=(const GroupProfile&) = delete;

  // A call was made, inside `depth` groups.
  void add(const plan::Task& task, runtime::Stream stream, int depth);
  // The function that ends the group begins, and returns to the user.
  void ending();
  void returned();

  // A part of the group's work on the CPU, until it is destroyed.
  class Step {
   public:
    Step(GroupProfile* group, const char* name);  // nothing if `group` is null
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    GroupProfile* group_;
    const char* name_;
    int64_t start_;
  };

  // Around the launches of the group on `stream`: those of `plan`, for `tasks`.
  void beginLaunches(runtime::Stream stream, bool captured, const plan::Plan& plan,
                     const std::vector<plan::Task>& tasks);
  // Where the blocks of the launch that comes next note their times; null: nowhere.
  device::BlockTime* timesOf(const plan::Launch& launch, const std::vector<plan::Task>& tasks);
  void endLaunches(runtime::Stream stream);

 private:
  struct Call {
    plan::Call call;
    int64_t start;
    std::string arguments;
    plugin::ProfiledCall told;
    PluginEvents apiEvents, events;
  };
  // The group's own events of a plug-in.
  struct GroupEvents {
    void *api = nullptr, *group = nullptr, *launch = nullptr;
  };

  void stopLaunches();

  std::shared_ptr<CallProfile> profile_;
  std::vector<Call> calls_;
  std::vector<GroupEvents> events_;  // by plug-in
  bool isLaunching_ = false;
  diagnose::Timeline::Track caller_;
  CallProfile::Launches launches_;
  uint64_t captured_ = 0;  // the number of these calls among those that were captured; 0: they run
};

}  // namespace unisono::comm
