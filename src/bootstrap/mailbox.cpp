// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mailbox.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

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

// How often a rank that connects looks whether it may try again.
constexpr milliseconds kAttemptPause{20};

constexpr const char* kLookAtPeer = "Look for the first error in the output of that rank";

std::unique_ptr<Seat> openPool(int rank, Membership membership) {
  auto pool = std::make_shared<ConnectionPool>(rank, std::move(membership));
  auto seat = std::make_unique<Seat>(pool, pool->session());
  pool->start();
  return seat;
}

}  // namespace

Mailbox::Mailbox(int rank, std::unique_ptr<Seat> seat, std::shared_ptr<const Members> members,
                 const MailboxTimes& times, std::function<bool()> aborted,
                 std::shared_ptr<PeerWatcher> watcher)
    : rank_(rank),
      members_(members != nullptr ? std::move(members)
                                  : std::make_shared<const Members>(seat->pool()->ranks())),
      pool_(seat->pool()),
      communicator_(seat->communicator()),
      times_(times),
      aborted_(std::move(aborted)),
      watcher_(std::move(watcher)),
      mutex_(pool_->mutex()) {
  const Lock lock(mutex_);
  seat->handOver(*this);
}

Mailbox::Mailbox(int rank, Membership membership, const MailboxTimes& times,
                 std::function<bool()> aborted, std::shared_ptr<PeerWatcher> watcher)
    : Mailbox(rank, openPool(rank, std::move(membership)), nullptr, times, std::move(aborted),
              std::move(watcher)) {}

Mailbox::~Mailbox() {
  // Nothing of this communicator may follow its end.
  Lock lock(mutex_);
  leaving_ = true;
  for (const int peer : greetedPeers()) {
    peerOf(peer).isGreeted = false;
    post(peer, FrameKind::absent, 0, {});
  }
  pool_->remove(communicator_, aborted_, lock);
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
  return fmt::format("Rank {} ({})", peer, pool_->describe(members_->familyRank(peer)));
}

// Called without the lock: this may ask another mailbox of the pool.
bool Mailbox::isAborted(Lock& lock) const {
  if (!aborted_) return false;
  lock.unlock();
  const bool aborted = aborted_();
  lock.lock();
  return aborted;
}

void Mailbox::throwIfEnded(bool aborted, const WaitRule& rule, std::string_view doing) const {
  if (rule.check) rule.check();
  if (!aborted || rule.evenAfterAbort) return;
  // The failure that was heard of may be why the communicator is being aborted.
  if (!rule.evenAfterFailure) throwIfReported();
  throw abortedWhile(doing);
}

void Mailbox::throwIfCollectiveFailed(const Key& key) const {
  if (std::get<FrameKind>(key) != FrameKind::collective) return;
  const auto failed = failedCollectives_.find(std::get<uint64_t>(key));
  if (failed != failedCollectives_.end()) throw errorOf(failed->second);
}

const std::optional<ConnectionPool::Gone>& Mailbox::goneOf(int peer) const {
  const Peer& state = peerOf(peer);
  return state.gone || state.isGreeted ? state.gone : pool_->goneOf(members_->familyRank(peer));
}

// What a peer that has left in an orderly manner has said, to this rank or to others.
std::optional<std::string> Mailbox::farewellOf(int peer) const {
  if (earliest_ && earliest_->rank == peer) return earliest_->text;
  return peerOf(peer).farewell;
}

void Mailbox::throwIfGone(int peer, bool evenIfOthersFailed) const {
  const std::optional<ConnectionPool::Gone>& gone = goneOf(peer);
  const bool mayStillArrive = gone && Clock::now() - gone->since < kGoneGrace;
  const bool isOfPeer = failure_ && failure_->isDeath && failure_->rank == peer;
  const bool matters = isOfPeer ? !mayStillArrive : !evenIfOthersFailed;
  if (failure_ && matters) throw errorOf(*failure_);
  if (!gone || mayStillArrive) return;
  throw Error(ErrorCode::remoteError, gone->text).rank(rank_).peer(peer).remedy(kLookAtPeer);
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
      rank_, peer, pool_->describe(members_->familyRank(peer)), wait.secondsSinceStart());
}

