// SPDX-License-Identifier: Apache-2.0
#include "comm/call_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/system.h"
#include "base/thread.h"
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

// As torch.distributed names them.
const char* torchNameOf(Call call) {
  static constexpr const char* kNames[] = {"allreduce", "allgather", "reduce_scatter", "broadcast",
                                           "reduce",    "send",      "recv",           "all_to_all",
                                           "gather",    "scatter"};
  return kNames[static_cast<size_t>(call)];
}
// As c10::ScalarType names them.
const char* torchNameOf(device::DataType type) {
  static constexpr const char* kNames[] = {"Char",   "Byte",     "Int",           "UInt32",
                                           "Long",   "UInt64",   "Half",          "Float",
                                           "Double", "BFloat16", "Float8_e4m3fn", "Float8_e5m2"};
  return kNames[static_cast<size_t>(type)];
}

bool isMessage(Call call) {
  return call == Call::send || call == Call::receive;
}
bool isChosen(Call call) {
  return static_cast<int>(call) < tuning::kCollectives;
}

// The elements that a rank passes in and gets out, whatever its rank, as torch counts them.
struct Elements {
  uint64_t in, out;
};
Elements elementsOf(const plan::Task& task, int ranks) {
  const uint64_t all = task.count * static_cast<uint64_t>(ranks);
  switch (task.call) {
    case Call::allGather:
    case Call::gather:
      return {task.count, all};
    case Call::reduceScatter:
    case Call::scatter:
      return {all, task.count};
    case Call::allToAll:
      return {all, all};
    default:
      return {task.count, task.count};
  }
}

std::string ranksText(int ranks) {
  constexpr int kMost = 30;
  std::vector<std::string> numbers;
  for (int rank = 0; rank < std::min(ranks, kMost); rank++) numbers.push_back(std::to_string(rank));
  if (ranks > kMost) numbers.emplace_back("...");
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

// The arguments of a call, with the names that PyTorch's profiler uses, then ours.
std::string argumentsOf(const CallProfile::Subject& subject, const plan::Task& task) {
  const plan::CommConfig& config = subject.config;
  const Elements elements = elementsOf(task, config.ranks);
  std::string text = fmt::format(
      R"("Collective name": "{}", "In msg nelems": {}, "Out msg nelems": {}, "Group size": {}, )"
      R"("dtype": "{}", "Process Group Name": {}, "Process Group Description": {}, )"
      R"("Process Group Ranks": "{}", "Rank": {})",
      torchNameOf(task.call), elements.in, elements.out, config.ranks,
      torchNameOf(task.reduction.type), quoteJson(subject.name), quoteJson(subject.description),
      ranksText(config.ranks), config.rank);
  if (isMessage(task.call)) {
    const bool sends = task.call == Call::send;
    text += fmt::format(R"(, "Src Rank": {}, "Dst Rank": {})", sends ? config.rank : task.peer,
                        sends ? task.peer : config.rank);
  }
  if (isChosen(task.call) && config.ranks > 1 && task.count != 0) {
    const tuning::Choice choice = plan::choiceOf(config, task);
    text += fmt::format(R"(, "Algorithm": "{}", "Protocol": "{}", "Channels": {})",
                        tuning::nameOf(choice.algorithm), tuning::nameOf(choice.protocol),
                        choice.channels);
  }
  return text;
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

std::shared_ptr<CallProfile> CallProfile::create(runtime::Runtime& runtime,
                                                 const Settings& settings, const Subject& subject) {
  if (settings.traceFile.empty()) return nullptr;
  auto timeline = Timeline::open(settings.traceFile, subject.config.rank);
  if (timeline == nullptr) return nullptr;
  std::shared_ptr<CallProfile> profile(new CallProfile(runtime, subject));
  profile->timeline_ = std::move(timeline);
  profile->timeline_->nameProcess(::getpid(), processName());
  profile->timeline_->nameProcess(subject.device, fmt::format("GPU {}", subject.device));
  profile->timeline_->add(
      {thisThread(), "ncclCommInitRank", "cpu_op", subject.created, steadyNow(),
       fmt::format(R"("Group size": {}, "Rank": {})", subject.config.ranks, subject.config.rank)});
  ProfileThread::get().add(profile);
  return profile;
}

CallProfile::CallProfile(runtime::Runtime& runtime, const Subject& subject)
    : runtime_(runtime), subject_(subject) {}

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

void CallProfile::addRunning(Running running) {
  const std::lock_guard lock(mutex_);
  if (!closed_) running_.push_back(std::move(running));
}

// mutex_ is not held while the device is asked, which may take as long as what runs on it: a kernel
// may wait for a call that the user's thread is about to make.
void CallProfile::collect() {
  const std::lock_guard collecting(collectMutex_);
  std::vector<Running> running;
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
      report(*running[done].group, *running[done].start->reachedAt(), *end);
    }
  } catch (const std::exception& error) {
    logInfo("{}: the timeline has no more times of the device: {}", subject_.description,
            error.what());
    done = running.size();
  }
  timeline_->flush();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < done; i++) {
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
  const std::lock_guard lock(mutex_);
  closed_ = true;
  running_.clear();
}

// A slice for the launches of a group, on the track of their stream.
void CallProfile::report(const GroupProfile& group, int64_t start, int64_t end) {
  const Timeline::Track track{subject_.device, static_cast<int64_t>(group.stream_)};
  if (std::ranges::find(namedStreams_, group.stream_) == namedStreams_.end()) {
    namedStreams_.push_back(group.stream_);
    timeline_->nameThread(track, fmt::format("stream {:x}", group.stream_));
  }
  const GroupProfile::Call& first = group.calls_.front();
  const size_t others = group.calls_.size() - 1;
  timeline_->add({track,
                  fmt::format("ncclDevKernel_{}{}", diagnose::nameOf(first.task.call),
                              others == 0 ? "" : fmt::format(" and {} more", others)),
                  "kernel", start, end,
                  fmt::format(R"("device": {}, "stream": {}, "Calls": {}, {})", subject_.device,
                              group.stream_, group.calls_.size(), first.arguments)});
  timeline_->addArrow(group.launcher_, group.launched_, track, start);
}

void GroupProfile::add(const plan::Task& task, runtime::Stream stream) {
  static_cast<void>(stream);
  caller_ = thisThread();
  calls_.push_back({task, steadyNow(), argumentsOf(profile_->subject_, task)});
}

void GroupProfile::returned() {
  const int64_t now = steadyNow();
  for (const Call& call : calls_) {
    profile_->timeline_->add({caller_, fmt::format("nccl{}", diagnose::nameOf(call.task.call)),
                              "cpu_op", call.start, now, call.arguments});
  }
}

GroupProfile::Step::Step(GroupProfile* group, const char* name)
    : group_(group), name_(name), start_(group == nullptr ? 0 : steadyNow()) {}

GroupProfile::Step::~Step() {
  if (group_ == nullptr) return;
  group_->profile_->timeline_->add({thisThread(), name_, "cpu_op", start_, steadyNow(), ""});
}

void GroupProfile::beginLaunches(runtime::Stream stream, bool captured) {
  if (captured) return;
  stream_ = profile_->runtime_.streamNumber(stream);
  launcher_ = thisThread();
  launched_ = steadyNow();
  start_ = profile_->takePoint();
  start_->record(stream);
}

void GroupProfile::endLaunches(runtime::Stream stream) {
  if (start_ == nullptr) return;
  auto end = profile_->takePoint();
  end->record(stream);
  profile_->addRunning({shared_from_this(), std::move(start_), std::move(end)});
}

}  // namespace unisono::comm
