// SPDX-License-Identifier: Apache-2.0
#include "comm/network_profile.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/log.h"
#include "plan/fifo_steps.h"

namespace unisono::comm {
namespace {

using plan::Call;
using plan::Task;
using plugin::Profiler;
using transport::NetworkEnd;
using State = Profiler::ProxyState;

// Finds the calls of works, which do not name them. Of equal calls each is found once.
class TaskFinder {
 public:
  explicit TaskFinder(const std::vector<Task>& tasks) : tasks_(tasks), used_(tasks.size()) {}

  // With a fixed order (UNISONO_DETERMINISTIC) a call has works of two operations.
  // Algorithm::directTree has works for parts of a call.
  size_t find(const device::CollectiveWork& work, size_t none) {
    if (work.algorithm == device::Algorithm::directTree) {
      const auto has = [&](const Task& task) {
        const auto* const output = static_cast<const std::byte*>(task.output);
        const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
        return task.call == Call::allReduce && work.output >= output &&
               work.output < output + bytes;
      };
      const auto found = std::ranges::find_if(tasks_, has);
      return found == tasks_.end() ? none : static_cast<size_t>(found - tasks_.begin());
    }
    return find(1u << static_cast<unsigned>(work.operation), none, [&](const Task& task) {
      return task.count == work.count && task.output == work.output &&
             (task.input == work.input || task.output == work.input);
    });
  }
  size_t find(const device::Message& message, bool sends, size_t none) {
    return find(sends ? 1u << 30 : 1u << 31, none, [&](const Task& task) {
      const uint64_t bytes = task.count * device::elementBytes(task.reduction.type);
      const auto isAt = [&](const void* buffer, bool hasShares) {
        const auto* first = static_cast<const std::byte*>(buffer);
        const uint64_t share = hasShares ? static_cast<uint64_t>(message.peer) * bytes : 0;
        return bytes == message.bytes && first + share == message.buffer;
      };
      switch (task.call) {
        case Call::send:
          return sends && task.peer == message.peer && isAt(task.input, false);
        case Call::receive:
          return !sends && task.peer == message.peer && isAt(task.output, false);
        case Call::allToAll:
          return isAt(sends ? task.input : task.output, true);
        case Call::gather:
          return sends ? isAt(task.input, false) : isAt(task.output, true);
        case Call::scatter:
          return sends ? isAt(task.input, true) : isAt(task.output, false);
        default:
          return false;
      }
    });
  }

 private:
  template <typename Fits>
  size_t find(uint32_t use, size_t none, Fits fits) {
    for (size_t i = 0; i < tasks_.size(); i++) {
      if ((used_[i] & use) != 0 || !fits(tasks_[i])) continue;
      const bool isOne = tasks_[i].call != Call::allToAll && tasks_[i].call != Call::gather &&
                         tasks_[i].call != Call::scatter;
      if (isOne) used_[i] |= use;
      return i;
    }
    return none;
  }

  const std::vector<Task>& tasks_;
  std::vector<uint32_t> used_;  // by task: what has been found
};

// Calls visit(message, sends) for the messages over FIFOs of a launch.
template <typename Visit>
void forEachMessage(const plan::Launch& launch, Visit visit) {
  std::span<const device::SendReceiveWork> works;
  if (const auto* small = std::get_if<plan::SendReceiveLaunch>(&launch)) {
    works = {small->arguments.work, static_cast<size_t>(small->arguments.works)};
  } else if (const auto* large = std::get_if<plan::MessagesLaunch>(&launch)) {
    works = {large->arguments->work, static_cast<size_t>(large->arguments->works)};
  }
  for (const device::SendReceiveWork& work : works) {
    visit(work.send, true);
    visit(work.receive, false);
  }
}

bool hasAny(const PluginEvents& events) {
  return std::ranges::any_of(events, [](const void* event) { return event != nullptr; });
}

}  // namespace

// What is told of one FIFO. The mutex of the plug-ins protects it.
class NetworkProfile::Line {
 public:
  Line(const NetworkEnd& end, std::shared_ptr<ProfilerPlugins> plugins)
      : end_(end), plugins_(std::move(plugins)) {
    for (Slot& slot : slots_) slot.line = this;
  }

  std::mutex& mutex() const { return plugins_->mutex; }
  bool isBusy() const { return busy_.load(std::memory_order_acquire); }

