// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mailbox.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/system.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// A peer may have opened a connection, sent and ended before we accepted it, while we already know
// that another connection with it has ended. Only after this time does it count as gone.
constexpr milliseconds kGoneGrace{200};
// A receiver that hears nothing for this time connects to the sender, which shows whether it lives:
// 500 ms, or more where hundreds of ranks of this process wait. The sender may be one of them, and
// the connection costs two descriptors.
milliseconds probeDelay() {
  return 10 * Wait::longestSlice();
}

constexpr const char* kLookAtPeer = "Look for the first error in the output of that rank";

}  // namespace

Mailbox::Mailbox(int rank, Membership membership, const MailboxTimes& times,
                 std::function<bool()> aborted, std::shared_ptr<PeerWatcher> watcher)
    : rank_(rank),
      ranks_(membership.ranks),
      neighbours_(std::move(membership.neighbours)),
      localize_(std::move(membership.localize)),
      session_(membership.session),
      times_(times),
      aborted_(std::move(aborted)),
      name_(processName().substr(0, kLongestName)),
      reactor_(Reactor::ofThisProcess()),
      listener_(std::move(membership.listener)),
      watcher_(std::move(watcher)) {
  number_ = reactor_.add(*this);
  try {
    const Lock lock(mutex_);
    reactor_.watch(number_, listener_.descriptor(), Poller::Interest::read);
  } catch (...) {
    reactor_.remove(number_);
    throw;
  }
}

Mailbox::~Mailbox() {
  const Clock::time_point deadline = Clock::now() + kDrainTimeout;
  {
    Lock lock(mutex_);
    leaving_ = true;
    while (hasUnsent() && Clock::now() < deadline && !(aborted_ && aborted_())) {
      changed_.wait_for(lock, Wait::kSlice);
    }
  }
  reactor_.remove(number_);
  // Closing a connection with unread data resets it, which could lose what was sent last.
  const std::map<int, PeerSocketPointer> connections = connections_;
  for (const auto& [descriptor, connection] : connections) {
    readFrom(connection);
    reactor_.forget(descriptor);
  }
  reactor_.forget(listener_.descriptor());
}

std::optional<Failure> Mailbox::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

std::optional<std::vector<std::byte>> Mailbox::take(const Key& key) {
  auto found = inbox_.find(key);
  if (found == inbox_.end()) return std::nullopt;
  std::vector<std::byte> payload = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) inbox_.erase(found);
  return payload;
}

void Mailbox::throwIfReported() const {
  if (failure_) throw errorOf(*failure_);
}

Error Mailbox::errorOf(const Failure& failure) const {
  if (failure.isDeath) {
    return Error(ErrorCode::remoteError, failure.text)
        .rank(rank_)
        .peer(failure.rank)
        .remedy(
            "Look for the cause in the output of that process and in the log of its host. This "
            "communicator can only be aborted or destroyed");
  }
  return Error(ErrorCode::remoteError,
               fmt::format("Rank {} reports: {}", failure.rank, failure.text))
      .rank(rank_);
}

// "Rank 3 (process 17 on host n1)", or with its address while the name is not known.
std::string Mailbox::describe(int peer) const {
  const std::string& name = peerOf(peer).name;
  return fmt::format("Rank {} ({})", peer, name.empty() ? addressText(peer) : name);
}

void Mailbox::throwIfEnded(const Wait& wait, const WaitRule& rule, std::string_view doing) const {
  if (rule.check) rule.check();
  if (rule.evenAfterFailure) return;
  // The failure that was heard of may be why the communicator is being aborted.
  if (failure_ && aborted_ && aborted_()) throwIfReported();
  wait.throwIfAborted(doing);
}

void Mailbox::throwIfCollectiveFailed(const Key& key) const {
  if (std::get<FrameKind>(key) != FrameKind::collective) return;
  const auto failed = failedCollectives_.find(std::get<uint64_t>(key));
  if (failed != failedCollectives_.end()) throw errorOf(failed->second);
}

