// SPDX-License-Identifier: Apache-2.0
#include "diagnose/journal.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/math.h"
#include "base/system.h"
#include "diagnose/rank_view.h"

namespace unisono::diagnose {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kRelease = std::memory_order_release;

// The tables of this process. A forked child makes its own.
struct Tables {
  std::mutex mutex;
  std::shared_ptr<runtime::host::MemorySegment> segment;
  int forks = -1;
  std::vector<uint32_t> free;  // slots that were used before
  uint32_t used = 0;
  uint64_t serials = 0;
};

Tables& tables() {
  static auto* instance = new Tables;
  return *instance;
}

void prepare(Tables& all) {
  if (all.forks == forkCount()) return;
  all.segment = std::make_shared<runtime::host::MemorySegment>(kSegmentBytes, kTableFile);
  all.forks = forkCount();
  all.free.clear();
  all.used = 0;
  ProcessHead& head = headOf(all.segment->address());
  head.layout = kTableLayout;
  head.pid = static_cast<uint32_t>(::getpid());
  head.pidNamespace = pidNamespace();
  head.alive.store(steadyNow(), kRelaxed);
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
}

// All with release order: who sees one of the new values sees that the index is 0 or new, too.
void write(CallRecord& record, const Call& call) {
  record.index.store(0, kRelease);
  record.sequence.store(call.sequence, kRelease);
  record.count.store(call.count, kRelease);
  record.launch.store(call.launch, kRelease);
  record.entered.store(call.entered, kRelease);
  record.replay.store(call.replay, kRelease);
  record.kind.store(static_cast<uint64_t>(call.call) | static_cast<uint64_t>(call.type) << 8 |
                        static_cast<uint64_t>(call.reduction) << 16 |
                        static_cast<uint64_t>(static_cast<uint32_t>(call.peer)) << 32,
                    kRelease);
  record.index.store(call.index, kRelease);
}

template <size_t kBytes>
void storeText(std::atomic<char> (&to)[kBytes], std::string_view text) {
  text = text.substr(0, kBytes - 1);
  for (size_t i = 0; i < text.size(); i++) to[i].store(text[i], kRelease);
  to[text.size()].store('\0', kRelease);
}

}  // namespace

int64_t steadyNow() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

void noteSettings(const std::vector<std::pair<std::string, std::string>>& settings) {
  std::string text;
  for (const auto& [name, value] : settings) {
    // A value of several lines is left out.
    const std::string line = fmt::format("{}={}\n", name, value);
    if (value.find('\n') != std::string::npos || text.size() + line.size() >= kSettingsBytes) {
      continue;
    }
    text += line;
  }
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  if (all.forks != forkCount()) return;
  ProcessHead& head = headOf(all.segment->address());
  bool isKnown = true;
  for (size_t i = 0; isKnown && i <= text.size(); i++) {
    isKnown = head.settings[i].load(kRelaxed) == (i < text.size() ? text[i] : '\0');
  }
  if (isKnown) return;
  const uint32_t version = head.settingsVersion.load(kRelaxed);
  head.settingsVersion.store(version + 1, kRelaxed);
  // With release order: who sees one of them sees the odd version or a later one.
  for (size_t i = 0; i < text.size(); i++) head.settings[i].store(text[i], kRelease);
  head.settings[text.size()].store('\0', kRelease);
  head.settingsVersion.store(version + 2, kRelease);
}

std::shared_ptr<runtime::host::MemorySegment> segmentOfThisProcess() {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  return all.forks == forkCount() ? all.segment : nullptr;
}

std::shared_ptr<Journal> Journal::create() noexcept {
  try {
    Tables& all = tables();
    const std::lock_guard lock(all.mutex);
    prepare(all);
    uint32_t slot = all.used;
    if (!all.free.empty()) {
      slot = all.free.back();
      all.free.pop_back();
    } else if (all.used == kTables) {
      return nullptr;
    } else {
      all.used++;
      headOf(all.segment->address()).tables.store(all.used, kRelease);
    }
    return std::shared_ptr<Journal>(new Journal(all.segment, slot, ++all.serials));
  } catch (const std::exception& error) {
    logWarn("Hangs cannot be diagnosed: {}", error.what());
    return nullptr;
  }
}

Journal::Journal(std::shared_ptr<runtime::host::MemorySegment> segment, uint32_t slot,
                 uint64_t serial)
    : segment_(std::move(segment)),
      slot_(slot),
      serial_(serial),
      forks_(forkCount()),
      table_(tableOf(segment_->address(), slot)) {}

Journal::~Journal() {
  if (forks_ != forkCount()) return;
  table_.id.store(0, kRelease);
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  try {
    all.free.push_back(slot_);
  } catch (const std::bad_alloc&) {
    // The table stays unused.
  }
}

