// SPDX-License-Identifier: Apache-2.0
#include "diagnose/watchdog.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "base/thread.h"
#include "diagnose/job_inquiry.h"
#include "diagnose/report.h"
#include "diagnose/segment_view.h"
#include "runtime/runtime.h"

namespace unisono::diagnose {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kSecond = 1'000'000'000;
// The progress of launches is read from the device when they have not been done for this long, and
// from then on as often in UNISONO_HANG_SECONDS as this: a job whose CPU runs ahead is never done.
constexpr int64_t kSlow = kSecond / 2;
constexpr int64_t kReadsPerPatience = 8;
constexpr int kEnoughAttempts = 4;
// Before another process whose tables could not be mapped is asked again.
constexpr int64_t kMappingPause = 30 * kSecond;

using Segment = runtime::host::MemorySegment;

// The tables of other processes, by process.
struct MappedTables {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<Segment>> segments;

  static MappedTables& get() {
    static auto* instance = new MappedTables;
    return *instance;
  }
};

// The tables of another process, mapped once for all communicators.
std::shared_ptr<Segment> mapTables(const RankPlace& place) {
  if (place.process == runtime::processToken()) return segmentOfThisProcess();
  MappedTables& mapped = MappedTables::get();
  {
    const std::lock_guard lock(mapped.mutex);
    std::erase_if(mapped.segments, [](const auto& entry) { return entry.second.expired(); });
    const auto entry = mapped.segments.find(place.process);
    if (entry != mapped.segments.end()) {
      if (auto segment = entry->second.lock()) return segment;
    }
  }
  // Not under the lock: a process that is stopped takes seconds, and the reactor reads this map.
  auto segment =
      std::make_shared<Segment>(runtime::fetchDescriptor(place.table.segment), kSegmentBytes);
  if (!isTables(segment->address())) {
    throw internalError("Another process has tables of calls with another layout")
        .remedy("Use the same version of the library on all ranks");
  }
  const std::lock_guard lock(mapped.mutex);
  mapped.segments[place.process] = segment;
  return segment;
}

}  // namespace

std::vector<RankView> readAllTables(bool withProcesses) {
  std::vector<std::shared_ptr<Segment>> segments{segmentOfThisProcess()};
  {
    MappedTables& mapped = MappedTables::get();
    const std::lock_guard lock(mapped.mutex);
    for (const auto& [process, segment] : mapped.segments) segments.push_back(segment.lock());
  }
  std::vector<RankView> views;
  const int64_t now = steadyNow();
  for (const auto& segment : segments) {
    if (segment == nullptr) continue;
    forEachTable(segment->address(), [&](const CallTable& table) {
      views.push_back(readView(headOf(segment->address()), table, now));
      // Whoever asks is not silent, however late the watchdog is.
      if (segment == segments.front()) {
        views.back().silentFor = 0;
        views.back().processState.clear();
      }
      if (!withProcesses) return;
      views.back().elsewhere = waitElsewhere(segment->address(), views.back(), now);
      views.back().settings = readSettings(headOf(segment->address()));
    });
  }
  return views;
}

std::string RankPlace::text() const {
  std::string result = fmt::format("process {} on host {}", pid, hostName);
  if (!address.empty()) result += fmt::format(", {}:{}", address, port);
  return result;
}

std::shared_ptr<PeerTables> PeerTables::get(uint64_t id, const std::vector<RankPlace>& places) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<uint64_t, std::weak_ptr<PeerTables>>;
  const std::lock_guard lock(*mutex);
  std::weak_ptr<PeerTables>& entry = (*known)[id];
  if (auto tables = entry.lock()) return tables;
  auto tables = std::make_shared<PeerTables>(id, places);
  entry = tables;
  std::erase_if(*known, [](const auto& each) { return each.second.expired(); });
  return tables;
}

PeerTables::PeerTables(uint64_t id, const std::vector<RankPlace>& places) : id_(id) {
  std::set<uint64_t> hosts;
  for (const RankPlace& place : places) {
    if (place.process == runtime::processToken()) hosts.insert(place.host);
  }
  for (const RankPlace& place : places) {
    Peer& peer = peers_.emplace_back();
    peer.place = place;
    peer.isNear = hosts.contains(place.host);
  }
}

