// SPDX-License-Identifier: Apache-2.0
#include "comm/call_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/system.h"
#include "base/thread.h"
#include "comm/call_description.h"
#include "device/kernels.h"
#include "diagnose/journal.h"
#include "diagnose/rank_view.h"

namespace unisono::comm {
namespace {

using diagnose::steadyNow;
using diagnose::Timeline;
using plan::Call;

Timeline::Track thisThread() {
  return {::getpid(), ::gettid()};
}

// Begins the names of launches in the timeline, as those of NCCL do.
constexpr std::string_view kKernelPrefix = "ncclDevKernel_";

// Nanoseconds since 1970, of a time of the steady clock.
uint64_t sinceEpoch(int64_t steady) {
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  return static_cast<uint64_t>(now.count() - steadyNow() + steady);
}

// Of tracks of the timeline that are no threads: all are different.
int64_t nextTrack() {
  static std::atomic<int64_t> tracks{0};
  return -2 - tracks++;
}

// A thread of the process that asks all profiles now and then. Not waited for at exit.
class ProfileThread {
 public:
  static ProfileThread& get() {
    static std::atomic<ProfileThread*> current{nullptr};
    [[maybe_unused]] static const int registered = std::atexit([] {
      ProfileThread* thread = current.load();
      if (thread != nullptr) thread->stop();
    });
    ProfileThread* found = current.load();
    while (found == nullptr || found->forks_ != forkCount()) {
      auto made = std::unique_ptr<ProfileThread>(new ProfileThread);
      if (current.compare_exchange_strong(found, made.get())) found = made.release();
    }
    return *found;
  }

  void add(const std::shared_ptr<CallProfile>& profile) {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    profiles_.push_back(profile);
    if (running_) return;
    startThread("unisono-trace", [this] { run(); }).detach();
    running_ = true;
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{20};

  ProfileThread() = default;

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      std::erase_if(profiles_, [](const auto& each) { return each.expired(); });
      if (profiles_.empty()) break;
      const std::vector<std::weak_ptr<CallProfile>> all = profiles_;
      working_ = true;
      lock.unlock();
      for (const auto& each : all) {
        if (const auto profile = each.lock()) profile->collect();
      }
      lock.lock();
      working_ = false;
      changed_.notify_all();
      changed_.wait_for(lock, kInterval, [this] { return stopped_; });
    }
    running_ = false;
  }

  // The thread touches no device any more once the process exits, as drivers end with it.
  void stop() {
    if (forks_ != forkCount()) return;
    std::unique_lock lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !working_; });
  }

  const int forks_ = forkCount();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<CallProfile>> profiles_;
  bool running_ = false, working_ = false, stopped_ = false;
};

}  // namespace

std::shared_ptr<CallProfile> CallProfile::create(
    runtime::Runtime& runtime, const Settings& settings, const Subject& subject,
    std::shared_ptr<const transport::ChannelGraphs> graphs) {
  const int rank = subject.config.rank;
  std::shared_ptr<Timeline> timeline;
  if (!settings.traceFile.empty()) timeline = Timeline::open(settings.traceFile, rank);
  auto plugins = plugin::Profiler::open(
      settings.profilerPlugin,
      {subject.id, subject.name, subject.nodes, subject.config.ranks, rank}, warnOnce);
  if (timeline == nullptr && plugins.empty()) return nullptr;
  std::shared_ptr<CallProfile> profile(new CallProfile(runtime, subject));
  profile->timeline_ = std::move(timeline);
  profile->plugins_->all = std::move(plugins);
  if (!profile->plugins_->all.empty()) {
    profile->network_ =
        std::make_shared<NetworkProfile>(subject.config, std::move(graphs), profile->plugins_);
  }
  if (profile->timeline_ != nullptr) {
    profile->timeline_->nameProcess(::getpid(), processName());
    profile->timeline_->nameProcess(subject.device, fmt::format("GPU {}", subject.device));
  }
  if (profile->timeline_ != nullptr) profile->prepareReplays();
  ProfileThread::get().add(profile);
  return profile;
}

CallProfile::CallProfile(runtime::Runtime& runtime, const Subject& subject)
    : runtime_(runtime), subject_(subject), clock_(runtime, subject.device), times_(runtime) {}