void Mailbox::throwIfGone(int peer, bool evenIfOthersFailed) const {
  const Peer& state = peerOf(peer);
  const bool mayStillArrive = state.goneSince && Clock::now() - *state.goneSince < kGoneGrace;
  const bool isOfPeer = failure_ && failure_->isDeath && failure_->rank == peer;
  const bool matters = isOfPeer ? !mayStillArrive : !evenIfOthersFailed;
  if (failure_ && matters) throw errorOf(*failure_);
  if (!state.goneSince || mayStillArrive) return;
  throw Error(ErrorCode::remoteError, state.goneText).rank(rank_).peer(peer).remedy(kLookAtPeer);
}

Error Mailbox::timeoutError(int peer, std::string_view what) const {
  const double seconds =
      std::chrono::duration<double>(times_.limit.value_or(milliseconds(0))).count();
  return Error(ErrorCode::timeout, fmt::format("{} within {} s", what, seconds))
      .rank(rank_)
      .peer(peer)
      .remedy(
          "Check what that rank does: it may hang, or may not make the call that this one waits "
          "in. UNISONO_BOOTSTRAP_TIMEOUT sets the limit");
}

void Mailbox::reportWait(int peer, const Wait& wait, Reminder& reminder) const {
  if (!reminder.isDue()) return;
  logWarn(
      "rank {} has been waiting for rank {} ({}) for {:.0f} s: it may be late, or may not make "
      "the same call",
      rank_, peer, addressText(peer), wait.secondsSinceStart());
}

std::vector<std::byte> Mailbox::receive(int peer, FrameKind kind, uint64_t tag,
                                        const WaitRule& rule) {
  const Wait wait(times_.limit, aborted_);
  const Clock::time_point begun = Clock::now();
  Reminder reminder(times_.reportInterval);
  const Key key(peer, kind, tag);
  Lock lock(mutex_);
  for (;;) {
    // A rank that gave up may have sent its part before.
    throwIfCollectiveFailed(key);
    if (auto payload = take(key)) return std::move(*payload);
    throwIfGone(peer, rule.evenAfterFailure);
    throwIfEnded(wait, rule, fmt::format("waiting for a message from rank {}", peer));
    if (wait.isExpired()) throw timeoutError(peer, "No message arrived");
    reportWait(peer, wait, reminder);
    // Without a connection, nothing tells whether the peer still lives.
    Peer& state = peerOf(peer);
    if (peer != rank_ && addressOf(peer) != nullptr && !state.out && !state.attempt &&
        !state.goneSince && Clock::now() >= std::max(begun + probeDelay(), state.nextAttempt)) {
      try {
        startAttempt(peer);
      } catch (const Error& error) {
        // The message may arrive nevertheless.
        logInfo("rank {}: cannot check whether rank {} lives: {}", rank_, peer, error.what());
        state.nextAttempt = Clock::now() + kReportInterval;
      }
    }
    changed_.wait_for(lock, std::max(wait.slice(), milliseconds(1)));
  }
}

void Mailbox::handleMessages(uint64_t tag, MessageHandler handler) {
  const Lock lock(mutex_);
  std::vector<Key> arrived;
  for (const auto& [key, messages] : inbox_) {
    if (std::get<FrameKind>(key) == FrameKind::message && std::get<uint64_t>(key) == tag) {
      arrived.push_back(key);
    }
  }
  for (const Key& key : arrived) {
    while (auto message = take(key)) handler(std::get<int>(key), std::move(*message));
  }
  handlers_.insert_or_assign(tag, std::move(handler));
}

void Mailbox::handleQuestions(QuestionHandlers handlers) {
  const Lock lock(mutex_);
  questionHandlers_ = std::move(handlers);
}