void PeerTables::map(int64_t now) {
  if (allMapped_ || now < nextMapping_) return;
  allMapped_ = true;
  for (Peer& peer : peers_) {
    const bool isKnown = peer.table.load(std::memory_order_relaxed) != nullptr;
    if (isKnown || !peer.isNear || peer.place.table.slot >= kTables) continue;
    try {
      peer.segment = mapTables(peer.place);
      peer.table.store(&tableOf(peer.segment->address(), peer.place.table.slot),
                       std::memory_order_release);
    } catch (const std::exception& error) {
      logInfo("The calls of {} cannot be read: {}", peer.place.text(), error.what());
      allMapped_ = false;
      nextMapping_ = now + kMappingPause;
      // A process that does not answer takes long, and the others are not to wait for each such.
      if (steadyNow() - now > kSecond) return;
    }
  }
}

RankView PeerTables::view(int rank, int64_t now) const {
  RankView view;
  if (const CallTable* table = tableAt(rank); table != nullptr) {
    view = readView(headOf(at(rank).segment->address()), *table, now);
    view.hasLeft = view.id != id_;
    if (view.hasLeft) view.calls.clear();
  }
  view.rank = rank;
  return view;
}

uint64_t PeerTables::calls(int rank) const {
  const CallTable* table = tableAt(rank);
  if (table == nullptr) return 0;
  return table->entered.load(kAcquire) + table->quietPoints.load(kAcquire) +
         table->flowPoints.load(kAcquire);
}

void PeerTables::addProcess(RankView& view, int64_t now) const {
  if (tableAt(view.rank) == nullptr) return;
  std::byte* segment = at(view.rank).segment->address();
  view.elsewhere = waitElsewhere(segment, view, now);
  view.settings = readSettings(headOf(segment));
}

Watched::Watched(std::shared_ptr<Journal> journal, std::shared_ptr<PeerTables> peers, int rank,
                 std::string description, std::chrono::nanoseconds patience, Questions questions)
    : journal_(std::move(journal)),
      peers_(std::move(peers)),
      rank_(rank),
      description_(std::move(description)),
      patience_(patience.count()),
      questions_(std::move(questions)),
      clock_(patience_),
      remote_(peers_, rank, questions_.uplink,
              [this](int peer, std::span<const std::byte> question, bool connects) {
                const std::lock_guard lock(mutex_);
                return !stopped_ && questions_.ask && questions_.ask(peer, question, connects);
              }) {}

void Watched::hear(std::vector<std::byte> answer) {
  if (!JobInquiry::hear(answer)) remote_.hear(std::move(answer));
}

// The watchdog may hold the lock for long while a device does not answer.
bool Watched::askNow(int rank, const Question& question) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || stopped_ || !questions_.ask) return false;
  return questions_.ask(rank, std::as_bytes(std::span(&question, 1)), true);
}

bool Watched::hasDied(int rank) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && !stopped_ && questions_.hasDied && questions_.hasDied(rank);
}

bool Watched::hasLeft(int rank) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && !stopped_ && questions_.hasLeft && questions_.hasLeft(rank);
}

void Watched::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
}

void Watched::look(int64_t now) {
  if (clock_.look(now)) {
    // Kernels, and the threads that answer other hosts, did not run either.
    forgetMeasurement(now);
    asked_ = {};
  }
  peers_->map(now);
  if (!updateProgress(now)) return;
  compareCalls(now);
  reportHang(now);
}

void Watched::forgetMeasurement(int64_t now) {
  nextMeasurement_ = now + std::min(kSlow, patience_ / kReadsPerPatience);
  measured_.reset();
  unread_ = 0;
}

// Returns whether the communicator is still to be watched.
bool Watched::updateProgress(int64_t now) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return false;
  if (const auto failure = questions_.findFailure()) {
    journal_->noteFailure(failure->error, failure->aborted);
    return false;
  }
  lookAtReplays(now);
  const CallTable& table = journal_->table();
  const uint64_t launched = table.launched.load(kAcquire);
  if (table.finished.load(kAcquire) == launched || questions_.isDone()) {
    journal_->setProgress(launched, launched, now);
    isBusy_ = false;
    noteQuiet(now);
    return true;
  }
  if (!std::exchange(isBusy_, true)) forgetMeasurement(now);
  if (now >= nextMeasurement_) {
    nextMeasurement_ = now + patience_ / kReadsPerPatience;
    measure(now);
  }
  return true;
}

void Watched::measure(int64_t now) {
  const CallTable& table = journal_->table();
  const uint64_t launched = table.launched.load(kAcquire);
  const auto progress = questions_.readProgress();
  if (!progress) {
    if (++unread_ == kEnoughAttempts) {
      logInfo("{}: the progress of its launches cannot be read from the device", description_);
    }
    return;
  }
  // That the last launch is done is for isDone() to say: groups of threads may outlive their mark.
  journal_->setProgress(std::max(progress->started, table.started.load(kAcquire)),
                        std::clamp(progress->finished, table.finished.load(kAcquire), launched - 1),
                        now);
  if (measured_ == progress) {
    if (const auto links = questions_.readLinks()) journal_->setLinks(*links);
  }
  measured_ = progress;
  unread_ = 0;
}

