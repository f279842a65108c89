// SPDX-License-Identifier: Apache-2.0
#include "comm/health.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/system.h"
#include "comm/reaper.h"
#include "device/simt/common.h"

namespace unisono::comm {

AbortSignal::AbortSignal(runtime::Runtime& runtime, int device)
    : waitFlag_(runtime.allocatePinned(device::kAbortFlagWords * sizeof(uint32_t))),
      launchFlag_(runtime.allocateLaunchFlag(device)) {}

bool AbortSignal::raise() {
  if (aborted_.exchange(true, std::memory_order_acq_rel)) return false;
  endWaits();
  std::atomic_ref<uint32_t>(*static_cast<uint32_t*>(waitFlag_->hostAddress()))
      .store(1, std::memory_order_release);
  launchFlag_->raise();
  return true;
}

void AbortSignal::noteEnd(int rank) {
  if (rank >= device::kEndableRanks) return;
  auto* words = static_cast<uint32_t*>(waitFlag_->hostAddress());
  std::atomic_ref<uint32_t>(words[device::endedWordOf(rank)])
      .fetch_or(device::endedBitOf(rank), std::memory_order_release);
}

const uint32_t* AbortSignal::waitFlag() const {
  return static_cast<const uint32_t*>(waitFlag_->deviceAddress());
}

void Health::start(std::string name, int ranks, std::chrono::milliseconds grace,
                   std::vector<RankProcess> processes) {
  std::optional<Error> early;
  {
    const std::lock_guard lock(mutex_);
    name_ = std::move(name);
    grace_ = grace;
    processes_ = std::move(processes);
    messages_ = std::vector<MessageCounts>(static_cast<size_t>(ranks));
    started_ = true;
    early = std::exchange(earlyFailure_, {});
  }
  if (early) fail(*early);
}

void Health::peerFailed(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!started_) earlyFailure_ = error;
    if (!started_) return;
  }
  fail(error);
}

std::optional<Error> Health::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

Error Health::reserve(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (error_) return *error_;
  if (!reserved_) reserved_ = error;
  return *reserved_;
}

Error Health::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!error_) {
    error_ = reserved_.value_or(error);
    logWarn("{}: {}", name_, error_->what());
    error_->setLogged();
    failed_.store(true, std::memory_order_release);
    if (started_) raiseLater();
  }
  signal_.endWaits();
  return *error_;
}

void Health::abort() {
  abortedByUser_.store(true, std::memory_order_release);
  {
    // Before the waits end: who has waited looks here for the reason.
    const std::lock_guard lock(mutex_);
    if (!error_) {
      error_ = invalidUsage("The communicator was aborted").remedy("Make another communicator");
      failed_.store(true, std::memory_order_release);
    }
  }
  raise();
}

void Health::raiseLater() {
  const auto deadline = std::chrono::steady_clock::now() + grace_;
  Reaper::get().add([self = shared_from_this(), deadline] {
    if (std::chrono::steady_clock::now() < deadline && !self->signal_.aborted()) return false;
    self->raise();
    return true;
  });
}

// A kernel may now wait for the end of stores of a peer that has died. The files of a process are
// closed before it is gone, and the driver ends what its devices do before it closes them. A driver
// that does so in the background has the time that is left.
void Health::raise() {
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{10}, kRest{200}, kLongest{6000};
  if (!signal_.raise()) return;
  struct Peer {
    RankProcess place;
    Clock::time_point ended = Clock::time_point::max();
  };
  std::vector<Peer> peers;
  {
    const std::lock_guard lock(mutex_);
    for (const RankProcess& place : processes_) peers.push_back({place});
  }
  if (peers.empty()) return;
  const auto end = Clock::now() + kLongest;
  Reaper::get().add([self = shared_from_this(), peers, end, next = Clock::now()]() mutable {
    const auto now = Clock::now();
    if (now < next) return false;
    next = now + kInterval;
    std::erase_if(peers, [&](Peer& peer) {
      if (peer.ended == Clock::time_point::max() && hasEnded(peer.place.process)) peer.ended = now;
      if (peer.ended == Clock::time_point::max() || now < peer.ended + kRest) return false;
      self->signal_.noteEnd(peer.place.rank);
      return true;
    });
    return peers.empty() || now > end || self.use_count() == 1;  // nobody else needs it
  });
}

void Health::check(const CallNeeds& needs) {
  if (!anyoneLeft_.load()) return;
  const std::lock_guard lock(mutex_);
  for (const bootstrap::Departure& departure : departures_) {
    if (auto error = unmetNeed(departure, needs)) throw *error;
  }
}

// Either this rank sees here who has left, or peerLeft() sees there what was launched.
void Health::begin(const CallNeeds& needs) {
  for (const plan::PeerUse& use : needs.messages) {
    MessageCounts& counts = messages_[static_cast<size_t>(use.peer)];
    (use.sends ? counts.sends : counts.receives).fetch_add(1);
  }
  if (needs.collectives > 0) collectives_.fetch_add(needs.collectives);
  check({});
}

bootstrap::DepartureCounts Health::countsFor(int peer) const {
  if (messages_.empty()) return {0, 0, 0};  // the communicator was never complete
  const MessageCounts& counts = messages_[static_cast<size_t>(peer)];
  return {collectives_.load() + replayedCollectives_.load(),
          counts.sends.load() + counts.replayedSends.load(),
          counts.receives.load() + counts.replayedReceives.load()};
}

void Health::noteReplays(const Replays::Counts& counts) {
  replayedCollectives_.store(counts.collectives);
  for (const auto& [peer, sends] : counts.sends) {
    messages_[static_cast<size_t>(peer)].replayedSends.store(sends);
  }
  for (const auto& [peer, receives] : counts.receives) {
    messages_[static_cast<size_t>(peer)].replayedReceives.store(receives);
  }
  try {
    check({});
  } catch (const Error& error) {
    fail(error);
  }
}

std::optional<Error> Health::unmetNeed(const bootstrap::Departure& departure,
                                       const CallNeeds& more) const {
  const bootstrap::DepartureCounts& theirs = departure.counts;
  bootstrap::DepartureCounts mine = countsFor(departure.rank);
  mine.collectives += more.collectives;
  for (const plan::PeerUse& use : more.messages) {
    if (use.peer == departure.rank) (use.sends ? mine.sends : mine.receives)++;
  }
  std::string need;
  if (mine.collectives > theirs.collectives) {
    need = fmt::format("it took part in collective call {}", theirs.collectives + 1);
  } else if (mine.sends > theirs.receives) {
    need = fmt::format("it received message {} of this rank", theirs.receives + 1);
  } else if (mine.receives > theirs.sends) {
    need = fmt::format("it sent message {} to this rank", theirs.sends + 1);
  } else {
    return std::nullopt;
  }
  return Error(ErrorCode::remoteError, fmt::format("{} before {}", departure.text, need))
      .peer(departure.rank)
      .remedy("All ranks must make the same collective calls, and a receive for each send");
}

bool Health::hasLeft(int peer) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(departures_, [peer](const bootstrap::Departure& departure) {
    return departure.rank == peer;
  });
}

void Health::peerLeft(const bootstrap::Departure& departure) {
  std::optional<Error> error;
  {
    const std::lock_guard lock(mutex_);
    departures_.push_back(departure);
    anyoneLeft_.store(true);
    if (started_) error = unmetNeed(departure, {});
  }
  if (error) fail(*error);
}

}  // namespace unisono::comm
