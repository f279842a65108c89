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
  contactToTell(peer, lock);
}

// Whoever is greeted is told of failures.
void Mailbox::contactToTell(int peer, Lock& lock) {
  const Wait wait(std::min(times_.limit.value_or(kFailureTimeout), kFailureTimeout), aborted_);
  awaitContact(peer, wait, {.evenAfterFailure = true}, lock);
}

void Mailbox::failCollective(uint64_t number, const Failure& failure,
                             const std::vector<int>& neighbours) {
  Lock lock(mutex_);
  hearFailedCollective(number, failure);
  for (const int peer : neighbours) {
    try {
      contactToTell(peer, lock);
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
  for (const int peer : greetedPeers()) tellFailedCollective(peer, number, failure);
  changed_.notify_all();
}

void Mailbox::tellFailedCollective(int peer, uint64_t number, const Failure& failure) {
  const auto rank = static_cast<uint32_t>(failure.rank);
  std::vector<std::byte> payload(sizeof(rank));
  std::memcpy(payload.data(), &rank, sizeof(rank));
  const auto text =
      std::as_bytes(std::span(std::string_view(failure.text).substr(0, kLongestText)));
  payload.insert(payload.end(), text.begin(), text.end());
  post(peer, FrameKind::failedCollective, number, payload);
}

void Mailbox::leave(const std::string& text,
                    const std::function<DepartureCounts(int peer)>& counts) {
  const Lock lock(mutex_);
  leaving_ = true;
  for (const int peer : greetedPeers()) tell(peer, {rank_, counts(peer), text});
}

void Mailbox::tell(int peer, const Failure& failure) {
  post(peer, failure.isDeath ? FrameKind::death : FrameKind::failure,
       static_cast<uint64_t>(failure.rank),
       std::as_bytes(std::span(std::string_view(failure.text).substr(0, kLongestText))));
}

void Mailbox::tellAll(const Failure& failure) {
  if (told_) return;
  told_ = failure;
  for (const int peer : greetedPeers()) tell(peer, failure);
}

void Mailbox::tell(int peer, const Departure& departure) {
  std::vector<std::byte> payload(sizeof(departure.counts));
  std::memcpy(payload.data(), &departure.counts, sizeof(departure.counts));
  const auto text =
      std::as_bytes(std::span(std::string_view(departure.text).substr(0, kLongestText)));
  payload.insert(payload.end(), text.begin(), text.end());
  post(peer, FrameKind::departure, static_cast<uint64_t>(departure.rank), payload);
}

void Mailbox::hearNews(int from, const Frame& frame) {
  const FrameHeader& header = frame.header;
  if (header.kind == FrameKind::failedCollective) {
    uint32_t failed = 0;
    if (frame.payload.size() < sizeof(failed)) {
      throw Error(ErrorCode::remoteError, "its report of a failure is too short");
    }
    std::memcpy(&failed, frame.payload.data(), sizeof(failed));
    hearFailedCollective(header.tag,
                         {static_cast<int>(failed), frame.text().substr(sizeof(failed))});
    return;
  }
  if (header.tag >= static_cast<uint64_t>(members_->ranks())) {
    throw Error(ErrorCode::remoteError,
                fmt::format("its report names rank {}, which does not exist", header.tag));
  }
  const int about = static_cast<int>(header.tag);
  if (header.kind != FrameKind::departure) {
    hearFailure({about, frame.text(), header.kind == FrameKind::death});
    return;
  }
  Departure departure = {.rank = about, .text = {}};
  if (frame.payload.size() < sizeof(departure.counts)) {
    throw Error(ErrorCode::remoteError, "its last message is too short");
  }
  std::memcpy(&departure.counts, frame.payload.data(), sizeof(departure.counts));
  departure.text = frame.text().substr(sizeof(departure.counts));
  hearDeparture(std::move(departure), from);
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
      pool_->requestTick();
    }
  }
  if (watcher_ != nullptr) watcher_->peerLeft(departure);
  const uint64_t fewest = earliest_ ? earliest_->counts.collectives : DepartureCounts::kUnlimited;
  if (departure.counts.collectives >= fewest) return;
  departure.counts.sends = departure.counts.receives = DepartureCounts::kUnlimited;
  earliest_ = std::move(departure);
  for (const int peer : greetedPeers()) {
    if (peer != from) tell(peer, *earliest_);
  }
}

void Mailbox::keepUplink(int uplink) {
  const Lock lock(mutex_);
  uplink_ = uplink;
}

// Takes the nearest rank at a lower place that has not left. Called again until it has greeted this
// one.
void Mailbox::seekUplink() {
  if (!seeksFrom_ || leaving_ || told_) return;
  if (Clock::now() >= *seeksFrom_) {
    int place = members_->placeOf(rank_) - 1;
    const auto hasLeft = [this](int peer) { return peerOf(peer).farewell || goneOf(peer); };
    while (place >= 0 && hasLeft(members_->rankAt(place))) place--;
    const int candidate = place < 0 ? -1 : members_->rankAt(place);
    if (candidate < 0 || peerOf(candidate).hasGreeted) {
      uplink_ = candidate;
      seeksFrom_.reset();
      return;
    }
    trySeekContact(candidate);
  }
  pool_->requestTick();
}

}  // namespace unisono::bootstrap
