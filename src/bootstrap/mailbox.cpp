// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/mailbox.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/system.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// A peer may have opened a connection, sent and ended before we accepted it, while we already know
// that another connection with it has ended. Only after this time does it count as gone.
constexpr milliseconds kGoneGrace{200};
// Telling a rank of a failure must not hold up reporting it here.
constexpr milliseconds kFailureTimeout{1000};
// A receiver that hears nothing for this time connects to the sender, which shows whether it lives:
// 500 ms, or more where hundreds of ranks of this process wait. The sender may be one of them, and
// the connection costs two descriptors.
milliseconds probeDelay() {
  return 10 * Wait::longestSlice();
}
// Ranks usually leave together, and then nobody needs another uplink.
constexpr milliseconds kUplinkDelay{500};
// The pause after a failed attempt to connect.
constexpr milliseconds kConnectPause{20};
// A peer that closes so many connections in a row without a welcome does not belong to this job.
constexpr int kMaxRejections = 100;

constexpr const char* kLookAtPeer = "Look for the first error in the output of that rank";

}  // namespace

Mailbox::PeerSocket::PeerSocket(Socket opened, const Secret& secret)
    : socket(std::move(opened)),
      reader(secret, {{FrameKind::hello, kLongestName},
                      {FrameKind::welcome, kLongestName},
                      {FrameKind::message, kLongestMessage},
                      {FrameKind::collective, kLongestCollective},
                      {FrameKind::failure, kLongestText},
                      {FrameKind::death, kLongestText},
                      {FrameKind::departure, sizeof(DepartureCounts) + kLongestText},
                      {FrameKind::failedCollective, sizeof(uint32_t) + kLongestText}}) {}

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

void Mailbox::serve(int descriptor) {
  const Lock lock(mutex_);
  try {
    if (descriptor == listener_.descriptor()) {
      acceptAll();
    } else if (const auto found = connections_.find(descriptor); found != connections_.end()) {
      const PeerSocketPointer connection = found->second;
      if (connection->stage == Stage::connecting) {
        finishConnecting(connection);
      } else {
        writeUnsent(connection);
        readFrom(connection);
      }
    }
  } catch (const std::exception& error) {
    logWarn("rank {}: {}", rank_, error.what());
  }
  changed_.notify_all();
}

void Mailbox::tick() {
  const Lock lock(mutex_);
  while (!strangers_.empty() && strangers_.front()->deadline <= Clock::now()) {
    refuse(PeerSocketPointer(strangers_.front()), "it sent nothing for too long");
  }
  seekUplink();
  if (!paused_) return;
  paused_.reset();
  reactor_.watch(number_, listener_.descriptor(), Poller::Interest::read);
}

void Mailbox::acceptAll() {
  for (;;) {
    std::optional<Socket> socket;
    try {
      socket = listener_.accept();
    } catch (const Error& error) {
      if (!strangers_.empty()) {
        makeRoomForStranger();
        continue;
      }
      // The queue stays as it is until the next tick.
      if (paused_) return;
      logWarn("rank {}: {}", rank_, error.what());
      reactor_.forget(listener_.descriptor());
      paused_.emplace();
      return;
    }
    if (!socket) return;
    if (Stranger::count() >= Stranger::max()) makeRoomForStranger();
    auto connection = std::make_shared<PeerSocket>(std::move(*socket), session_);
    connection->stranger.emplace();
    connection->deadline = Clock::now() + kStrangerTimeout;
    const int descriptor = connection->socket.descriptor();
    reactor_.watch(number_, descriptor, Poller::Interest::read);
    connections_.insert_or_assign(descriptor, connection);
    strangers_.push_back(connection);
    readFrom(connection);
  }
}

// Closes the oldest stranger of this listener, unless it proves to be a rank.
void Mailbox::makeRoomForStranger() {
  if (strangers_.empty()) return;
  const PeerSocketPointer oldest = strangers_.front();
  readFrom(oldest);
  if (oldest->stranger) refuse(oldest, "there are too many connections that send nothing");
}

// Reads what has arrived but was not noticed by the reactor's thread yet.
void Mailbox::readEverything() {
  acceptAll();
  const std::map<int, PeerSocketPointer> connections = connections_;
  for (const auto& [descriptor, connection] : connections) {
    if (connection->stage != Stage::connecting) readFrom(connection);
  }
  changed_.notify_all();
}

void Mailbox::readFrom(const PeerSocketPointer& connection) {
  try {
    while (connection->stage == Stage::greeting || connection->stage == Stage::open) {
      const FrameReader::Status status = connection->reader.read(connection->socket);
      if (status == FrameReader::Status::incomplete) return;
      if (status == FrameReader::Status::complete) {
        deliver(connection, connection->reader.take());
      } else if (connection->stranger) {
        refuse(connection, "it closed the connection before it sent anything");
      } else {
        drop(connection);
      }
    }
  } catch (const Error& error) {
    refuse(connection, error.what());
  }
}