  // The next `use.steps` steps are of a call. Returns whether a plug-in wants to know of them.
  bool add(const Use& use, const PluginEvents* call) {
    const uint64_t first = planned_;
    planned_ += use.steps;
    if (!isExact_ || call == nullptr || use.steps == 0) return false;
    Operation operation{first, planned_, {}};
    const Profiler::ProxyOperation told{end_.channel, end_.peer, end_.sends,
                                        static_cast<int>(use.steps),
                                        static_cast<int>(use.slotBytes)};
    for (size_t i = 0; i < plugins_->all.size(); i++) {
      operation.events.push_back(
          i < call->size() ? plugins_->all[i]->startProxyOperation(told, (*call)[i]) : nullptr);
    }
    if (!hasAny(operation.events)) return false;
    operations_.push_back(std::move(operation));
    busy_.store(true, std::memory_order_release);
    return true;
  }
  // From here on nobody knows which steps are whose. Those before it may still be told.
  void lose() { isExact_ = false; }

  void follow(transport::Stream& stream) {
    const transport::SlotCounts counts = stream.counts();
    begin(counts);
    for (Step& step : steps_) advance(step, counts, stream.bytesOf(step.number));
    while (!steps_.empty() && steps_.front().isStopped) endFirst();
    if (isExact_ && counts.passed > planned_) {
      logInfo(
          "A connection {} rank {} has moved more slots than its calls have: profiler plug-ins "
          "are not told of it any more",
          end_.sends ? "to" : "from", end_.peer);
      close();
      lose();
    }
  }

  // Stops all events.
  void close() {
    for (OpenEvent& event : netEvents_) event.end();
    for (const Step& step : steps_) {
      if (!step.isStopped) stop(step.events);
    }
    for (const Operation& operation : operations_) stop(operation.events);
    steps_.clear();
    operations_.clear();
    busy_ = false;
  }

  // The proxy has handed the slot to a net plug-in, or is about to.
  plugin::NetEvents* eventsOf(uint64_t number) {
    Slot& slot = slots_[number % slots_.size()];
    slot.step = number;
    return &slot;
  }

 private:
  // Of a call: the steps from `first` to `end`.
  struct Operation {
    uint64_t first, end;
    PluginEvents events;
    bool isInProgress = false;
  };
  struct Step {
    uint64_t number;
    PluginEvents events;
    int states = 0;  // that it has had
    bool isStopped = false;
  };
  // An event of a net plug-in.
  struct OpenEvent final : plugin::NetEvent {
    explicit OpenEvent(Line& of) : line(of) {}
    void update(void* data) override {
      const std::lock_guard lock(line.mutex());
      for (size_t i = 0; i < events.size(); i++) {
        line.plugins_->all[i]->updateNetEvent(events[i], data);
      }
    }
    void stop() override {
      const std::lock_guard lock(line.mutex());
      end();
      line.netEvents_.remove_if([this](const OpenEvent& each) { return &each == this; });
    }
    void end() {
      line.stop(events);
      events.clear();
    }
    Line& line;
    PluginEvents events;  // none once they were stopped
  };
  struct Slot final : plugin::NetEvents {
    plugin::NetEvent* start(int64_t plugin, void* data) override {
      return line->startNetEvent(step, plugin, data);
    }
    Line* line = nullptr;
    uint64_t step = 0;
  };

  template <typename Tell>
  void tell(const PluginEvents& events, Tell tell) {
    for (size_t i = 0; i < events.size() && i < plugins_->all.size(); i++) {
      if (events[i] != nullptr) tell(*plugins_->all[i], events[i]);
    }
  }
  void stop(const PluginEvents& events) {
    tell(events, [](Profiler& plugin, void* event) { plugin.stop(event); });
  }
  void record(const PluginEvents& events, State state, size_t number = 0) {
    tell(events, [&](Profiler& plugin, void* event) { plugin.record(event, state, number); });
  }

