#include "bootstrap/mailbox.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "bootstrap/root_service.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// A peer may have opened a connection, sent and left before we accepted it, while we already know
// that another connection with it has ended. Only after this time is it called gone.
constexpr milliseconds kGoneGrace{200};
// Telling a rank of a failure must not hold up reporting it here.
constexpr milliseconds kFailureTimeout{1000};

}  // namespace

Mailbox::Connection::Connection(Socket connected, const Secret& secret, milliseconds timeout)
    : socket(std::move(connected)),
      reader(secret, {{FrameKind::message, kLongestMessage},
                      {FrameKind::collective, kLongestCollective},
                      {FrameKind::failure, kLongestText}}),
      deadline(Clock::now() + std::min<milliseconds>(kStrangerTimeout, timeout)) {}

Mailbox::Mailbox(int rank, Membership membership, milliseconds timeout,
                 std::function<bool()> aborted)
    : rank_(rank),
      addresses_(std::move(membership.addresses)),
      session_(membership.session),
      timeout_(timeout),
      aborted_(std::move(aborted)),
      listener_(std::move(membership.listener)),
      peers_(addresses_.size()) {
  poller_.add(listener_.descriptor());
}

Mailbox::~Mailbox() {
  const Clock::time_point deadline = Clock::now() + kDrainTimeout;
  Lock lock(mutex_);
  while (!unsentConnections().empty() && Clock::now() < deadline && !(aborted_ && aborted_()))
    changed_.wait_for(lock, Wait::kSlice);
  closing_ = true;
  lock.unlock();
  if (writer_.joinable()) writer_.join();
  // Closing with unread data resets a connection, which would take what we sent last with it.
  const std::map<int, ConnectionPointer> connections = connections_;
  for (const auto& [descriptor, connection] : connections) readFrom(connection);
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
  if (!failure_) return;
  throw Error(ErrorCode::remoteError,
              fmt::format("Rank {} reports: {}", failure_->first, failure_->second))
      .rank(rank_);
}

void Mailbox::throwIfHopeless(int peer, Clock::time_point now) const {
  throwIfReported();
  const Peer& state = peers_[static_cast<size_t>(peer)];
  if (state.goneSince && now - *state.goneSince >= kGoneGrace) {
    throw Error(ErrorCode::remoteError, "The peer closed its connection: it ended or failed")
        .rank(rank_)
        .peer(peer)
        .remedy("Look for the first error in the output of that rank");
  }
}

std::vector<std::byte> Mailbox::receive(int peer, FrameKind kind, uint64_t tag) {
  const Wait wait(timeout_, aborted_);
  const Key key(peer, kind, tag);
  Lock lock(mutex_);
  for (;;) {
    if (auto payload = take(key)) return std::move(*payload);
    throwIfHopeless(peer, Clock::now());
    wait.throwIfAborted("waiting for a message of another rank");
    if (wait.expired()) {
      throw Error(ErrorCode::timeout, fmt::format("No message came within {} s",
                                                  std::chrono::duration<double>(timeout_).count()))
          .rank(rank_)
          .peer(peer)
          .remedy(
              "See what that rank does: it may hang, or have left out a call that this one made");
    }
    makeProgress(lock, wait);
  }
}

// Reads what has arrived for any thread, or waits while another thread does. Called and returns
// with the lock held.
void Mailbox::makeProgress(Lock& lock, const Wait& wait) {
  if (polling_) {
    changed_.wait_for(lock, std::max(wait.slice(), milliseconds(1)));
    return;
  }
  polling_ = true;
  lock.unlock();
  const std::vector<int> ready = poller_.wait(wait.slice());
  lock.lock();
  polling_ = false;
  try {
    for (int descriptor : ready) {
      if (descriptor == listener_.descriptor()) {
        acceptAll();
        continue;
      }
      auto found = connections_.find(descriptor);
      if (found != connections_.end()) readFrom(ConnectionPointer(found->second));
    }
    expireStrangers();
  } catch (...) {
    changed_.notify_all();
    throw;
  }
  changed_.notify_all();
}

