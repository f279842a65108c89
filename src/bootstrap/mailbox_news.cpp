// SPDX-License-Identifier: Apache-2.0
// What a mailbox tells and hears of failures, deaths and departures.
#include "bootstrap/mailbox.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// Telling a rank of a failure must not hold up reporting it here.
constexpr milliseconds kFailureTimeout{1000};
// Ranks usually leave together, and then nobody needs another uplink.
constexpr milliseconds kUplinkDelay{500};

}  // namespace

void Mailbox::announce(const Failure& failure) {
  const Lock lock(mutex_);
  tellAll(failure);
}

void Mailbox::sendFailure(int peer, const Failure& failure) {
  Lock lock(mutex_);
  tellAll(failure);
  connectToTell(peer, lock);
}

// Whoever is connected is told of failures.
void Mailbox::connectToTell(int peer, Lock& lock) {
  const Wait wait(std::min(times_.limit.value_or(kFailureTimeout), kFailureTimeout), aborted_);
  const std::string doing = fmt::format("connecting to rank {}", peer);
  const auto check = [&] { wait.throwIfAborted(doing); };
  connectionTo(peer, wait, {.check = check, .evenAfterFailure = true}, lock);
}

void Mailbox::failCollective(uint64_t number, const Failure& failure,
                             const std::vector<int>& neighbours) {
  Lock lock(mutex_);
  hearFailedCollective(number, failure);
  for (const int peer : neighbours) {
    try {
      connectToTell(peer, lock);
    } catch (const Error&) {
      // This neighbour is the one that has ended, or this rank is being aborted.
    }
  }
}

std::optional<Error> Mailbox::collectiveFailure(uint64_t number) const {
  const Lock lock(mutex_);
  const auto failed = failedCollectives_.find(number);
  if (failed == failedCollectives_.end() || failed->second.rank == rank_) return std::nullopt;
  return errorOf(failed->second);
}

void Mailbox::hearFailedCollective(uint64_t number, const Failure& failure) {
  // Ranks are one or two all-gathers apart.
  constexpr size_t kMaxKept = 64;
  if (!failedCollectives_.emplace(number, failure).second) return;
  if (failedCollectives_.size() > kMaxKept) failedCollectives_.erase(failedCollectives_.begin());
  for (const PeerSocketPointer& connection : introducedConnections()) {
    tellFailedCollective(connection, number, failure);
  }
  changed_.notify_all();
}

void Mailbox::tellFailedCollective(const PeerSocketPointer& connection, uint64_t number,
                                   const Failure& failure) {
  if (!isIntroduced(*connection)) return;
  const auto rank = static_cast<uint32_t>(failure.rank);
  std::vector<std::byte> payload(sizeof(rank));
  std::memcpy(payload.data(), &rank, sizeof(rank));
  const auto text =
      std::as_bytes(std::span(std::string_view(failure.text).substr(0, kLongestText)));
  payload.insert(payload.end(), text.begin(), text.end());
  enqueue(connection, {.kind = FrameKind::failedCollective, .tag = number}, payload);
}

void Mailbox::leave(const std::string& text,
                    const std::function<DepartureCounts(int peer)>& counts) {
  const Lock lock(mutex_);
  leaving_ = left_ = true;
  for (const PeerSocketPointer& connection : introducedConnections()) {
    tell(connection, {rank_, counts(*connection->peer), text});
  }
}

void Mailbox::tell(const PeerSocketPointer& connection, const Failure& failure) {
  if (!isIntroduced(*connection)) return;
  enqueue(connection,
          {.kind = failure.isDeath ? FrameKind::death : FrameKind::failure,
           .tag = static_cast<uint64_t>(failure.rank)},
          std::as_bytes(std::span(std::string_view(failure.text).substr(0, kLongestText))));
}

void Mailbox::tellAll(const Failure& failure) {
  if (told_) return;
  told_ = failure;
  for (const PeerSocketPointer& connection : introducedConnections()) tell(connection, failure);
}

void Mailbox::tell(const PeerSocketPointer& connection, const Departure& departure) {
  if (!isIntroduced(*connection)) return;
  std::vector<std::byte> payload(sizeof(departure.counts));
  std::memcpy(payload.data(), &departure.counts, sizeof(departure.counts));
  const auto text =
      std::as_bytes(std::span(std::string_view(departure.text).substr(0, kLongestText)));
  payload.insert(payload.end(), text.begin(), text.end());
  enqueue(connection, {.kind = FrameKind::departure, .tag = static_cast<uint64_t>(departure.rank)},
          payload);
}

void Mailbox::hearFailure(Failure failure) {
  if (failure_ || failure.rank == rank_) return;
  failure_ = std::move(failure);
  if (watcher_ != nullptr) watcher_->peerFailed(errorOf(*failure_));
  tellAll(*failure_);
  changed_.notify_all();
}

// Only a rank that left after fewer calls than all before is news for those who are not connected
// to it: when all ranks leave after the same call, each hears of one.
void Mailbox::hearDeparture(Departure departure, int from) {
  if (departure.rank == rank_) return;
  if (departure.rank == from) {
    peerOf(from).farewell = departure.text;
    if (from == uplink_ && !leaving_) {
      seeksFrom_ = Clock::now() + kUplinkDelay;
      reactor_.requestTick();
    }
  }
  if (watcher_ != nullptr) watcher_->peerLeft(departure);
  const uint64_t fewest = earliest_ ? earliest_->counts.collectives : DepartureCounts::kUnlimited;
  if (departure.counts.collectives >= fewest) return;
  departure.counts.sends = departure.counts.receives = DepartureCounts::kUnlimited;
  earliest_ = std::move(departure);
  for (const PeerSocketPointer& connection : introducedConnections()) {
    if (*connection->peer != from) tell(connection, *earliest_);
  }
}

void Mailbox::keepUplink(int uplink) {
  const Lock lock(mutex_);
  uplink_ = uplink;
}

// Takes the nearest lower rank that has not left. Called again until a connection to one is open.
void Mailbox::seekUplink() {
  if (!seeksFrom_ || leaving_ || told_) return;
  if (Clock::now() >= *seeksFrom_) {
    int candidate = rank_ - 1;
    while (candidate >= 0 && (peerOf(candidate).farewell || peerOf(candidate).goneSince)) {
      candidate--;
    }
    if (candidate < 0 || peerOf(candidate).openConnections > 0) {
      uplink_ = candidate;
      seeksFrom_.reset();
      return;
    }
    Peer& peer = peerOf(candidate);
    try {
      const bool isDue = !peer.attempt && Clock::now() >= peer.nextAttempt;
      if (isDue && addressOf(candidate) != nullptr) startAttempt(candidate);
    } catch (const Error& error) {
      logInfo("rank {}: cannot connect to rank {} yet: {}", rank_, candidate, error.what());
      peer.nextAttempt = Clock::now() + kReportInterval;
    }
  }
  reactor_.requestTick();
}

}  // namespace unisono::bootstrap