TablePlace Journal::place() {
  return {segment_->ticket(), serial_, slot_};
}

void Journal::start(uint64_t id, int rank, int ranks, int device, uint32_t slots,
                    std::string_view name, std::string_view network, std::string_view address,
                    uint64_t host) {
  // All with release order: who sees one of the new values sees that the table was free, too.
  table_.rank.store(rank, kRelease);
  table_.ranks.store(ranks, kRelease);
  table_.device.store(device, kRelease);
  table_.slots.store(slots, kRelease);
  table_.host.store(host, kRelease);
  storeText(table_.name, name);
  storeText(table_.network, network);
  storeText(table_.address, address);
  for (CallRecord& record : table_.calls) record.index.store(0, kRelease);
  table_.replay.index.store(0, kRelease);
  for (auto* number : {&table_.entered, &table_.replayed}) number->store(0, kRelease);
  for (auto* number : {&table_.launched, &table_.started, &table_.finished}) {
    number->store(1, kRelease);
  }
  table_.links.store(0, kRelease);
  table_.quietPoints.store(0, kRelease);
  for (QuietRecord& record : table_.quiet) record.collectives.store(0, kRelease);
  for (CallRecord& record : table_.captured) record.index.store(0, kRelease);
  table_.flowPoints.store(0, kRelease);
  for (auto* flag : {&table_.captures, &table_.aborted, &table_.finalized, &table_.flows}) {
    flag->store(0, kRelease);
  }
  for (auto& count : table_.counts) count.store(0, kRelease);
  table_.error.store(0, kRelease);
  table_.reported.store(0, kRelease);
  table_.changed.store(steadyNow(), kRelease);
  table_.id.store(id, kRelease);
}

Call callOf(const plan::Task& task) {
  Call call;
  call.call = task.call;
  call.type = task.reduction.type;
  call.reduction = task.reduction.reduction;
  call.peer = task.peer;
  call.count = task.count;
  return call;
}

void MessageSum::add(uint64_t messageBytes, uint64_t times) {
  count += times;
  bytes += times * messageBytes;
  hash += times * mix64(messageBytes);
}

Journal::Messages& Journal::messagesOf(int peer, bool sends) {
  const auto [entry, isNew] = messages_.try_emplace({peer, sends});
  const uint32_t used = table_.flows.load(kRelaxed);
  if (isNew && used < kFlows) {
    FlowRecord& record = table_.flow[used];
    record.kind.store(static_cast<uint32_t>(peer) | static_cast<uint64_t>(sends) << 32, kRelease);
    for (auto* number : {&record.entered, &record.replayed, &record.quietPoints}) {
      number->store(0, kRelease);
    }
    for (auto& point : record.quiet) point.count.store(0, kRelease);
    table_.flows.store(used + 1, kRelease);
    entry->second.record = &record;
  }
  return entry->second;
}

uint64_t Journal::enter(const plan::Task& task) {
  Call call = callOf(task);
  std::unique_lock lock(messagesMutex_, std::defer_lock);
  Messages* messages = nullptr;
  if (call.isMessage()) {
    lock.lock();
    messages = &messagesOf(call.peer, call.call == plan::Call::send);
  }
  const uint64_t index = call.index = ++entered_;
  call.sequence = messages == nullptr ? ++collectives_ : messages->entered.count + 1;
  call.entered = steadyNow();
  write(table_.calls[index % kCalls], call);
  table_.entered.store(index, kRelease);
  if (messages != nullptr) {
    messages->entered.add(call.bytes());
    if (messages->record != nullptr) messages->record->entered.store(call.sequence, kRelease);
  } else {
    eagerHash_.fetch_add(hashOfKind(call), kRelease);
    eager_.fetch_add(1, kRelease);
  }
  auto& count = table_.counts[static_cast<size_t>(task.call)];
  count.store(count.load(kRelaxed) + 1, kRelease);
  return index;
}

void Journal::noteFailure(int32_t error, bool aborted) {
  table_.error.store(error, kRelease);
  table_.aborted.store(aborted ? 1 : 0, kRelease);
}

void Journal::launched(uint64_t first, uint64_t last, uint64_t number) {
  if (last - first >= kCalls) first = last - kCalls + 1;
  for (uint64_t index = first; index <= last; index++) {
    table_.calls[index % kCalls].launch.store(number, kRelease);
  }
  table_.launched.store(number, kRelease);
}