// Nothing tells when a graph is launched, so that its kernels' counters are read now and then, and
// at each look once a replay may need a rank that has left.
void Watched::lookAtReplays(int64_t now) {
  if (journal_->table().captures.load(kAcquire) == 0) return;
  if (now < nextReplays_ && !questions_.hasAnyoneLeft()) return;
  nextReplays_ = now + patience_ / kReadsPerPatience;
  const auto replays = questions_.readReplays();
  if (!replays || !journal_->setReplays(*replays, now)) return;
  if (const auto links = questions_.readLinks()) journal_->setLinks(*links);
}

// The numbers of what has begun are of one moment only if they do not change while they are read.
void Watched::noteQuiet(int64_t now) {
  if (now < nextQuiet_) return;
  nextQuiet_ = now + kSecond;
  const uint64_t entered = journal_->table().entered.load(kAcquire);
  if (!journal_->isIdle()) return;
  const auto before = questions_.readReplays();
  if (!before || before->running) return;
  const auto after = questions_.readReplays();
  if (!after || after->running || after->collectives != before->collectives) return;
  journal_->noteQuiet(*after, entered);
}

// Every rank compares its collectives with those of the lowest one and of its uplink, and what it
// sends with what the peers receive. So every two ranks are joined by such pairs.
void Watched::compareCalls(int64_t now) {
  if (mismatches_) return;
  // Counted before they are read, so that no call is missed.
  const uint64_t ownCalls = peers_->calls(rank_);
  const auto countCalls = [&] {
    uint64_t calls = ownCalls;
    for (const int rank : compared_) calls += peers_->calls(rank);
    return calls;
  };
  const bool isNew = countCalls() != comparedCalls_;
  if (!isNew && !remote_.isComparing(ownCalls)) return;
  const RankView own = peers_->view(rank_, now);
  for (const RankView& other : remote_.compare(own, ownCalls, now)) {
    if (compareWith(own, other)) return;
  }
  if (!isNew) return;
  compared_.clear();
  const auto add = [&](int rank) {
    const bool isKnown = std::find(compared_.begin(), compared_.end(), rank) != compared_.end();
    if (rank >= 0 && rank != rank_ && !isKnown && peers_->isMapped(rank)) compared_.push_back(rank);
  };
  int lowest = 0;
  while (lowest < rank_ && !peers_->isMapped(lowest)) lowest++;
  add(lowest);
  add(questions_.uplink);
  for (const Call& call : own.calls) {
    if (call.call == plan::Call::send) add(call.peer);
  }
  for (const Flow& flow : own.flows) {
    if (flow.sends && own.captures != 0) add(flow.peer);
  }
  comparedCalls_ = countCalls();
  for (const int rank : compared_) {
    if (compareWith(own, peers_->view(rank, now))) return;
  }
}

// Returns whether they differ. Then the communicator has failed.
bool Watched::compareWith(const RankView& own, const RankView& other) {
  const auto mismatch = findMismatch(own, other);
  const auto inGraphs = findReplayMismatch(own, other);
  if (!mismatch && !inGraphs) return false;
  mismatches_ = true;
  const std::lock_guard lock(mutex_);
  if (stopped_) return true;
  questions_.fail(Error(ErrorCode::invalidUsage, mismatch ? describe(*mismatch) : *inGraphs)
                      .remedy("All ranks must make the same calls with the same arguments, in the "
                              "same order, and a receive of the same size for each send"));
  return true;
}

// Or enough attempts have failed: a report without the progress of the device is better than none.
bool Watched::isMeasured() const {
  return !isBusy_ || measured_ || unread_ >= kEnoughAttempts;
}