std::vector<std::byte> Mailbox::receive(int peer, FrameKind kind, uint64_t tag,
                                        const WaitRule& rule) {
  const Wait wait(times_.limit, aborted_);
  const Clock::time_point begun = Clock::now();
  Reminder reminder(times_.reportInterval);
  const Key key(peer, kind, tag);
  Lock lock(mutex_);
  for (;;) {
    const bool aborted = isAborted(lock);
    // A rank that gave up may have sent its part before.
    throwIfCollectiveFailed(key);
    if (auto payload = take(key)) return std::move(*payload);
    throwIfGone(peer, rule.evenAfterFailure);
    throwIfEnded(aborted, rule, fmt::format("waiting for a message from rank {}", peer));
    if (wait.isExpired()) throw timeoutError(peer, "No message arrived");
    reportWait(peer, wait, reminder);
    // Without contact, nothing tells whether the peer is still there.
    if (peer != rank_ && Clock::now() >= begun + probeDelay()) trySeekContact(peer);
    changed_.wait_for(lock, std::max(wait.slice(), milliseconds(1)));
  }
}

void Mailbox::handleMessages(uint64_t tag, MessageHandler handler) {
  const Lock lock(mutex_);
  if (!handler) {
    handlers_.erase(tag);
    return;
  }
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
  const int there = members_->familyRank(peer);
  if (peerOf(peer).isGreeted) {
    if (pool_->unsentFrames(there) >= kMostUnsent) return false;
    post(peer, FrameKind::question, 0, question);
    return pool_->isConnected(there);
  }
  if (connects && !goneOf(peer)) seekContact(peer);
  return false;
}

std::string Mailbox::addressOfPeer(int peer) const {
  const Lock lock(mutex_);
  const Address* address = pool_->addressOf(members_->familyRank(peer));
  return address == nullptr ? "" : address->text();
}

// Says to a connected peer that this rank is in the communicator, and all news: what may be the
// cause of others first. Returns whether the peer is still connected.
bool Mailbox::greet(int peer) {
  if (peerOf(peer).isGreeted) return true;
  peerOf(peer).isGreeted = true;
  post(peer, FrameKind::greeting, 0, {});
  for (const auto& [number, failure] : failedCollectives_) {
    tellFailedCollective(peer, number, failure);
  }
  if (told_) tell(peer, *told_);
  if (earliest_ && earliest_->rank != peer) tell(peer, *earliest_);
  return peerOf(peer).isGreeted;
}

// Greets a peer, or starts to connect to it. Returns whether it is greeted.
bool Mailbox::seekContact(int peer) {
  const int there = members_->familyRank(peer);
  if (pool_->isConnected(there)) return greet(peer);
  pool_->approach(there);
  return false;
}

// For those who want to know whether the peer is there, but can do without.
void Mailbox::trySeekContact(int peer) {
  if (goneOf(peer)) return;
  try {
    seekContact(peer);
  } catch (const Error& error) {
    logInfo("rank {}: cannot connect to rank {} yet: {}", rank_, peer, error.what());
    pool_->postpone(members_->familyRank(peer));
  }
}

// Returns when `peer` is greeted, so that messages can be sent to it.
void Mailbox::awaitContact(int peer, const Wait& wait, const WaitRule& rule, Lock& lock) {
  Reminder reminder(times_.reportInterval);
  while (!peerOf(peer).isGreeted) {
    const bool aborted = isAborted(lock);
    if (!rule.evenAfterFailure) throwIfReported();
    if (const auto& gone = goneOf(peer)) {
      // Whoever was connected to it may know why it has ended, and tells in a moment.
      const std::optional<std::string> farewell = farewellOf(peer);
      if (farewell || Clock::now() - gone->since >= kGoneGrace) {
        throw Error(ErrorCode::remoteError, farewell.value_or(gone->text))
            .rank(rank_)
            .peer(peer)
            .remedy(kLookAtPeer);
      }
    }
    throwIfEnded(aborted, rule, fmt::format("connecting to rank {}", peer));
    if (wait.isExpired()) throw timeoutError(peer, "No connection was made");
    reportWait(peer, wait, reminder);
    if (seekContact(peer)) return;
    changed_.wait_for(lock, std::clamp(wait.slice(), milliseconds(1), kAttemptPause));
  }
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
    awaitContact(peer, wait, rule, lock);
    post(peer, kind, tag, payload);
    if (!peerOf(peer).isGreeted) {
      throw Error(ErrorCode::remoteError, "The peer closed its connection: it has ended or failed")
          .rank(rank_)
          .peer(peer)
          .remedy(kLookAtPeer);
    }
  } catch (const Error&) {
    // A peer that failed said why before it ended.
    pool_->readEverything();
    if (!rule.evenAfterFailure) throwIfReported();
    throw;
  }
}