void Journal::noteQuiet(const Replays& replays, uint64_t entered) {
  const uint64_t collectives = replays.collectives + eager_.load(kAcquire);
  const uint64_t hash = replays.hash + eagerHash_.load(kAcquire);
  const std::lock_guard lock(messagesMutex_);
  if (table_.entered.load(kAcquire) != entered || !isIdle()) return;
  noteQuietMessages(replays);
  if (collectives == 0) return;
  const uint64_t number = table_.quietPoints.load(kRelaxed);
  const QuietRecord& last = table_.quiet[(number + kQuietPoints - 1) % kQuietPoints];
  if (number > 0 && last.collectives.load(kRelaxed) == collectives) return;
  for (size_t i = 0; i < kCapturedKinds; i++) {
    if (i < replays.kinds.size()) write(table_.captured[i], replays.kinds[i]);
  }
  QuietRecord& record = table_.quiet[number % kQuietPoints];
  record.collectives.store(0, kRelease);
  record.hash.store(hash, kRelease);
  record.collectives.store(collectives, kRelease);
  table_.quietPoints.store(number + 1, kRelease);
}

void Journal::setReplayedMessages(const Replays& replays) {
  for (const auto& [flow, sum] : replays.messages) {
    FlowRecord* record = messagesOf(flow.first, flow.second).record;
    if (record != nullptr) record->replayed.store(sum.count, kRelease);
  }
}

void Journal::noteQuietMessages(const Replays& replays) {
  setReplayedMessages(replays);
  for (auto& [flow, messages] : messages_) {
    if (messages.record == nullptr) continue;
    MessageSum sum = messages.entered;
    if (const auto replayed = replays.messages.find(flow); replayed != replays.messages.end()) {
      sum += replayed->second;
    }
    FlowRecord& record = *messages.record;
    const uint64_t number = record.quietPoints.load(kRelaxed);
    const auto& last = record.quiet[(number + kFlowPoints - 1) % kFlowPoints];
    if (sum.count == 0 || last.count.load(kRelaxed) == sum.count) continue;
    auto& point = record.quiet[number % kFlowPoints];
    point.count.store(0, kRelease);
    point.bytes.store(sum.bytes, kRelease);
    point.hash.store(sum.hash, kRelease);
    point.count.store(sum.count, kRelease);
    record.quietPoints.store(number + 1, kRelease);
    table_.flowPoints.fetch_add(1, kRelease);
  }
}

bool Journal::isIdle() const {
  if (table_.replay.index.load(std::memory_order_acquire) != 0) return false;
  const uint64_t last = table_.entered.load(std::memory_order_acquire);
  if (last == 0) return true;
  const uint64_t launch = table_.calls[last % kCalls].launch.load(std::memory_order_acquire);
  return launch != 0 && launch <= table_.finished.load(std::memory_order_acquire);
}

void Journal::setProgress(uint64_t started, uint64_t finished, int64_t now) {
  if (table_.started.load(kRelaxed) == started && table_.finished.load(kRelaxed) == finished)
    return;
  table_.started.store(started, kRelaxed);
  table_.finished.store(finished, kRelaxed);
  table_.changed.store(now, kRelease);
}

bool Journal::setReplays(const Replays& replays, int64_t now) {
  table_.replayed.store(replays.collectives, kRelease);
  {
    const std::lock_guard lock(messagesMutex_);
    setReplayedMessages(replays);
  }
  CallRecord& record = table_.replay;
  if (!replays.running) {
    record.index.store(0, kRelease);
    return false;
  }
  Call call = *replays.running;
  if (record.index.load(kRelaxed) == call.index && record.replay.load(kRelaxed) == call.replay) {
    return true;
  }
  call.entered = now;
  write(record, call);
  return false;
}

void Journal::setLinks(std::span<const Link> links) {
  const size_t count = std::min(links.size(), kLinks);
  for (size_t i = 0; i < count; i++) {
    LinkRecord& record = table_.link[i];
    record.kind.store(static_cast<uint32_t>(links[i].peer) |
                          static_cast<uint64_t>(links[i].channel) << 32 |
                          static_cast<uint64_t>(links[i].kind) << 57 |
                          static_cast<uint64_t>(links[i].waits) << 60 |
                          static_cast<uint64_t>(links[i].lines) << 61 |
                          static_cast<uint64_t>(links[i].network) << 62 |
                          static_cast<uint64_t>(links[i].sends) << 63,
                      kRelaxed);
    record.tail.store(links[i].tail, kRelaxed);
    record.head.store(links[i].head, kRelaxed);
    record.bytesInFlight.store(links[i].bytesInFlight, kRelaxed);
    record.all.store(links[i].all, kRelaxed);
    storeText(record.port, links[i].port);
  }
  table_.links.store(static_cast<uint32_t>(count), kRelease);
}

}  // namespace unisono::diagnose