void Mailbox::deliver(const PeerSocketPointer& connection, Frame frame) {
  const FrameHeader& header = frame.header;
  if (connection->stranger) {
    // Who was welcomed by a rank that has left would take its end for a death.
    if (left_) return drop(connection);
    if (header.kind != FrameKind::hello) {
      throw Error(ErrorCode::remoteError, "it does not introduce itself");
    }
    if (header.sender >= static_cast<uint32_t>(ranks_) ||
        header.sender == static_cast<uint32_t>(rank_)) {
      throw Error(ErrorCode::remoteError, fmt::format("it claims to be rank {}", header.sender));
    }
    peerOf(static_cast<int>(header.sender)).name = frame.text();
    identify(connection, static_cast<int>(header.sender));
    return;
  }
  if (header.sender != static_cast<uint32_t>(*connection->peer)) {
    throw Error(ErrorCode::remoteError, fmt::format("a message of rank {} came from rank {}",
                                                    header.sender, *connection->peer));
  }
  if (header.kind == FrameKind::hello || header.kind == FrameKind::welcome) {
    if (header.kind != FrameKind::welcome || connection->stage != Stage::greeting) {
      throw Error(ErrorCode::remoteError, "it introduces itself twice");
    }
    peerOf(*connection->peer).name = frame.text();
    welcomed(connection);
    return;
  }
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
  const bool isNews = header.kind == FrameKind::failure || header.kind == FrameKind::death ||
                      header.kind == FrameKind::departure;
  if (isNews) {
    if (header.tag >= static_cast<uint64_t>(ranks_)) {
      throw Error(ErrorCode::remoteError, fmt::format("it tells of rank {}", header.tag));
    }
    const int about = static_cast<int>(header.tag);
    if (header.kind != FrameKind::departure) {
      hearFailure({about, frame.text(), header.kind == FrameKind::death});
      return;
    }
    Departure departure = {.rank = about, .text = {}};
    if (frame.payload.size() < sizeof(departure.counts)) {
      throw Error(ErrorCode::remoteError, "its farewell is too short");
    }
    std::memcpy(&departure.counts, frame.payload.data(), sizeof(departure.counts));
    departure.text = frame.text().substr(sizeof(departure.counts));
    hearDeparture(std::move(departure), *connection->peer);
    return;
  }
  if (header.kind == FrameKind::message) {
    if (const auto handler = handlers_.find(header.tag); handler != handlers_.end()) {
      handler->second(*connection->peer, std::move(frame.payload));
      return;
    }
  }
  inbox_[Key(*connection->peer, header.kind, header.tag)].push_back(std::move(frame.payload));
}

// A stranger has shown that it is a rank.
void Mailbox::identify(const PeerSocketPointer& connection, int sender) {
  connection->stranger.reset();
  std::erase(strangers_, connection);
  connection->peer = sender;
  introduce(connection, FrameKind::welcome);
  if (connection->stage != Stage::closed) welcomed(connection);
}

// Says who this rank is, and all news: what may be the cause of others first.
void Mailbox::introduce(const PeerSocketPointer& connection, FrameKind kind) {
  enqueue(connection, {.kind = kind}, std::as_bytes(std::span(name_)));
  for (const auto& [number, failure] : failedCollectives_) {
    tellFailedCollective(connection, number, failure);
  }
  if (told_) tell(connection, *told_);
  if (earliest_ && earliest_->rank != *connection->peer) tell(connection, *earliest_);
}

void Mailbox::welcomed(const PeerSocketPointer& connection) {
  connection->stage = Stage::open;
  Peer& state = peerOf(*connection->peer);
  state.openConnections++;
  state.goneSince.reset();
  state.rejections = 0;
  if (state.attempt == connection) state.attempt.reset();
  if (!state.out) state.out = connection;
  changed_.notify_all();
}

void Mailbox::refuse(const PeerSocketPointer& connection, std::string_view reason) {
  if (connection->stage == Stage::closed) return;
  logWarn("rank {}: refused the connection from {}: {}", rank_,
          connection->socket.peerAddress().text(), reason);
  drop(connection);
}