void Mailbox::acceptAll() {
  while (std::optional<Socket> socket = listener_.accept()) {
    if (strangers_.size() >= kMostStrangers)
      refuse(ConnectionPointer(strangers_.front()), "too many connections that say nothing");
    auto connection = std::make_shared<Connection>(std::move(*socket), session_, timeout_);
    add(connection);
    strangers_.push_back(connection);
    readFrom(connection);
  }
}

void Mailbox::readFrom(const ConnectionPointer& connection) {
  try {
    while (connection->open) {
      const FrameReader::Status status = connection->reader.read(connection->socket);
      if (status == FrameReader::Status::incomplete) return;
      if (status == FrameReader::Status::complete) {
        deliver(connection, connection->reader.take());
      } else if (connection->peer) {
        drop(connection);
      } else {
        refuse(connection, "it closed the connection before it said who it is");
      }
    }
  } catch (const Error& error) {
    refuse(connection, error.what());
  }
}

void Mailbox::deliver(const ConnectionPointer& connection, Frame frame) {
  const auto sender = static_cast<int>(frame.header.sender);
  if (!connection->peer) {
    if (frame.header.sender >= peers_.size() || sender == rank_)
      throw Error(ErrorCode::remoteError, fmt::format("it claims to be rank {}", sender));
    introduce(connection, sender);
    std::erase(strangers_, connection);
  }
  if (sender != *connection->peer) {
    throw Error(ErrorCode::remoteError,
                fmt::format("a message of rank {} came from rank {}", sender, *connection->peer));
  }
  if (frame.header.kind == FrameKind::failure) {
    if (!failure_) failure_.emplace(sender, frame.text());
    return;
  }
  inbox_[Key(sender, frame.header.kind, frame.header.tag)].push_back(std::move(frame.payload));
}

void Mailbox::refuse(const ConnectionPointer& connection, std::string_view reason) {
  logWarn("rank {}: refused the connection from {}: {}", rank_,
          connection->socket.peerAddress().text(), reason);
  drop(connection);
}

// The descriptor stays until the last holder of the pointer lets go: the writer may be polling it.
void Mailbox::drop(const ConnectionPointer& connection) {
  if (!connection->open) return;
  const ConnectionPointer keep = connection;
  connection->open = false;
  connection->unsent.clear();
  poller_.remove(connection->socket.descriptor());
  connection->socket.shutdown();
  std::erase(strangers_, connection);
  if (connection->peer) {
    Peer& peer = peers_[static_cast<size_t>(*connection->peer)];
    if (--peer.openConnections == 0) peer.goneSince = Clock::now();
  }
  connections_.erase(keep->socket.descriptor());
}

void Mailbox::expireStrangers() {
  while (!strangers_.empty() && strangers_.front()->deadline <= Clock::now())
    refuse(ConnectionPointer(strangers_.front()), "it said nothing for too long");
}

void Mailbox::add(const ConnectionPointer& connection) {
  poller_.add(connection->socket.descriptor());
  connections_.insert_or_assign(connection->socket.descriptor(), connection);
}

void Mailbox::introduce(const ConnectionPointer& connection, int peer) {
  connection->peer = peer;
  Peer& state = peers_[static_cast<size_t>(peer)];
  state.openConnections++;
  state.goneSince.reset();
  if (!state.out) state.out = connection;
}

Mailbox::ConnectionPointer Mailbox::connectTo(int peer, milliseconds limit) const {
  const Wait wait(limit, aborted_);
  const Address& address = addresses_[static_cast<size_t>(peer)];
  int error = 0;
  std::optional<Socket> socket = Socket::connect(address, wait, error);
  if (!socket) {
    throw Error(error == ETIMEDOUT ? ErrorCode::timeout : ErrorCode::remoteError,
                fmt::format("Cannot connect to {}: {}", address.text(), std::strerror(error)))
        .rank(rank_)
        .peer(peer)
        .remedy(error == ECONNREFUSED
                    ? "That rank has ended or failed: look for the first error in its output"
                    : "Check the network between the machines, and NCCL_SOCKET_IFNAME");
  }
  return std::make_shared<Connection>(std::move(*socket), session_, timeout_);
}