void Mailbox::post(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload) {
  pool_->send(members_->familyRank(peer), {.secret = communicator_, .kind = kind, .tag = tag},
              payload);
}

std::vector<int> Mailbox::greetedPeers() const {
  std::vector<int> greeted;
  for (const auto& [peer, state] : peers_) {
    if (state.isGreeted) greeted.push_back(peer);
  }
  return greeted;
}

void Mailbox::deliver(int familyRank, Frame frame) {
  const int peer = members_->rankOf(familyRank);
  if (peer < 0) throw Error(ErrorCode::remoteError, "it is not in the communicator that it names");
  changed_.notify_all();
  Peer& state = peerOf(peer);
  const FrameKind kind = frame.header.kind;
  if (kind == FrameKind::absent) {
    return endContact(
        peer,
        fmt::format("{} is not in this communicator any more: there it was destroyed "
                    "or aborted, or could not be made",
                    describe(peer)),
        fmt::format("{} has ended this communicator without a last message", describe(peer)));
  }
  if (kind == FrameKind::greeting) {
    // Who was greeted by a rank that leaves would take its end for a death.
    if (leaving_) return post(peer, FrameKind::absent, 0, {});
    state.hasGreeted = true;
    state.gone.reset();
    greet(peer);
    return;
  }
  // Its greeting was not taken, or the contact has ended.
  if (!state.hasGreeted && (leaving_ || state.gone)) return;
  if (!state.hasGreeted) {
    throw Error(ErrorCode::remoteError, "it does not greet the communicator that it names");
  }
  if (kind == FrameKind::question) {
    if (!questionHandlers_.answer) return;
    const auto answer = questionHandlers_.answer(peer, frame.payload);
    if (!answer.empty() && answer.size() <= kLongestMessage) {
      post(peer, FrameKind::answer, 0, answer);
    }
    return;
  }
  if (kind == FrameKind::answer) {
    if (questionHandlers_.hear) questionHandlers_.hear(peer, std::move(frame.payload));
    return;
  }
  if (kind == FrameKind::message) {
    if (const auto handler = handlers_.find(frame.header.tag); handler != handlers_.end()) {
      handler->second(peer, std::move(frame.payload));
      return;
    }
  }
  if (kind == FrameKind::message || kind == FrameKind::collective) {
    inbox_[Key(peer, kind, frame.header.tag)].push_back(std::move(frame.payload));
    return;
  }
  hearNews(peer, frame);
}

void Mailbox::lose(int familyRank) {
  const int peer = members_->rankOf(familyRank);
  if (peer < 0) return;
  endContact(
      peer, fmt::format("{} closed its connection: it has ended or failed", describe(peer)),
      fmt::format(
          "{} has died: its connection to rank {} was closed without a last message (its process "
          "was killed or has crashed, or the connection was cut)",
          describe(peer), rank_));
}

void Mailbox::endContact(int peer, std::string text, std::string_view deathText) {
  Peer& state = peerOf(peer);
  if (!state.isGreeted) return;
  state.isGreeted = false;
  const bool hadGreeted = std::exchange(state.hasGreeted, false);
  if (!state.gone) {
    state.gone = ConnectionPool::Gone{Clock::now(), state.farewell.value_or(std::move(text))};
  }
  if (hadGreeted && !state.farewell && !leaving_) {
    hearFailure({peer, std::string(deathText), true});
  }
  changed_.notify_all();
}

void Mailbox::learnAddresses(AddressTable addresses) {
  const Lock lock(mutex_);
  pool_->learnAddresses(std::move(addresses));
}

std::unique_ptr<Seat> Mailbox::takeSeat(uint64_t number, int color) const {
  return std::make_unique<Seat>(pool_, secretOfChild(communicator_, number, color));
}

const Mailbox::Peer& Mailbox::peerOf(int peer) const {
  static const Peer nobody;
  const auto found = peers_.find(peer);
  return found == peers_.end() ? nobody : found->second;
}

bool Mailbox::reaches(int peer) const {
  const Lock lock(mutex_);
  const int there = members_->familyRank(peer);
  return pool_->addressOf(there) != nullptr || pool_->isConnected(there);
}

}  // namespace unisono::bootstrap