void CallProfile::created(int64_t begin) {
  if (timeline_ == nullptr) return;
  timeline_->add({thisThread(), "ncclCommInitRank", "cpu_op", begin, steadyNow(),
                  fmt::format(R"("Group size": {}, "Rank": {})", subject_.config.ranks,
                              subject_.config.rank)});
}

std::shared_ptr<GroupProfile> CallProfile::beginGroup() {
  return std::make_shared<GroupProfile>(shared_from_this());
}

std::unique_ptr<runtime::TimedPoint> CallProfile::takePoint() {
  {
    const std::lock_guard lock(mutex_);
    if (!points_.empty()) {
      auto point = std::move(points_.back());
      points_.pop_back();
      return point;
    }
  }
  return runtime_.createTimedPoint(subject_.device);
}

void CallProfile::addLaunches(Launches launches) {
  const std::lock_guard lock(mutex_);
  if (!closed_) running_.push_back(std::move(launches));
}

// What is not a stream is refused later, with the call.
bool CallProfile::isCaptured(runtime::Stream stream) const {
  try {
    const runtime::DeviceScope scope(runtime_, subject_.device);
    return runtime_.captureState(stream) != runtime::CaptureState::none;
  } catch (const Error&) {
    return false;
  }
}

// From 0, as in NCCL.
uint64_t CallProfile::nextSequence(Call call) {
  return sequences_[static_cast<size_t>(call)]++;
}

// mutex_ is not held while the device is asked, which may take as long as what runs on it: a kernel
// may wait for a call that the user's thread is about to make.
void CallProfile::collect() {
  const std::lock_guard collecting(collectMutex_);
  std::vector<Launches> running;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    running = std::exchange(running_, {});
  }
  size_t done = 0;
  try {
    for (; done < running.size(); done++) {
      const auto end = running[done].end->reachedAt();
      if (!end) break;
      clock_.renew();
      report(running[done], *running[done].start->reachedAt(), *end);
    }
  } catch (const std::exception& error) {
    logInfo("{}: times of launches are not told any more: {}", subject_.description, error.what());
    done = running.size();
  }
  if (timeline_ != nullptr) {
    reportReplays();
    timeline_->flush();
  }
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < done; i++) {
    if (!running[i].kernels.empty()) times_.giveBack(running[i].kernels.back().times.end);
    points_.push_back(std::move(running[i].start));
    points_.push_back(std::move(running[i].end));
  }
  running.erase(running.begin(), running.begin() + static_cast<ptrdiff_t>(done));
  running_.insert(running_.begin(), std::make_move_iterator(running.begin()),
                  std::make_move_iterator(running.end()));
}

void CallProfile::close() {
  collect();
  const std::lock_guard collecting(collectMutex_);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    running_.clear();
  }
  if (network_ != nullptr) network_->close();
  const std::lock_guard lock(plugins_->mutex);
  plugins_->all.clear();
}