void Mailbox::drop(const PeerSocketPointer& connection) {
  if (connection->stage == Stage::closed) return;
  const PeerSocketPointer keep = connection;
  const Stage before = std::exchange(keep->stage, Stage::closed);
  keep->unsent.clear();
  reactor_.forget(keep->socket.descriptor());
  connections_.erase(keep->socket.descriptor());
  keep->stranger.reset();
  std::erase(strangers_, keep);
  keep->socket.close();
  changed_.notify_all();
  if (!keep->peer) return;
  const int peer = *keep->peer;
  Peer& state = peerOf(peer);
  if (before == Stage::open && --state.openConnections == 0) {
    markGone(peer, state.farewell.value_or(fmt::format(
                       "{} closed its connection: it has ended or failed", describe(peer))));
    if (!state.farewell && !leaving_) {
      hearFailure({peer,
                   fmt::format("{} has died: its connection to rank {} was closed without a "
                               "farewell (its process was killed or has crashed, or the connection "
                               "was cut)",
                               describe(peer), rank_),
                   true});
    }
  }
  if (state.attempt != keep) return;
  // The peer has closed the connection before its welcome. If it has ended, the next attempt to
  // connect shows that.
  state.attempt.reset();
  state.nextAttempt = Clock::now() + kConnectPause;
  if (++state.rejections >= kMaxRejections) {
    markGone(peer, fmt::format("The process at {} accepts connections and closes them again: it is "
                               "not a rank of this communicator",
                               addressText(peer)));
  }
}

void Mailbox::markGone(int peer, std::string text) {
  Peer& state = peerOf(peer);
  if (state.goneSince || state.openConnections > 0) return;
  state.goneSince = Clock::now();
  state.goneText = std::move(text);
}

// Starts to connect to a peer; the reactor goes on with it.
void Mailbox::startAttempt(int peer) {
  const Address& address = *addressOf(peer);
  auto connection = std::make_shared<PeerSocket>(
      Socket::startConnecting(localize_ ? localize_(address) : address), session_);
  connection->stage = Stage::connecting;
  connection->peer = peer;
  const int descriptor = connection->socket.descriptor();
  reactor_.watch(number_, descriptor, Poller::Interest::write);
  connections_.insert_or_assign(descriptor, connection);
  peerOf(peer).attempt = connection;
}

void Mailbox::finishConnecting(const PeerSocketPointer& connection) {
  const int peer = *connection->peer;
  const int error = connection->socket.finishConnecting();
  if (error == 0) {
    connection->stage = Stage::greeting;
    reactor_.setInterest(number_, connection->socket.descriptor(), Poller::Interest::read);
    introduce(connection, FrameKind::hello);
    return;
  }
  Peer& state = peerOf(peer);
  state.attempt.reset();
  state.nextAttempt = Clock::now() + kConnectPause;
  drop(connection);
  // A full queue of the peer's listener, which takes some time to empty, shows as one of these.
  if (error == ETIMEDOUT || error == ECONNRESET || error == EAGAIN) return;
  std::string text =
      fmt::format("Cannot connect to {}: {}", addressText(peer), std::strerror(error));
  if (error == ECONNREFUSED) {
    text += ": that rank has ended or failed";
  } else {
    text += ". Check the network between the machines, and NCCL_SOCKET_IFNAME";
  }
  markGone(peer, std::move(text));
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

// The other side may already take a connection for open when this rank has said hello.
bool Mailbox::isIntroduced(const PeerSocket& connection) {
  return connection.stage == Stage::open ||
         (connection.stage == Stage::greeting && connection.peer.has_value());
}

std::vector<Mailbox::PeerSocketPointer> Mailbox::introducedConnections() const {
  std::vector<PeerSocketPointer> introduced;
  for (const auto& [descriptor, connection] : connections_) {
    if (isIntroduced(*connection)) introduced.push_back(connection);
  }
  return introduced;
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

void Mailbox::enqueue(const PeerSocketPointer& connection, const FrameHeader& header,
                      std::span<const std::byte> payload) {
  FrameHeader complete = header;
  complete.secret = session_;
  complete.sender = static_cast<uint32_t>(rank_);
  connection->unsent.push_back(encodeFrame(complete, payload));
  // The rest of an earlier frame is written first, by the reactor's thread.
  if (connection->unsent.size() == 1) writeUnsent(connection);
}

void Mailbox::writeUnsent(const PeerSocketPointer& connection) {
  while (connection->stage != Stage::closed && !connection->unsent.empty()) {
    const auto rest = std::span(connection->unsent.front()).subspan(connection->unsentOffset);
    const Transfer transfer = connection->socket.write(rest);
    if (transfer.closed) {
      // What the peer sent before it closed the connection can still be read.
      connection->unsent.clear();
      readFrom(connection);
      drop(connection);
      return;
    }
    if (transfer.bytes == 0) break;
    connection->unsentOffset += transfer.bytes;
    if (connection->unsentOffset < connection->unsent.front().size()) continue;
    connection->unsent.pop_front();
    connection->unsentOffset = 0;
  }
  if (connection->stage == Stage::closed) return;
  const bool watchesWrite = !connection->unsent.empty();
  if (watchesWrite == connection->watchesWrite) return;
  connection->watchesWrite = watchesWrite;
  reactor_.setInterest(number_, connection->socket.descriptor(),
                       watchesWrite ? Poller::Interest::both : Poller::Interest::read);
  if (!watchesWrite) changed_.notify_all();
}

bool Mailbox::hasUnsent() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const auto& entry) { return !entry.second->unsent.empty(); });
}

}  // namespace unisono::bootstrap