Mailbox::ConnectionPointer Mailbox::connectionTo(int peer, milliseconds limit, Lock& lock) {
  Peer& state = peers_[static_cast<size_t>(peer)];
  // The thread that connects does so under a limit of its own.
  while (state.connecting) changed_.wait_for(lock, Wait::kSlice);
  if (state.out) return state.out;
  state.connecting = true;
  lock.unlock();
  ConnectionPointer connection;
  std::exception_ptr error;
  try {
    connection = connectTo(peer, limit);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  state.connecting = false;
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
  add(connection);
  introduce(connection, peer);
  return state.out;
}

void Mailbox::send(int peer, FrameKind kind, uint64_t tag, std::span<const std::byte> payload) {
  try {
    sendWithin(timeout_, peer, kind, tag, payload);
  } catch (const Error&) {
    // A peer that failed said why before it left, and nobody may have read that yet.
    const Lock lock(mutex_);
    acceptAll();
    const std::map<int, ConnectionPointer> connections = connections_;
    for (const auto& [descriptor, connection] : connections) readFrom(connection);
    changed_.notify_all();
    throwIfReported();
    throw;
  }
}

void Mailbox::sendFailure(int peer, std::string_view text) {
  sendWithin(std::min(timeout_, kFailureTimeout), peer, FrameKind::failure, 0,
             std::as_bytes(std::span(text.substr(0, kLongestText))));
}

void Mailbox::sendWithin(milliseconds limit, int peer, FrameKind kind, uint64_t tag,
                         std::span<const std::byte> payload) {
  Lock lock(mutex_);
  if (peer == rank_) {
    inbox_[Key(peer, kind, tag)].emplace_back(payload.begin(), payload.end());
    changed_.notify_all();
    return;
  }
  const ConnectionPointer connection = connectionTo(peer, limit, lock);
  if (connection->open) {
    connection->unsent.push_back(encodeFrame(
        {.secret = session_, .kind = kind, .sender = static_cast<uint32_t>(rank_), .tag = tag},
        payload));
    // A rest of an earlier message is the writer's, who keeps the order.
    if (connection->unsent.size() == 1) writeUnsent(connection);
  }
  if (!connection->open) {
    throw Error(ErrorCode::remoteError, "The peer closed its connection: it ended or failed")
        .rank(rank_)
        .peer(peer)
        .remedy("Look for the first error in the output of that rank");
  }
  if (!connection->unsent.empty()) startWriter();
}

void Mailbox::writeUnsent(const ConnectionPointer& connection) {
  while (connection->open && !connection->unsent.empty()) {
    const auto rest = std::span(connection->unsent.front()).subspan(connection->unsentOffset);
    const Transfer transfer = connection->socket.write(rest);
    if (transfer.closed) {
      // What the peer sent before it left is still to be read; the reader then drops it.
      connection->unsent.clear();
      readFrom(connection);
      drop(connection);
      return;
    }
    if (transfer.bytes == 0) return;
    connection->unsentOffset += transfer.bytes;
    if (connection->unsentOffset < connection->unsent.front().size()) continue;
    connection->unsent.pop_front();
    connection->unsentOffset = 0;
  }
}

std::vector<Mailbox::ConnectionPointer> Mailbox::unsentConnections() const {
  std::vector<ConnectionPointer> result;
  for (const auto& [descriptor, connection] : connections_)
    if (!connection->unsent.empty()) result.push_back(connection);
  return result;
}

void Mailbox::startWriter() {
  if (writing_) return;
  // It said so under the lock as its last deed, so this does not wait.
  if (writer_.joinable()) writer_.join();
  writer_ = startThread("unisono-send", [this] { writerLoop(); });
  writing_ = true;
}

void Mailbox::writerLoop() {
  Lock lock(mutex_);
  for (;;) {
    const std::vector<ConnectionPointer> unsent = unsentConnections();
    changed_.notify_all();
    if (unsent.empty() || closing_) {
      writing_ = false;
      return;
    }
    std::vector<pollfd> entries;
    for (const ConnectionPointer& connection : unsent)
      entries.push_back({connection->socket.descriptor(), POLLOUT, 0});
    lock.unlock();
    ::poll(entries.data(), entries.size(), static_cast<int>(Wait::kSlice.count()));
    lock.lock();
    for (const ConnectionPointer& connection : unsent) writeUnsent(connection);
  }
}

}  // namespace unisono::bootstrap
