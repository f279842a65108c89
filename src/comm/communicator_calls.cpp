// SPDX-License-Identifier: Apache-2.0
// How calls are prepared, connected and launched.
#include "comm/communicator.h"

#include <algorithm>

#include "base/cpu_affinity.h"
#include "base/error.h"
#include "base/log.h"
#include "comm/reaper.h"
#include "plan/direct_plan.h"

namespace unisono::comm {

void Communicator::Prepared::add(const plan::Task& task, runtime::Stream stream) {
  tasks.push_back(task);
  if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
}

void Communicator::Prepared::clear() {
  Prepared cleared;
  const auto keep = [](auto& list, auto& kept) {
    list.clear();
    kept = std::move(list);
  };
  keep(tasks, cleared.tasks);
  keep(streams, cleared.streams);
  keep(copies, cleared.copies);
  keep(plan.launches, cleared.plan.launches);
  *this = std::move(cleared);
}

void Communicator::enter(Prepared& prepared) {
  if (journal_ == nullptr) return;
  if (prepared.captured) {
    std::vector<plan::Task> calls;
    for (const plan::Task& task : prepared.tasks) {
      if (task.count != 0) calls.push_back(task);
    }
    if (calls.empty()) return;
    journal_->noteCapture();
    prepared.replays = replays_->add(calls, tables_->capturedMarks());
    return;
  }
  for (const plan::Task& task : prepared.tasks) {
    if (task.count == 0) continue;  // other ranks need not make calls of nothing
    prepared.lastCall = journal_->enter(task);
    if (prepared.firstCall == 0) prepared.firstCall = prepared.lastCall;
  }
}

// Finds the symmetric windows of the results of calls. Such a call begins with a barrier in which
// every rank takes part, so no other choice may follow from what one rank knows alone.
void Communicator::findSymmetric(std::vector<plan::Task>& calls) {
  if (copyEngines_ == nullptr) return;
  const std::lock_guard lock(symmetricMutex_);
  for (plan::Task& call : calls) {
    const uint64_t bytes =
        call.count * static_cast<uint64_t>(ranks()) * device::elementBytes(call.reduction.type);
    for (const auto& memory : symmetric_) {
      if (!memory->suitsCopyEngines) continue;
      const plan::SymmetricWindow& window = memory->window;
      const uint64_t offset = reinterpret_cast<uint64_t>(call.output) -
                              reinterpret_cast<uint64_t>(window.bases[static_cast<size_t>(rank())]);
      if (offset < window.bytes && bytes <= window.bytes - offset) call.symmetric = &window;
    }
  }
}

// Finds the windows of the buffers that peers may use in large calls.
void Communicator::findWindows(std::vector<plan::Task>& calls, bool captured) {
  if (windows_ == nullptr) return;
  for (plan::Task& call : calls) {
    if (plan::usesCopyEngines(config_, call)) continue;
    const uint64_t bytes = call.count * device::elementBytes(call.reduction.type);
    const auto all = static_cast<uint64_t>(ranks()) * bytes;
    const plan::OfferedBuffers offered = plan::buffersOffered(config_, call);
    if (offered.inputBytes > 0) {
      call.inputWindow = windows_->find(call.input, offered.inputBytes, -1, captured);
    }
    if (offered.outputBytes > 0) {
      call.window = windows_->find(call.output, offered.outputBytes, -1, captured);
    }
    if (bytes < config_.directBytes || plan::isWideMessage(config_, bytes)) continue;
    switch (call.call) {
      case plan::Call::receive:
        if (call.peer == rank()) break;
        call.window = windows_->find(call.output, bytes, call.peer, captured);
        break;
      case plan::Call::allToAll:
        call.window = windows_->find(call.output, all, -1, captured);
        break;
      case plan::Call::gather:
        if (call.peer == rank()) call.window = windows_->find(call.output, all, -1, captured);
        break;
      case plan::Call::scatter:
        if (call.peer == rank()) break;
        call.window = windows_->find(call.output, bytes, call.peer, captured);
        break;
      default:
        break;
    }
  }
}

void Communicator::prepare(Prepared& prepared) {
  // Also refuses, before anything is done, what is not a stream.
  runtime::DeviceScope scope(runtime_, device_);
  const runtime::CaptureState state = runtime_.captureState(prepared.streams.front());
  for (size_t i = 1; i < prepared.streams.size(); i++) {
    if (runtime_.captureState(prepared.streams[i]) != state) {
      throw invalidUsage("Only some streams of a group are being captured into a graph")
          .rank(rank())
          .remedy("Make the calls on captured streams in a group of their own");
    }
  }
  if (state == runtime::CaptureState::invalidated) {
    throw invalidUsage("The capture of the stream has failed")
        .rank(rank())
        .remedy("Find the call that made it fail, and end the capture (cudaStreamEndCapture)");
  }
  prepared.captured = state == runtime::CaptureState::active;
  findSymmetric(prepared.tasks);
  findWindows(prepared.tasks, prepared.captured);
  stageInPlace(prepared);
  prepared.plan = plan::makePlan(config_, prepared.tasks, std::move(prepared.plan.launches));
  if (logLevel() >= LogLevel::trace) {
    for (const std::string& line : plan::describe(prepared.plan)) {
      writeLog(LogLevel::trace, fmt::format("rank {}: {}", rank(), line));
    }
  }
  prepared.needs.messages = prepared.plan.needs.peers;
  prepared.needs.collectives =
      static_cast<uint64_t>(std::ranges::count_if(prepared.tasks, [](const plan::Task& task) {
        return task.count != 0 && task.call != plan::Call::send && task.call != plan::Call::receive;
      }));
}

// An all-to-all in place that is not one direct launch sends a block of the buffer in one round and
// receives into it in another, so the input is copied first.
void Communicator::stageInPlace(Prepared& prepared) {
  std::vector<plan::Task>& calls = prepared.tasks;
  auto bytesOf = [&](const plan::Task& call) {
    const bool inPlace = call.call == plan::Call::allToAll && call.input == call.output &&
                         (calls.size() > 1 || !plan::canBeInPlace(config_, call));
    return inPlace && ranks() > 1 ? call.count * static_cast<uint64_t>(ranks()) *
                                        device::elementBytes(call.reduction.type)
                                  : 0;
  };
  uint64_t total = 0;
  for (const plan::Task& call : calls) total += bytesOf(call);
  if (total == 0) return;
  std::byte* next = stagingBuffer(total, prepared.captured);
  for (plan::Task& call : calls) {
    const uint64_t bytes = bytesOf(call);
    if (bytes == 0) continue;
    prepared.copies.push_back({next, call.input, bytes});
    call.input = next;
    next += bytes;
  }
}

// A buffer that is too small is replaced by one of at least twice its size, so that few are made.
// Graphs that may be launched again keep those of captured calls in use.
std::byte* Communicator::stagingBuffer(size_t bytes, bool captured) {
  std::shared_ptr<runtime::DeviceMemory>& buffer = captured ? capturedStaging_ : staging_;
  if (buffer == nullptr || buffer->bytes() < bytes) {
    const size_t before = buffer == nullptr ? 0 : buffer->bytes();
    auto old = std::exchange(buffer, runtime_.allocate(device_, std::max(bytes, 2 * before)));
    if (captured) {
      earlierCapturedStaging_.push_back(std::move(old));
    } else {
      releaseAfterLaunches(std::move(old));
    }
  }
  return static_cast<std::byte*>(buffer->address());
}

// Releases memory when everything that has been launched is done, without waiting for it here.
void Communicator::releaseAfterLaunches(std::shared_ptr<void> memory) {
  if (memory == nullptr || (!launched_ && !captured_)) return;
  Reaper::get().add([&runtime = runtime_, device = device_, memory = std::move(memory),
                     stream = streamBehindLaunches()]() mutable {
    try {
      const runtime::DeviceScope scope(runtime, device);
      if (!runtime.query(stream.get())) return false;
    } catch (const std::exception& error) {
      logWarn("The device reported while memory was to be released: {}", error.what());
    }
    stream.reset();
    memory.reset();
    return true;
  });
}

bool Communicator::isConnected(const Prepared& prepared) const {
  return connector_->isConnected(prepared.plan.needs);
}

void Communicator::connect(const Prepared& prepared) {
  health_->check(prepared.needs);
  const GroupProfile::Step step(prepared.profile.get(), "connect");
  runtime::DeviceScope scope(runtime_, device_);
  const ScopedCpuAffinity nearGpu(cpuAffinity_, settings_.ignoreCpuAffinity);
  connector_->connect(prepared.plan.needs);
  const std::lock_guard lock(countersMutex_);
  counters_ = connector_->fifoCounters();
  lines_ = connector_->direct();
  wide_ = connector_->wide();
}

void Communicator::launch(Prepared& prepared) {
  if (prepared.captured) {
    health_->check(prepared.needs);  // replays are counted when they run
  } else {
    health_->begin(prepared.needs);
  }
  const bool counts = !prepared.plan.launches.empty() && !prepared.captured;
  const uint64_t planNumber = counts ? ++launches_ : launches_.load();
  const auto note = [&] {
    if (prepared.lastCall != 0) {
      journal_->launched(prepared.firstCall, prepared.lastCall, planNumber);
    }
  };
  if (prepared.plan.launches.empty()) return note();
  const GroupProfile::Step step(prepared.profile.get(), "launch");
  runtime::DeviceScope scope(runtime_, device_);
  const runtime::Stream stream = prepared.streams.front();
  // Launches of one communicator share counters and buffers, so they run in call order, also when
  // the calls are made on different streams, and when graphs that hold some are launched between.
  const uint64_t number = prepared.captured ? 0 : runtime_.streamNumber(stream);
  if (!prepared.captured && (captured_ || (launched_ && lastStream_ != number))) {
    lastLaunch_->makeWait(stream);
  }
  for (size_t i = 1; i < prepared.streams.size(); i++) {
    join_->record(prepared.streams[i]);
    join_->makeWait(stream);
  }
  // Only now are all streams of a capture in it.
  if (prepared.captured) lastLaunch_->makeGraphWait(stream);
  if (prepared.profile != nullptr)
    prepared.profile->beginLaunches(stream, prepared.captured, prepared.plan, prepared.tasks);
  launchKernels(prepared, planNumber, stream);
  if (prepared.profile != nullptr) prepared.profile->endLaunches(stream);
  if (prepared.streams.size() > 1) {
    join_->record(stream);
    for (size_t i = 1; i < prepared.streams.size(); i++) join_->makeWait(prepared.streams[i]);
  }
  if (prepared.captured) {
    lastLaunch_->recordInGraph(stream);
    captured_ = true;
    captures_ = true;
  } else {
    lastLaunch_->record(stream);
    launched_ = true;
    lastStream_ = number;
  }
  connector_->noteLaunch();
  note();
}

// The launches of a plan, each with a number of its own.
void Communicator::launchKernels(Prepared& prepared, uint64_t plan, runtime::Stream stream) {
  transport::LaunchContext context = launchContext();
  if (journal_ != nullptr && !prepared.captured) context.mark.words = tables_->marks();
  if (prepared.replays.begun != nullptr) {
    plan = prepared.replays.number;
    context.mark.words = tables_->capturedMarks();
    context.mark.replays = prepared.replays.begun;
  }
  uint64_t following = prepared.copies.size() + prepared.plan.launches.size(), marks = 0;
  std::vector<LaunchNote> captured;
  const auto launch = [&](plan::Launch& each) {
    context.mark.number = launchNumber(plan, --following);
    if (context.mark.replays != nullptr) {
      captured.push_back(noteOf(context.mark.number, each));
    } else if (context.mark.words != nullptr) {
      notes_.add(context.mark.number, each);
    }
    if (prepared.profile != nullptr) {
      context.mark.times = prepared.profile->timesOf(each, prepared.tasks);
    }
    marks += static_cast<uint64_t>(transport::launch(runtime_, context, each, stream));
  };
  for (const plan::Copy& copy : prepared.copies) {
    // A kernel, which looks for an abort first: the user may have freed the memory by the time that
    // a copy of the stream would begin.
    plan::Launch each = plan::planCopy(config_.channels, copy.to, copy.from, copy.bytes);
    launch(each);
  }
  for (plan::Launch& each : prepared.plan.launches) launch(each);
  if (context.mark.replays != nullptr) replays_->setLaunches(marks, std::move(captured));
}

transport::LaunchContext Communicator::launchContext() const {
  return {tables_->address(),
          tables_->channels(),
          abort_->waitFlag(),
          abort_->launchFlag(),
          &connector_->direct(),
          &connector_->wide(),
          windows_ == nullptr ? nullptr : windows_->table(),
          {},
          clusterBlocks_,
          settings_.earlyLaunch,
          settings_.inRemoteDomain,
          copyEngines_.get()};
}

// A stream that is idle once everything that was launched is done.
std::shared_ptr<void> Communicator::streamBehindLaunches() {
  std::shared_ptr<void> stream = runtime_.createStream(device_);
  lastLaunch_->makeWait(stream.get());
  return stream;
}

}  // namespace unisono::comm