  // Begins the steps of calls whose slots may be used.
  void begin(const transport::SlotCounts& counts) {
    for (Operation& operation : operations_) {
      if (next_ >= operation.end) continue;
      next_ = std::max(next_, operation.first);
      for (; next_ < std::min(operation.end, counts.free); next_++) {
        if (!std::exchange(operation.isInProgress, true)) {
          record(operation.events, State::inProgress);
        }
        Step& step = steps_.emplace_back(Step{.number = next_, .events = {}});
        for (size_t i = 0; i < plugins_->all.size(); i++) {
          step.events.push_back(plugins_->all[i]->startProxyStep(
              static_cast<int>(next_ - operation.first), operation.events[i]));
        }
        record(step.events, end_.sends ? State::sendWaitsForGpu : State::receiveWaits);
      }
      if (next_ < operation.end) return;
    }
  }
  void advance(Step& step, const transport::SlotCounts& counts, uint32_t bytes) {
    const auto reach = [&](int place, bool isReached, State state) {
      if (step.states != place || !isReached) return;
      step.states++;
      record(step.events, state, bytes);
    };
    reach(0, step.number < counts.ready,
          end_.sends ? State::sendWaitsForPeer : State::receiveFlushes);
    reach(1, step.number < (end_.sends ? counts.posted : counts.passed),
          end_.sends ? State::sendWaits : State::receiveWaitsForGpu);
    if (step.states < 2 || step.isStopped || step.number >= counts.done) return;
    stop(step.events);
    step.isStopped = true;
  }
  void endFirst() {
    const uint64_t number = steps_.front().number;
    steps_.pop_front();
    if (number + 1 < operations_.front().end) return;
    stop(operations_.front().events);
    operations_.pop_front();
    if (operations_.empty()) busy_ = false;
  }
  plugin::NetEvent* startNetEvent(uint64_t number, int64_t plugin, void* data) {
    const std::lock_guard lock(mutex());
    const auto step = std::ranges::find(steps_, number, &Step::number);
    if (step == steps_.end()) return nullptr;
    PluginEvents events;
    for (size_t i = 0; i < plugins_->all.size(); i++) {
      events.push_back(plugins_->all[i]->startNetEvent(plugin, data, step->events[i]));
    }
    if (!hasAny(events)) return nullptr;
    OpenEvent& event = netEvents_.emplace_back(*this);
    event.events = std::move(events);
    return &event;
  }

  const NetworkEnd end_;
  const std::shared_ptr<ProfilerPlugins> plugins_;
  uint64_t planned_ = 0;  // steps of all launches
  uint64_t next_ = 0;     // steps before it have begun, or are of nobody
  bool isExact_ = true;
  std::atomic<bool> busy_{false};  // has operations
  std::deque<Operation> operations_;
  std::deque<Step> steps_;
  std::list<OpenEvent> netEvents_;
  static constexpr size_t kSlots = 16;
  static_assert(kSlots >= device::kMaxReportedSlots);
  std::array<Slot, kSlots> slots_;
};

class NetworkProfile::Observer final : public transport::StreamObserver {
 public:
  explicit Observer(std::shared_ptr<Line> line) : line_(std::move(line)) {}
  // The connection ends, and its slots are counted from 0 if it is made once more.
  ~Observer() override {
    const std::lock_guard lock(line_->mutex());
    line_->lose();
    line_->close();
  }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void before(transport::Stream& stream) override { follow(stream); }
  void after(transport::Stream& stream, bool) override { follow(stream); }
  plugin::NetEvents* eventsOf(uint64_t step) override { return line_->eventsOf(step); }

 private:
  void follow(transport::Stream& stream) {
    if (!line_->isBusy()) return;
    const std::lock_guard lock(line_->mutex());
    line_->follow(stream);
  }