bool Mailbox::ask(int peer, std::span<const std::byte> question, bool connects) {
  // A peer that reads nothing is not asked more than this.
  constexpr size_t kMostUnsent = 16;
  const Lock lock(mutex_);
  if (leaving_ || peer == rank_) return false;
  Peer& state = peerOf(peer);
  if (state.out) {
    const PeerSocketPointer connection = state.out;
    if (connection->stage != Stage::open || connection->unsent.size() >= kMostUnsent) return false;
    enqueue(connection, {.kind = FrameKind::question}, question);
    return connection->stage == Stage::open;
  }
  const bool isDue = !state.attempt && !state.goneSince && Clock::now() >= state.nextAttempt;
  if (connects && isDue && addressOf(peer) != nullptr) startAttempt(peer);
  return false;
}

std::string Mailbox::addressOfPeer(int peer) const {
  const Lock lock(mutex_);
  const Address* address = addressOf(peer);
  return address == nullptr ? "" : address->text();
}

// Returns the connection on which to send to `peer`, and opens it when there is none.
Mailbox::PeerSocketPointer Mailbox::connectionTo(int peer, const Wait& wait, const WaitRule& rule,
                                                 Lock& lock) {
  Peer& state = peerOf(peer);
  Reminder reminder(times_.reportInterval);
  while (!state.out) {
    if (!rule.evenAfterFailure) throwIfReported();
    // The grace that throwIfGone() allows is for messages that may still arrive.
    if (state.goneSince) {
      throw Error(ErrorCode::remoteError, state.goneText)
          .rank(rank_)
          .peer(peer)
          .remedy(kLookAtPeer);
    }
    throwIfEnded(wait, rule, fmt::format("connecting to rank {}", peer));
    if (wait.isExpired()) throw timeoutError(peer, "No connection was made");
    reportWait(peer, wait, reminder);
    const bool isDue = !state.attempt && Clock::now() >= state.nextAttempt;
    if (isDue && addressOf(peer) != nullptr) startAttempt(peer);
    changed_.wait_for(lock, std::clamp(wait.slice(), milliseconds(1), kConnectPause));
  }
  return state.out;
}

void Mailbox::send(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload,
                   const WaitRule& rule) {
  Lock lock(mutex_);
  if (peer == rank_) {
    inbox_[Key(peer, kind, tag)].emplace_back(payload.begin(), payload.end());
    changed_.notify_all();
    return;
  }
  try {
    const Wait wait(times_.limit, aborted_);
    sendOn(connectionTo(peer, wait, rule, lock), peer, kind, tag, payload);
  } catch (const Error&) {
    // A peer that failed said why before it ended.
    readEverything();
    if (!rule.evenAfterFailure) throwIfReported();
    throw;
  }
}

void Mailbox::sendOn(const PeerSocketPointer& connection, int peer, FrameKind kind, uint64_t tag,
                     std::span<const std::byte> payload) {
  if (connection->stage == Stage::open) enqueue(connection, {.kind = kind, .tag = tag}, payload);
  if (connection->stage != Stage::open) {
    throw Error(ErrorCode::remoteError, "The peer closed its connection: it has ended or failed")
        .rank(rank_)
        .peer(peer)
        .remedy(kLookAtPeer);
  }
}

void Mailbox::learnAddresses(AddressTable addresses) {
  const Lock lock(mutex_);
  addresses_ = std::move(addresses);
}

const Mailbox::Peer& Mailbox::peerOf(int peer) const {
  static const Peer nobody;
  const auto found = peers_.find(peer);
  return found == peers_.end() ? nobody : found->second;
}

const Address* Mailbox::addressOf(int peer) const {
  if (addresses_ != nullptr) return &(*addresses_)[static_cast<size_t>(peer)];
  const auto found = neighbours_.find(peer);
  return found == neighbours_.end() ? nullptr : &found->second;
}

std::string Mailbox::addressText(int peer) const {
  const Address* address = addressOf(peer);
  return address == nullptr ? "which has not connected yet" : address->text();
}

bool Mailbox::reaches(int peer) const {
  const Lock lock(mutex_);
  return addressOf(peer) != nullptr || peerOf(peer).openConnections > 0;
}

}  // namespace unisono::bootstrap