// Each connection is a thread of its own, so that slices never overlap.
void CallProfile::addTransfer(const transport::Transfer& transfer) {
  if (timeline_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  const transport::NetworkEnd& of = transfer.of;
  const auto [entry, isNew] = connections_.try_emplace(of, 0);
  if (isNew) entry->second = nextTrack();
  const Timeline::Track track{::getpid(), entry->second};
  if (isNew) {
    timeline_->nameThread(
        track, fmt::format("network of rank {}: {}{} rank {}, channel {}, {}", subject_.config.rank,
                           of.messages ? "messages " : "", of.sends ? "to" : "from", of.peer,
                           of.channel, tuning::nameOf(of.protocol)));
  }
  timeline_->add(
      {track, of.sends ? "send over the network" : "receive over the network", "network",
       transfer.start, transfer.end,
       fmt::format(R"("Rank": {}, "Peer": {}, "Channel": {}, "Protocol": "{}", )"
                   R"("Slots": {}{}, "Process Group Name": {})",
                   subject_.config.rank, of.peer, of.channel, tuning::nameOf(of.protocol),
                   transfer.slots, of.sends ? fmt::format(R"(, "Bytes": {})", transfer.bytes) : "",
                   quoteJson(subject_.name))});
  if (closed_) timeline_->flush();
}

std::optional<CallProfile::Span> CallProfile::spanOf(device::BlockTime& block) const {
  const auto time = BlockTimes::read(block);
  const auto start = clock_.steadyOf(time.began), end = clock_.steadyOf(time.ended);
  if (time.began == 0 || time.ended == 0 || !start) return std::nullopt;
  return Span{*start, *end};
}

// Plug-ins are told of the blocks that carry a call, from the first launch to the last one. If no
// block has noted its times, all channels of the call are told those of the launches.
void CallProfile::tellChannels(const Launches& launches, int64_t start, int64_t end) {
  std::vector<std::map<int, Span>> spans(launches.calls.size());  // by call and channel
  for (const Kernel& kernel : launches.kernels) {
    for (const CallBlocks& carries : kernel.calls) {
      for (int block = carries.first; block < carries.first + carries.count; block++) {
        const auto span = spanOf(kernel.times.blocks[static_cast<size_t>(block)]);
        if (!span) continue;
        const auto [known, isNew] = spans.at(carries.call).try_emplace(block, *span);
        if (isNew) continue;
        known->second.start = std::min(known->second.start, span->start);
        known->second.end = std::max(known->second.end, span->end);
      }
    }
  }
  // One conversion: the clocks cannot be read at the same moment.
  const uint64_t shift = sinceEpoch(0);
  tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    for (size_t i = 0; i < spans.size(); i++) {
      const Launches::Channels& call = launches.calls[i];
      for (int channel = 0; spans[i].empty() && channel < call.count; channel++) {
        plugin.addChannel(call.events[index], channel, shift + static_cast<uint64_t>(start),
                          shift + static_cast<uint64_t>(end));
      }
      for (const auto& [channel, span] : spans[i]) {
        plugin.addChannel(call.events[index], channel, shift + static_cast<uint64_t>(span.start),
                          shift + static_cast<uint64_t>(span.end));
      }
    }
  });
}

void CallProfile::showChannels(const Kernels& kernels, std::string_view name) {
  for (const Kernel& kernel : kernels) {
    for (size_t i = 0; i < kernel.times.blocks.size(); i++) {
      const auto span = spanOf(kernel.times.blocks[i]);
      if (!span) continue;
      const auto channel = static_cast<int>(i);
      const auto [entry, isNew] = channels_.try_emplace(channel, 0);
      if (isNew) entry->second = nextTrack();
      const Timeline::Track track{subject_.device, entry->second};
      if (isNew) {
        timeline_->nameThread(
            track, fmt::format("channel {} of rank {}{}{}", channel, subject_.config.rank,
                               subject_.name.empty() ? "" : " of ", subject_.name));
      }
      timeline_->add({track, name, "channel", span->start, span->end,
                      fmt::format(R"("Rank": {}, "Channel": {}, "Launch": {}, )"
                                  R"("Process Group Name": {})",
                                  subject_.config.rank, channel, quoteJson(kernel.text),
                                  quoteJson(subject_.name))});
    }
  }
}

// Blocks run between the beginning of the launches and their end.
void CallProfile::fitClock(const Kernels& kernels, int64_t start, int64_t end) {
  uint64_t began = std::numeric_limits<uint64_t>::max(), ended = 0;
  for (const Kernel& kernel : kernels) {
    for (device::BlockTime& block : kernel.times.blocks) {
      const auto time = BlockTimes::read(block);
      if (time.began == 0 || time.ended == 0) continue;
      began = std::min(began, time.began);
      ended = std::max(ended, time.ended);
    }
  }
  if (ended != 0) clock_.fit(began, ended, start, end);
}

void CallProfile::report(const Launches& launches, int64_t start, int64_t end) {
  fitClock(launches.kernels, start, end);
  tellChannels(launches, start, end);
  if (timeline_ == nullptr) return;
  const Timeline::Track track{subject_.device, static_cast<int64_t>(launches.stream)};
  if (std::ranges::find(namedStreams_, launches.stream) == namedStreams_.end()) {
    namedStreams_.push_back(launches.stream);
    timeline_->nameThread(track, fmt::format("stream {:x}", launches.stream));
  }
  timeline_->add({track, launches.name, "kernel", start, end,
                  fmt::format(R"("device": {}, "stream": {}, "Calls": {}, {})", subject_.device,
                              launches.stream, launches.calls.size(), launches.arguments)});
  timeline_->addArrow(launches.launcher, launches.launched, track, start);
  showChannels(launches.kernels, launches.name.substr(kKernelPrefix.size()));
}