  const std::shared_ptr<Line> line_;
};

NetworkProfile::NetworkProfile(plan::CommConfig config,
                               std::shared_ptr<const transport::ChannelGraphs> graphs,
                               std::shared_ptr<ProfilerPlugins> plugins)
    : config_(std::move(config)), graphs_(std::move(graphs)), plugins_(std::move(plugins)) {}

NetworkProfile::~NetworkProfile() = default;

void NetworkProfile::begin(const plan::Plan& plan, const std::vector<Task>& tasks,
                           const std::vector<PluginEvents>& events) {
  const std::lock_guard lock(plugins_->mutex);
  if (closed_ || lines_.empty()) return;  // without a network nothing is counted
  PluginEvents control;
  for (const auto& plugin : plugins_->all) control.push_back(plugin->startProxyControl());
  const auto record = [&](State state, size_t number) {
    for (size_t i = 0; i < control.size(); i++) plugins_->all[i]->record(control[i], state, number);
  };
  record(State::appends, 0);
  size_t added = 0;
  for (const Use& use : usesOf(plan, tasks)) {
    const auto line = lines_.find(use.end);
    if (line == lines_.end()) continue;  // of no network
    added += line->second->add(use, use.task == kNoTask ? nullptr : &events[use.task]) ? 1 : 0;
  }
  record(State::hasAppended, added);
  for (size_t i = 0; i < control.size(); i++) plugins_->all[i]->stop(control[i]);
}

void NetworkProfile::capture(const plan::Plan& plan) {
  const std::lock_guard lock(plugins_->mutex);
  for (const Use& use : usesOf(plan, {})) {
    const auto line = lines_.find(use.end);
    if (line != lines_.end()) line->second->lose();
  }
}

std::unique_ptr<transport::StreamObserver> NetworkProfile::observe(const NetworkEnd& end) {
  const std::lock_guard lock(plugins_->mutex);
  if (closed_) return nullptr;
  const auto line = std::make_shared<Line>(end, plugins_);
  lines_[end] = line;
  return std::make_unique<Observer>(line);
}

void NetworkProfile::note(transport::ProxyActivity activity) {
  using transport::ProxyActivity;
  const std::lock_guard lock(plugins_->mutex);
  if (closed_) return;
  PluginEvents events;
  if (activity == ProxyActivity::wakes) {
    events = std::exchange(sleep_, {});
  } else {
    for (const auto& plugin : plugins_->all) events.push_back(plugin->startProxyControl());
  }
  const State state = activity == ProxyActivity::idle     ? State::idle
                      : activity == ProxyActivity::active ? State::active
                      : activity == ProxyActivity::sleeps ? State::sleeps
                                                          : State::wakes;
  for (size_t i = 0; i < events.size(); i++) plugins_->all[i]->record(events[i], state);
  if (activity == ProxyActivity::sleeps) {
    sleep_ = std::move(events);
    return;
  }
  for (size_t i = 0; i < events.size(); i++) plugins_->all[i]->stop(events[i]);
}

void NetworkProfile::close() {
  const std::lock_guard lock(plugins_->mutex);
  if (std::exchange(closed_, true)) return;
  for (const auto& [end, line] : lines_) {
    line->lose();
    line->close();
  }
  lines_.clear();
  for (size_t i = 0; i < sleep_.size(); i++) plugins_->all[i]->stop(sleep_[i]);
  sleep_.clear();
}

// In the order in which kernels use each FIFO.
std::vector<NetworkProfile::Use> NetworkProfile::usesOf(const plan::Plan& plan,
                                                        const std::vector<Task>& tasks) const {
  std::vector<Use> uses;
  TaskFinder finder(tasks);
  for (const plan::Launch& launch : plan.launches) {
    if (const auto* collective = std::get_if<plan::CollectiveLaunch>(&launch)) {
      for (int w = 0; w < collective->arguments.works; w++) {
        const device::CollectiveWork& work = collective->arguments.work[w];
        addCollective(work, finder.find(work, kNoTask), uses);
      }
    }
    forEachMessage(launch, [&](const device::Message& message, bool sends) {
      if (message.peer < 0 || message.peer == config_.rank) return;
      const size_t task = finder.find(message, sends, kNoTask);
      for (int i = 0; i < message.channels; i++) {
        const auto protocol = message.asLines ? device::Protocol::ll : device::Protocol::simple;
        uses.push_back({{message.peer, true, i, sends, protocol},
                        task,
                        plan::messageSteps(message, i),
                        message.slice});
      }
    });
  }
  return uses;
}

void NetworkProfile::addCollective(const device::CollectiveWork& work, size_t task,
                                   std::vector<Use>& uses) const {
  using device::Algorithm;
  if (config_.ranks == 1) return;
  const auto rank = static_cast<size_t>(config_.rank);
  const uint64_t elements =
      work.protocol == device::Protocol::simple && work.algorithm != Algorithm::nvlsTree
          ? work.sliceElements
          : work.chunkElements;
  const uint64_t slotBytes = elements * device::elementBytes(work.reduction.type);
  for (int c = work.firstChannel; c < work.firstChannel + work.channels; c++) {
    const auto channel = static_cast<size_t>(c);
    const auto add = [&](int peer, bool sends, uint64_t steps) {
      uses.push_back({{peer, false, c, sends, work.protocol}, task, steps, slotBytes});
    };
    const auto addEdges = [&](const topology::TreePlace& place, uint64_t steps) {
      for (const bool sends : {true, false}) {
        if (place.up >= 0) add(place.up, sends, steps);
        for (const int child : place.down) add(child, sends, steps);
      }
    };
    if (work.algorithm == Algorithm::ring) {
      const std::vector<int32_t>& ring = graphs_->rings.at(channel);
      const auto size = static_cast<int>(ring.size());
      const auto mine = static_cast<int>(std::ranges::find(ring, config_.rank) - ring.begin());
      const int previous = ring[static_cast<size_t>((mine + size - 1) % size)];
      const int next = ring[static_cast<size_t>((mine + 1) % size)];
      const plan::RingSteps steps =
          plan::ringSteps(work, c, {config_.rank, size, previous, next, mine});
      add(next, true, steps.sent);
      add(previous, false, steps.received);
    } else if (work.algorithm == Algorithm::tree) {
      addEdges(graphs_->trees.at(channel).at(rank), plan::treeSteps(work, c));
    } else if (work.algorithm == Algorithm::directTree) {
      addEdges(graphs_->rails.at(channel).at(rank), plan::treeSteps(work, c));
    } else if (work.algorithm == Algorithm::nvlsTree) {
      const auto& trees = graphs_->multicast.trees;
      addEdges(trees[channel % trees.size()].at(rank),
               plan::headSteps(work, c, config_.multicast.heads));
    }
  }
}

}  // namespace unisono::comm
