// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/connection_pool.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/system.h"
#include "bootstrap/peer_watcher.h"

namespace unisono::bootstrap {
namespace {

// A peer that closes so many connections in a row without a welcome does not belong to this job.
constexpr int kMaxRejections = 100;

}  // namespace

ConnectionPool::PeerSocket::PeerSocket(Socket opened, const Secret& secret)
    : socket(std::move(opened)),
      reader(secret, {{FrameKind::hello, kLongestName},
                      {FrameKind::welcome, kLongestName},
                      {FrameKind::greeting, 0},
                      {FrameKind::absent, 0},
                      {FrameKind::message, kLongestMessage},
                      {FrameKind::collective, kLongestCollective},
                      {FrameKind::failure, kLongestText},
                      {FrameKind::death, kLongestText},
                      {FrameKind::departure, sizeof(DepartureCounts) + kLongestText},
                      {FrameKind::failedCollective, sizeof(uint32_t) + kLongestText},
                      {FrameKind::question, kLongestQuestion},
                      {FrameKind::answer, kLongestMessage}}) {}

ConnectionPool::ConnectionPool(int rank, Membership membership)
    : rank_(rank),
      ranks_(membership.ranks),
      neighbours_(std::move(membership.neighbours)),
      localize_(std::move(membership.localize)),
      session_(membership.session),
      name_(processName().substr(0, kLongestName)),
      reactor_(Reactor::ofThisProcess()),
      listener_(std::move(membership.listener)) {
  number_ = reactor_.add(*this);
}

void ConnectionPool::start() {
  const Lock lock(mutex_);
  reactor_.watch(number_, listener_.descriptor(), Poller::Interest::read);
}

ConnectionPool::~ConnectionPool() {
  reactor_.remove(number_);
  // Closing a connection with unread data resets it, which could lose what was sent last.
  const std::map<int, PeerSocketPointer> connections = connections_;
  for (const auto& [descriptor, connection] : connections) {
    readFrom(connection);
    reactor_.forget(descriptor);
  }
  reactor_.forget(listener_.descriptor());
}

void ConnectionPool::add(const Secret& communicator, User& user) {
  users_.insert_or_assign(communicator[1], &user);
}

void ConnectionPool::remove(const Secret& communicator, const std::function<bool()>& aborted,
                            Lock& lock) {
  const Clock::time_point deadline = Clock::now() + kDrainTimeout;
  users_.erase(communicator[1]);
  if (!users_.empty()) return;
  closing_ = true;
  while (hasUnsent() && Clock::now() < deadline) {
    lock.unlock();
    const bool isAborted = aborted && aborted();
    lock.lock();
    if (isAborted) return;
    if (hasUnsent()) drained_.wait_for(lock, Wait::kSlice);
  }
}

void ConnectionPool::wakeUsers() {
  for (const auto& [communicator, user] : users_) user->wake();
}

void ConnectionPool::serve(int descriptor) {
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
}

void ConnectionPool::tick() {
  const Lock lock(mutex_);
  while (!strangers_.empty() && strangers_.front()->deadline <= Clock::now()) {
    refuse(PeerSocketPointer(strangers_.front()), "it sent nothing for too long");
  }
  for (const auto& [communicator, user] : users_) user->tick();
  if (!paused_) return;
  paused_.reset();
  reactor_.watch(number_, listener_.descriptor(), Poller::Interest::read);
}

void ConnectionPool::acceptAll() {
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
void ConnectionPool::makeRoomForStranger() {
  if (strangers_.empty()) return;
  const PeerSocketPointer oldest = strangers_.front();
  readFrom(oldest);
  if (oldest->stranger) refuse(oldest, "there are too many connections that send nothing");
}

void ConnectionPool::readEverything() {
  acceptAll();
  const std::map<int, PeerSocketPointer> connections = connections_;
  for (const auto& [descriptor, connection] : connections) {
    if (connection->stage != Stage::connecting) readFrom(connection);
  }
}

void ConnectionPool::readFrom(const PeerSocketPointer& connection) {
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

void ConnectionPool::deliver(const PeerSocketPointer& connection, Frame frame) {
  const FrameHeader& header = frame.header;
  if (connection->stranger) {
    if (closing_) return drop(connection);
    if (header.kind != FrameKind::hello) {
      throw Error(ErrorCode::remoteError,
                  "it sent no greeting first; another program may use this port");
    }
    if (header.sender >= static_cast<uint32_t>(ranks_) ||
        header.sender == static_cast<uint32_t>(rank_)) {
      throw Error(ErrorCode::remoteError, fmt::format("it claims to be rank {}", header.sender));
    }
    peerOf(static_cast<int>(header.sender)).name = frame.text();
    identify(connection, static_cast<int>(header.sender));
    return;
  }
  const int peer = *connection->peer;
  if (header.sender != static_cast<uint32_t>(peer)) {
    throw Error(ErrorCode::remoteError,
                fmt::format("a message of rank {} came from rank {}", header.sender, peer));
  }
  if (header.kind == FrameKind::hello || header.kind == FrameKind::welcome) {
    if (header.kind != FrameKind::welcome || connection->stage != Stage::greeting) {
      throw Error(ErrorCode::remoteError, "it sent a second greeting");
    }
    peerOf(peer).name = frame.text();
    welcomed(connection);
    return;
  }
  if (connection->stage != Stage::open) {
    throw Error(ErrorCode::remoteError,
                "it sent no greeting first; another program may use this port");
  }
  if (const auto user = users_.find(header.secret[1]); user != users_.end()) {
    user->second->deliver(peer, std::move(frame));
  } else if (header.kind == FrameKind::greeting && !closing_) {
    send(peer, {.secret = header.secret, .kind = FrameKind::absent}, {});
  }
}

// A stranger has shown that it is a rank.
void ConnectionPool::identify(const PeerSocketPointer& connection, int sender) {
  connection->stranger.reset();
  std::erase(strangers_, connection);
  connection->peer = sender;
  introduce(connection, FrameKind::welcome);
  if (connection->stage != Stage::closed) welcomed(connection);
}

void ConnectionPool::introduce(const PeerSocketPointer& connection, FrameKind kind) {
  enqueue(connection, {.secret = session_, .kind = kind}, std::as_bytes(std::span(name_)));
}

void ConnectionPool::welcomed(const PeerSocketPointer& connection) {
  connection->stage = Stage::open;
  connection->reader.acceptFamily();
  Peer& state = peerOf(*connection->peer);
  state.openConnections++;
  state.gone.reset();
  state.rejections = 0;
  if (state.attempt == connection) state.attempt.reset();
  if (!state.out) state.out = connection;
  wakeUsers();
}

void ConnectionPool::refuse(const PeerSocketPointer& connection, std::string_view reason) {
  if (connection->stage == Stage::closed) return;
  logWarn("rank {}: refused the connection from {}: {}", rank_,
          connection->socket.peerAddress().text(), reason);
  drop(connection);
}

void ConnectionPool::drop(const PeerSocketPointer& connection) {
  if (connection->stage == Stage::closed) return;
  const PeerSocketPointer keep = connection;
  const Stage before = std::exchange(keep->stage, Stage::closed);
  keep->unsent.clear();
  reactor_.forget(keep->socket.descriptor());
  connections_.erase(keep->socket.descriptor());
  keep->stranger.reset();
  std::erase(strangers_, keep);
  keep->socket.close();
  drained_.notify_all();
  if (!keep->peer) return;
  const int peer = *keep->peer;
  Peer& state = peerOf(peer);
  if (state.out == keep) state.out.reset();
  if (before == Stage::open && --state.openConnections == 0) {
    markGone(peer, fmt::format("The peer ({}) closed its connection: it has ended or failed",
                               describe(peer)));
    for (const auto& [communicator, user] : users_) user->lose(peer);
  } else if (before == Stage::open && !state.out) {
    const auto other = std::ranges::find_if(connections_, [&](const auto& entry) {
      return entry.second->stage == Stage::open && entry.second->peer == peer;
    });
    if (other != connections_.end()) state.out = other->second;
  }
  wakeUsers();
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

void ConnectionPool::markGone(int peer, std::string text) {
  Peer& state = peerOf(peer);
  if (state.gone || state.openConnections > 0) return;
  state.gone = Gone{Clock::now(), std::move(text)};
}

void ConnectionPool::approach(int peer) {
  Peer& state = peerOf(peer);
  if (state.out || state.attempt || state.gone || Clock::now() < state.nextAttempt) return;
  if (addressOf(peer) == nullptr) return;
  startAttempt(peer);
}

void ConnectionPool::postpone(int peer) {
  peerOf(peer).nextAttempt = Clock::now() + kReportInterval;
}

// Starts to connect to a peer; the reactor goes on with it.
void ConnectionPool::startAttempt(int peer) {
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

void ConnectionPool::finishConnecting(const PeerSocketPointer& connection) {
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
  wakeUsers();
}

bool ConnectionPool::isConnected(int peer) const {
  return peerOf(peer).out != nullptr;
}

void ConnectionPool::send(int peer, const FrameHeader& header, std::span<const std::byte> payload) {
  const PeerSocketPointer connection = peerOf(peer).out;
  if (connection != nullptr) enqueue(connection, header, payload);
}

size_t ConnectionPool::unsentFrames(int peer) const {
  const PeerSocketPointer& connection = peerOf(peer).out;
  return connection == nullptr ? 0 : connection->unsent.size();
}

void ConnectionPool::enqueue(const PeerSocketPointer& connection, const FrameHeader& header,
                             std::span<const std::byte> payload) {
  FrameHeader complete = header;
  complete.sender = static_cast<uint32_t>(rank_);
  connection->unsent.push_back(encodeFrame(complete, payload));
  // The rest of an earlier frame is written first, by the reactor's thread.
  if (connection->unsent.size() == 1) writeUnsent(connection);
}

void ConnectionPool::writeUnsent(const PeerSocketPointer& connection) {
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
  if (!watchesWrite) drained_.notify_all();
}

bool ConnectionPool::hasUnsent() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const auto& entry) { return !entry.second->unsent.empty(); });
}

const std::optional<ConnectionPool::Gone>& ConnectionPool::goneOf(int peer) const {
  return peerOf(peer).gone;
}

void ConnectionPool::learnAddresses(AddressTable addresses) {
  addresses_ = std::move(addresses);
  wakeUsers();
}

const ConnectionPool::Peer& ConnectionPool::peerOf(int peer) const {
  static const Peer nobody;
  const auto found = peers_.find(peer);
  return found == peers_.end() ? nobody : found->second;
}

const Address* ConnectionPool::addressOf(int peer) const {
  if (addresses_ != nullptr) return &(*addresses_)[static_cast<size_t>(peer)];
  const auto found = neighbours_.find(peer);
  return found == neighbours_.end() ? nullptr : &found->second;
}

std::string ConnectionPool::addressText(int peer) const {
  const Address* address = addressOf(peer);
  return address == nullptr ? "which has not connected yet" : address->text();
}

std::string ConnectionPool::describe(int peer) const {
  const std::string& name = peerOf(peer).name;
  return name.empty() ? addressText(peer) : name;
}

Seat::Seat(std::shared_ptr<ConnectionPool> pool, const Secret& communicator)
    : pool_(std::move(pool)), communicator_(communicator) {
  const ConnectionPool::Lock lock(pool_->mutex());
  pool_->add(communicator_, *this);
}

Seat::~Seat() {
  if (isTaken_) return;
  ConnectionPool::Lock lock(pool_->mutex());
  // Sending may read what has arrived by now. The pool answers those who come later.
  while (!early_.empty()) {
    for (const auto& [peer, frame] : std::exchange(early_, {})) {
      if (!frame || frame->header.kind != FrameKind::greeting) continue;
      pool_->send(peer, {.secret = communicator_, .kind = FrameKind::absent}, {});
    }
  }
  pool_->remove(communicator_, {}, lock);
}

void Seat::handOver(ConnectionPool::User& user) {
  isTaken_ = true;
  pool_->add(communicator_, user);
  for (auto& [peer, frame] : early_) {
    try {
      if (frame) {
        user.deliver(peer, std::move(*frame));
      } else {
        user.lose(peer);
      }
    } catch (const Error& error) {
      logWarn("rank {}: refused a message of {}: {}", pool_->rank(), pool_->describe(peer),
              error.what());
    }
  }
  early_.clear();
}

void Seat::deliver(int peer, Frame frame) {
  early_.emplace_back(peer, std::move(frame));
}

void Seat::lose(int peer) {
  early_.emplace_back(peer, std::nullopt);
}

}  // namespace unisono::bootstrap