// One report for a hang: of the lowest rank that lives and waits. Other hosts are asked first, and
// whoever is asked says what it has explained itself.
void Watched::reportHang(int64_t now) {
  if (journal_->isIdle()) return;
  const RankView own = peers_->view(rank_, now);
  const Call* current = own.current();
  const auto identity = [](const Call& call) { return std::pair(call.index, call.replay); };
  if (current == nullptr || identity(*current) == reported_ ||
      clock_.waited(identity(*current), own.waitsSince(*current)) < patience_ || !isMeasured()) {
    return;
  }
  if (std::exchange(asked_, identity(*current)) != identity(*current)) {
    remote_.restart(clock_.time());
  }
  const bool isComplete = remote_.gather(clock_.time());
  for (int rank = 0; rank < rank_; rank++) {
    if (!reportsInstead(viewOf(rank, now), now)) continue;
    reported_ = identity(*current);
    return;
  }
  if (!isComplete) return;
  reported_ = identity(*current);
  std::vector<RankView> views = collectViews(now);
  if (!measured_ && !current->isReplay()) assumeProgress(views, rank_);
  const RankView& seen = views[static_cast<size_t>(rank_)];
  const auto report = explain(views, rank_, now);
  if (!report) return;
  const uint64_t key = report->key();
  const auto hasReported = [&](const RankView& view) { return view.reported == key; };
  if (std::ranges::any_of(views, hasReported)) return;
  journal_->noteReport(key);
  // Whatever NCCL_DEBUG says: nobody who has a hang should have to start again to hear why.
  writeLog(LogLevel::warn, report->text(seen));
  writeLog(LogLevel::warn, report->json(seen));
}

// What is known of a rank: from its table, or from what a rank of another host has told.
RankView Watched::viewOf(int rank, int64_t now) const {
  if (!peers_->isMapped(rank)) {
    if (const RankView* told = remote_.find(rank)) return *told;
  }
  return peers_->view(rank, now);
}

std::vector<RankView> Watched::collectViews(int64_t now) {
  const auto isGone = [this](int rank) {
    const std::lock_guard lock(mutex_);
    return !stopped_ && questions_.hasLeft && questions_.hasLeft(rank);
  };
  std::vector<RankView> views;
  for (int rank = 0; rank < peers_->ranks(); rank++) {
    RankView& view = views.emplace_back(viewOf(rank, now));
    peers_->addProcess(view, now);
    if (view.isKnown) continue;
    if (isGone(rank)) {
      view.isKnown = view.hasLeft = true;
      continue;
    }
    view.place = peers_->place(rank).text();
  }
  return views;
}

bool Watched::reportsInstead(const RankView& other, int64_t now) const {
  if (!other.isKnown || other.hasLeft || other.silentFor > 2 * kSecond) return false;
  const Call* current = other.current();
  return current != nullptr && now - other.waitsSince(*current) >= patience_ - kSecond;
}

Watchdog& Watchdog::get() {
  // Never destroyed, because its thread may outlive every destructor. No lock: another thread may
  // have held it at a fork.
  static std::atomic<Watchdog*> current{nullptr};
  [[maybe_unused]] static const int registered = std::atexit([] {
    Watchdog* watchdog = current.load();
    if (watchdog != nullptr) watchdog->stop();
  });
  Watchdog* found = current.load();
  while (found == nullptr || found->forks_ != forkCount()) {
    auto made = std::unique_ptr<Watchdog>(new Watchdog);
    if (current.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

void Watchdog::add(const std::shared_ptr<Watched>& watched) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  watched_.push_back(watched);
  if (!running_) {
    startThread("unisono-watch", [this] { run(); }).detach();
    running_ = true;
  }
  changed_.notify_all();
}

std::vector<std::shared_ptr<Watched>> Watchdog::all() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Watched>> found;
  for (const auto& each : watched_) {
    if (auto owned = each.lock()) found.push_back(std::move(owned));
  }
  return found;
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    std::erase_if(watched_, [](const auto& each) { return each.expired(); });
    if (watched_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const std::vector<std::weak_ptr<Watched>> all = watched_;
    looking_ = true;
    lock.unlock();
    bool inquires = false;
    if (const auto segment = segmentOfThisProcess()) {
      ProcessHead& head = headOf(segment->address());
      head.alive.store(steadyNow(), std::memory_order_release);
      inquires = inquiries_.proceed(head, steadyNow());
    }
    for (const auto& each : all) {
      const auto owned = each.lock();
      if (owned == nullptr) continue;
      try {
        owned->look(steadyNow());
      } catch (const std::exception& error) {
        // Its device has failed, or memory is short.
        logWarn("{}: hangs are not diagnosed any more: {}", owned->description_, error.what());
        owned->stop();
      }
    }
    lock.lock();
    looking_ = false;
    changed_.notify_all();
    changed_.wait_for(lock, inquires ? kInquiryInterval : kInterval, [this] { return stopped_; });
  }
}

// The thread touches no device any more once the process exits, as drivers end with it.
void Watchdog::stop() {
  if (forks_ != forkCount()) return;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, 1s, [this] { return !looking_; });
}

}  // namespace unisono::diagnose