void CallProfile::prepareReplays() {
  replayTimes_ = runtime_.allocatePinned(sizeof(device::ReplayTimes));
  std::memset(replayTimes_->hostAddress(), 0, sizeof(device::ReplayTimes));
  capturedTimes_ = std::make_unique<BlockTimes>(runtime_);
}

void CallProfile::stamp(uint64_t captured, bool begins, runtime::Stream stream) {
  const device::StampArguments arguments{
      static_cast<device::ReplayTimes*>(replayTimes_->deviceAddress()), captured, begins};
  runtime_.launch(device::stampKernel(), {.argumentBytes = sizeof(arguments)}, &arguments, stream);
}

// Those that have ended since the last call.
void CallProfile::reportReplays() {
  constexpr int64_t kGraphs = -1;  // a thread of the GPU in the timeline
  auto& times = *static_cast<device::ReplayTimes*>(replayTimes_->hostAddress());
  const auto read = [](uint64_t& word) {
    return std::atomic_ref(word).load(std::memory_order_acquire);
  };
  if (read(times.ended) <= replaysShown_) return;
  clock_.renew();
  if (!clock_.steadyOf(0)) return;
  for (;;) {
    device::ReplayTime& entry = times.entry[replaysShown_ % device::kReplayTimes];
    const uint64_t number = read(entry.number);
    if (number <= replaysShown_) return;
    const uint64_t captured = read(entry.captured), began = read(entry.began),
                   ended = read(entry.ended);
    if (read(entry.number) != number) continue;
    clock_.fit(began, ended, 0, steadyNow());
    if (number != replaysShown_ + 1) {
      warnOnce(
          fmt::format("{}: {} replays of graphs are missing in the timeline, as they were "
                      "shorter than it takes to write them",
                      subject_.description, number - 1 - replaysShown_));
      replaysShown_ = number - 1;
    }
    if (replaysShown_ == 0) {
      timeline_->nameThread({subject_.device, kGraphs}, "replays of CUDA graphs");
    }
    replaysShown_++;
    Captured calls;
    {
      const std::lock_guard lock(mutex_);
      calls = captured_.at(captured - 1);
    }
    timeline_->add({{subject_.device, kGraphs},
                    calls.name,
                    "kernel",
                    *clock_.steadyOf(began),
                    *clock_.steadyOf(ended),
                    fmt::format(R"("device": {}, "Captured call": {}, {})", subject_.device,
                                captured, calls.arguments)});
    // The next replay of the same calls overwrites the times of blocks.
    const auto isOfReplay = [&](device::BlockTime& block) {
      const auto time = BlockTimes::read(block);
      return time.began >= began && time.began <= time.ended && time.ended <= ended;
    };
    if (calls.kernels != nullptr && std::ranges::all_of(*calls.kernels, [&](const Kernel& kernel) {
          return std::ranges::all_of(kernel.times.blocks, isOfReplay);
        })) {
      showChannels(*calls.kernels, calls.name.substr(kKernelPrefix.size()));
    }
  }
}

GroupProfile::~GroupProfile() {
  stopLaunches();
  profile_->tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    if (index < events_.size()) plugin.stop(events_[index].api);
  });
}

// Also where a launch has failed.
void GroupProfile::stopLaunches() {
  if (!std::exchange(isLaunching_, false)) return;
  profile_->tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    plugin.stop(events_[index].launch);
    for (const Call& call : calls_) {
      if (index < call.events.size()) plugin.stop(call.events[index]);
    }
    plugin.stop(events_[index].group);
  });
}

void GroupProfile::add(const plan::Task& task, runtime::Stream stream, int depth) {
  CallProfile& profile = *profile_;
  const CallProfile::Subject& subject = profile.subject_;
  caller_ = thisThread();
  Call call{task.call, steadyNow(), {}, profiledCall(subject.config, task), {}, {}};
  call.told.stream = stream;
  if (profile.timeline_ != nullptr) call.arguments = argumentsOf(subject, task, call.told);
  call.told.captured = profile.isCaptured(stream);
  profile.tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    if (index == events_.size()) {
      void* api = plugin.startGroupApi(call.told.captured, depth);
      plugin.record(api, plugin::Profiler::GroupState::started);
      events_.push_back({.api = api});
    }
    call.apiEvents.push_back(plugin.startCallApi(call.told, events_[index].api));
    plugin.stop(call.apiEvents.back());
  });
  calls_.push_back(std::move(call));
}

