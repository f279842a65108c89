// SPDX-License-Identifier: Apache-2.0
// The connections of a mailbox: how they are opened, accepted, read, written and closed.
#include "bootstrap/mailbox.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace unisono::bootstrap {
namespace {

// A peer that closes so many connections in a row without a welcome does not belong to this job.
constexpr int kMaxRejections = 100;

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
                      {FrameKind::failedCollective, sizeof(uint32_t) + kLongestText},
                      {FrameKind::question, kLongestQuestion},
                      {FrameKind::answer, kLongestMessage}}) {}

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
  if (header.kind == FrameKind::question) {
    if (!questionHandlers_.answer) return;
    const auto answer = questionHandlers_.answer(*connection->peer, frame.payload);
    const bool canTell = !answer.empty() && answer.size() <= kLongestMessage;
    if (canTell && isIntroduced(*connection)) {
      enqueue(connection, {.kind = FrameKind::answer}, answer);
    }
    return;
  }
  if (header.kind == FrameKind::answer) {
    if (questionHandlers_.hear) {
      questionHandlers_.hear(*connection->peer, std::move(frame.payload));
    }
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