void GroupProfile::ending() {
  profile_->tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    if (index < events_.size()) {
      plugin.record(events_[index].api, plugin::Profiler::GroupState::ends);
    }
  });
}

void GroupProfile::returned() {
  if (profile_->timeline_ == nullptr) return;
  const int64_t now = steadyNow();
  for (const Call& call : calls_) {
    profile_->timeline_->add({caller_, fmt::format("nccl{}", diagnose::nameOf(call.call)), "cpu_op",
                              call.start, now, call.arguments});
  }
}

GroupProfile::Step::Step(GroupProfile* group, const char* name)
    : group_(group), name_(name), start_(group == nullptr ? 0 : steadyNow()) {}

GroupProfile::Step::~Step() {
  if (group_ == nullptr || group_->profile_->timeline_ == nullptr) return;
  group_->profile_->timeline_->add({thisThread(), name_, "cpu_op", start_, steadyNow(), ""});
}

void GroupProfile::beginLaunches(runtime::Stream stream, bool captured, const plan::Plan& plan,
                                 const std::vector<plan::Task>& tasks) {
  for (Call& call : calls_) {
    if (!captured && !call.told.isMessage) call.told.sequence = profile_->nextSequence(call.call);
  }
  isLaunching_ = true;
  profile_->tellPlugins([&](plugin::Profiler& plugin, size_t index) {
    GroupEvents& group = events_[index];
    group.group = plugin.startGroup();
    for (Call& call : calls_) {
      call.events.push_back(plugin.startCall(call.told, call.apiEvents[index], group.group));
    }
    group.launch = plugin.startLaunch(stream, group.api);
  });
  if (NetworkProfile* const network = profile_->network(); network != nullptr && captured) {
    network->capture(plan);
  } else if (network != nullptr) {
    std::vector<PluginEvents> events;
    for (const Call& call : calls_) events.push_back(call.events);
    network->begin(plan, tasks, events);
  }
  const size_t others = calls_.size() - 1;
  launches_.name = fmt::format("{}{}{}", kKernelPrefix, diagnose::nameOf(calls_.front().call),
                               others == 0 ? "" : fmt::format(" and {} more", others));
  if (captured) {
    if (profile_->timeline_ == nullptr) return;
    {
      const std::lock_guard lock(profile_->mutex_);
      profile_->captured_.push_back({launches_.name, calls_.front().arguments, nullptr});
      captured_ = profile_->captured_.size();
    }
    profile_->stamp(captured_, true, stream);
    return;
  }
  launches_.arguments = calls_.front().arguments;
  launches_.launcher = thisThread();
  launches_.launched = steadyNow();
  launches_.stream = profile_->runtime_.streamNumber(stream);
  launches_.start = profile_->takePoint();
  launches_.start->record(stream);
}

device::BlockTime* GroupProfile::timesOf(const plan::Launch& launch,
                                         const std::vector<plan::Task>& tasks) {
  const int blocks = plan::blocksOf(launch);
  const bool isCaptured = launches_.start == nullptr;
  BlockTimes* const times = isCaptured ? profile_->capturedTimes_.get() : &profile_->times_;
  if (blocks == 0 || times == nullptr) return nullptr;
  const auto taken = times->take(blocks);
  if (!taken) return nullptr;
  CallProfile::Kernel& kernel = launches_.kernels.emplace_back();
  kernel.times = *taken;
  if (profile_->timeline_ != nullptr) {
    kernel.text = fmt::format("{}", fmt::join(plan::describe(launch), ", "));
  }
  if (!isCaptured && !events_.empty()) {
    kernel.calls = blocksByCall(launch, tasks, profile_->subject_.config.ranks);
  }
  return taken->onDevice;
}

void GroupProfile::endLaunches(runtime::Stream stream) {
  stopLaunches();
  if (captured_ != 0) {
    profile_->stamp(captured_, false, stream);
    const std::lock_guard lock(profile_->mutex_);
    profile_->captured_[captured_ - 1].kernels =
        std::make_shared<const CallProfile::Kernels>(std::move(launches_.kernels));
  }
  if (launches_.start == nullptr) return;
  for (Call& call : calls_) launches_.calls.push_back({call.told.channels, std::move(call.events)});
  launches_.end = profile_->takePoint();
  launches_.end->record(stream);
  profile_->addLaunches(std::move(launches_));
}

}  // namespace unisono::comm
