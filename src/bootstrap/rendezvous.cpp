// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/rendezvous.h"

#include <poll.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/system.h"
#include "bootstrap/rank_tree.h"

namespace unisono::bootstrap {
namespace {

using std::chrono::milliseconds;

// Added to the root's own timeout, so that its answer, which names the missing ranks, arrives
// first.
constexpr milliseconds kAnswerGrace{5000};
constexpr milliseconds kConnectPause{20};
// How often a rank announces itself again after the root closed the connection without an answer,
// as it does to make room for others when strangers flood it.
constexpr int kMaxAnnouncements = 20;

// What to do about a refusal of the root, of which only code and text travel.
std::string remedyOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::timeout:
      return "Look at what these ranks report, or set UNISONO_BOOTSTRAP_TIMEOUT to more seconds";
    case ErrorCode::invalidUsage:
      return "Start every rank with a number of its own, the same number of ranks and the same "
             "library";
    default:
      return "Look at what the process that made the unique id reports";
  }
}

[[noreturn]] void throwUnreachable(const UniqueId& id, const Address& root, int error, int rank) {
  Error result(error == ETIMEDOUT ? ErrorCode::timeout : ErrorCode::remoteError,
               fmt::format("Cannot reach the communicator's root at {}: {}{}", root.text(),
                           std::strerror(error),
                           id.fixedAddress ? "; rank 0, which listens there, did not join" : ""));
  result.rank(rank);
  if (id.fixedAddress) {
    result.remedy("Check that rank 0 runs on the machine that NCCL_COMM_ID names");
  } else if (error == ECONNREFUSED) {
    result.remedy(
        "The process that made the unique id has ended, or the id was used before: make one id for "
        "each communicator");
  } else {
    result.remedy(
        "Check that no firewall separates the machines, and that NCCL_SOCKET_IFNAME names a "
        "network "
        "that connects them");
  }
  throw result;
}

// A root at a fixed address may start later than this rank.
Socket connectToRoot(const UniqueId& id, const Address& root, int rank, const Wait& wait) {
  Reminder reminder(kReportInterval);
  for (;;) {
    int error = 0;
    if (auto socket = Socket::connect(root, wait, error)) return std::move(*socket);
    // These also show a full queue of the root's listener.
    const bool mayPass = id.fixedAddress || error == ETIMEDOUT || error == ECONNRESET;
    if (!mayPass || wait.isExpired()) throwUnreachable(id, root, error, rank);
    if (reminder.isDue()) {
      logWarn("rank {} has been trying to reach the communicator's root at {} for {:.0f} s: {}",
              rank, root.text(), wait.secondsSinceStart(), std::strerror(error));
    }
    wait.throwIfAborted("waiting for the communicator's root");
    std::this_thread::sleep_for(std::min(wait.slice(), kConnectPause));
  }
}

bool sendAll(const Socket& socket, std::span<const std::byte> bytes, const Wait& wait) {
  while (!bytes.empty()) {
    const Transfer transfer = socket.write(bytes);
    if (transfer.closed || wait.isExpired()) return false;
    bytes = bytes.subspan(transfer.bytes);
    if (transfer.bytes == 0) socket.sleepUntilWritable(wait);
    wait.throwIfAborted("announcing itself to the communicator's root");
  }
  return true;
}

Address listenAddress(const Socket& root, const Settings& settings) {
  Address address = root.localAddress();
  if (!settings.socketInterface.empty()) {
    AddressFamily family = parseFamily(settings.socketFamily);
    if (family == AddressFamily::any) family = address.family;
    address = chooseInterface(listInterfaces(), settings.socketInterface, family).address;
  }
  address.port = 0;
  return address;
}

// The conversation with one root: this rank announces itself, and the root answers when all that it
// serves have.
class RootVisit {
 public:
  RootVisit(const UniqueId& id, const Address& root, int rank, const Settings& settings,
            const std::function<bool()>& aborted)
      : id_(id),
        address_(root),
        rank_(rank),
        timeout_(timeoutOf(settings)),
        aborted_(aborted),
        connecting_(connectTimeoutOf(settings), aborted) {}

  void connect() {
    root_ = connectToRoot(id_, address_, rank_, connecting_);
    isConnected_ = true;
    reader_.emplace(id_.secret,
                    std::vector<FrameLimit>{
                        {FrameKind::table, sizeof(Secret) + kMaxNeighbours * sizeof(Neighbour)},
                        {FrameKind::refusal, kLongestText},
                        {FrameKind::report, kLongestText},
                        {FrameKind::joined, 0},
                        {FrameKind::wrongSecret, 0}});
    answering_.emplace(timeout_ ? std::optional(*timeout_ + kAnswerGrace) : std::nullopt, aborted_);
  }
  void announce(const Announcement& announcement) {
    announcement_ = announcement;
    announcements_++;
    isClosed_ = !send({.kind = FrameKind::announce}, std::as_bytes(std::span(&announcement_, 1)));
  }

  const Socket& socket() const { return root_; }
  bool isAnswered() const { return table_.has_value(); }
  // After isAnswered().
  const Frame& table() const { return *table_; }

  // Reads what has arrived. Throws the root's refusal, and Error(timeout) when it does not answer.
  void proceed() {
    if (isAnswered()) return;
    if (isClosed_ || !read()) repeat();
    if (isAnswered()) return;
    answering_->throwIfAborted("waiting for every rank to join");
    if (answering_->isExpired()) {
      throw Error(ErrorCode::timeout,
                  fmt::format("The communicator's root at {} has not answered for {:.0f} s",
                              address_.text(), answering_->secondsSinceStart()))
          .rank(rank_)
          .remedy("Check whether the process that made the unique id is stopped");
    }
  }

  // What the root has refused this rank with; empty if it has not.
  const std::string& refusal() const { return refusal_; }

  // Whether the root has said that all that it serves have joined. True once.
  bool takeJoined() { return std::exchange(isJoined_, false); }
  void sendJoined() { send({.kind = FrameKind::joined}, {}); }

  // Tells a root that has not answered yet what ended the rendezvous of another one.
  void fail(ErrorCode code, std::string_view text) noexcept {
    if (isAnswered() || !refusal_.empty()) return;
    try {
      if (!isConnected_) connect();
      send({.kind = FrameKind::refusal, .tag = static_cast<uint64_t>(code)},
           std::as_bytes(std::span(text.substr(0, kLongestText))));
    } catch (const std::exception&) {
      // That root has ended as well.
    }
  }

 private:
  // Returns false when the root has closed the connection.
  bool send(FrameHeader header, std::span<const std::byte> payload) {
    header.secret = id_.secret;
    header.sender = static_cast<uint32_t>(rank_);
    return sendAll(root_, encodeFrame(header, payload), *answering_);
  }

  // Returns false when the root closed the connection without an answer.
  bool read() {
    for (;;) {
      const FrameReader::Status status = reader_->read(root_);
      if (status == FrameReader::Status::closed) return false;
      if (status == FrameReader::Status::incomplete) return true;
      Frame frame = reader_->take();
      if (frame.header.kind == FrameKind::report) {
        logWarn("rank {} has been waiting for {:.0f} s: {}", rank_, answering_->secondsSinceStart(),
                frame.text());
        continue;
      }
      if (frame.header.kind == FrameKind::joined) {
        isJoined_ = true;
        continue;
      }
      if (frame.header.kind == FrameKind::table) {
        table_ = std::move(frame);
        return true;
      }
      if (frame.header.kind == FrameKind::refusal) {
        const auto code = static_cast<ErrorCode>(frame.header.tag);
        refusal_ = frame.text();
        throw Error(code, refusal_).rank(rank_).remedy(remedyOf(code));
      }
      throw invalidUsage("The communicator's root at {} refused this rank: their secrets differ",
                         address_.text())
          .rank(rank_)
          .remedy(
              id_.fixedAddress
                  ? "Set NCCL_COMM_ID to the same value on all ranks, and UNISONO_COMM_KEY_FILE to "
                    "files with "
                    "the same content; if they are, another job uses this port"
                  : "Another job uses this port: the process that made the unique id has ended");
    }
  }

  // At a fixed address this may also have been the root of the previous communicator.
  void repeat() {
    const bool gaveUp = !id_.fixedAddress && announcements_ >= kMaxAnnouncements;
    if (gaveUp || connecting_.isExpired()) {
      throwUnreachable(id_, address_, ECONNRESET, rank_);
    }
    connecting_.throwIfAborted("announcing itself to the communicator's root");
    std::this_thread::sleep_for(kConnectPause);
    connect();
    announce(announcement_);
  }

  const UniqueId& id_;
  const Address address_;
  const int rank_;
  const std::optional<milliseconds> timeout_;
  const std::function<bool()>& aborted_;
  const Wait connecting_;
  std::optional<Wait> answering_;
  Socket root_;
  std::optional<FrameReader> reader_;
  Announcement announcement_;
  int announcements_ = 0;
  bool isConnected_ = false, isClosed_ = false, isJoined_ = false;
  std::optional<Frame> table_;
  std::string refusal_;
};

// Sleeps until one of the visits can go on, for a slice at most.
void sleepUntilReadable(const RootVisit& own, const std::optional<RootVisit>& above) {
  pollfd sockets[2];
  nfds_t count = 0;
  if (!own.isAnswered()) sockets[count++] = {own.socket().descriptor(), POLLIN, 0};
  if (above && !above->isAnswered()) sockets[count++] = {above->socket().descriptor(), POLLIN, 0};
  ::poll(sockets, count, static_cast<int>(Wait::longestSlice().count()));
}

void readTable(const Frame& frame, Membership& membership) {
  const size_t size = frame.payload.size();
  if (size < sizeof(membership.session) || (size - sizeof(Secret)) % sizeof(Neighbour) != 0) {
    throw internalError("The root's table has {} bytes", size);
  }
  std::memcpy(&membership.session, frame.payload.data(), sizeof(membership.session));
  for (size_t at = sizeof(Secret); at < size; at += sizeof(Neighbour)) {
    Neighbour neighbour;
    std::memcpy(&neighbour, frame.payload.data() + at, sizeof(neighbour));
    membership.neighbours.insert_or_assign(static_cast<int>(neighbour.rank), neighbour.listener);
  }
}

uint64_t hashOf(std::span<const UniqueId> ids) {
  Fnv hash;
  for (const UniqueId& id : ids) {
    for (const uint64_t part : id.secret) hash.add(part);
  }
  return hash.value();
}

}  // namespace

Membership joinRendezvous(std::span<const UniqueId> ids, int rank, int ranks,
                          const Settings& settings, const std::function<bool()>& aborted) {
  const auto localize = [filter = settings.socketInterface](const Address& address) {
    // Listing takes time.
    return address.isLinkLocal() ? localizeScope(address, listInterfaces(), filter) : address;
  };
  const RankTree tree{rank, ranks, static_cast<int>(ids.size())};
  const auto visit = [&](int block, std::optional<RootVisit>& to) {
    const UniqueId& id = ids[static_cast<size_t>(block)];
    to.emplace(id, localize(id.root), rank, settings, aborted);
  };
  std::optional<RootVisit> own, above;
  visit(tree.block(), own);
  if (tree.isHead() && tree.parentBlock() >= 0) visit(tree.parentBlock(), above);

  Membership result;
  result.ranks = ranks;
  try {
    if (above) above->connect();
    own->connect();
    result.listener =
        Listener(listenAddress(own->socket(), settings), Wait(connectTimeoutOf(settings), aborted));
    Announcement announcement = {.ranks = static_cast<uint32_t>(ranks),
                                 .listener = result.listener.address(),
                                 .roots = static_cast<uint32_t>(ids.size()),
                                 .root = static_cast<uint32_t>(tree.block()),
                                 .ids = hashOf(ids)};
    processName().copy(announcement.process.data(), announcement.process.size() - 1);
    own->announce(announcement);
    if (above) {
      announcement.root = static_cast<uint32_t>(tree.parentBlock());
      above->announce(announcement);
    }
    bool allJoined = false;
    while (!own->isAnswered()) {
      sleepUntilReadable(*own, above);
      own->proceed();
      if (!above) continue;
      above->proceed();
      if (own->takeJoined()) above->sendJoined();
      if (above->isAnswered() && !std::exchange(allJoined, true)) own->sendJoined();
    }
  } catch (const Error& error) {
    // Those whom the other root serves would otherwise learn no more than that this rank has left.
    if (above && !(aborted && aborted())) {
      std::string text = own->refusal() + above->refusal();
      if (text.empty()) text = error.what();
      own->fail(error.code(), text);
      above->fail(error.code(), text);
    }
    throw;
  }
  if (above) readTable(above->table(), result);
  readTable(own->table(), result);
  if (ids.size() > 1) {
    // None of the roots knows the secrets of the others.
    result.session = {};
    for (const UniqueId& id : ids) {
      for (size_t i = 0; i < result.session.size(); i++) result.session[i] ^= id.secret[i];
    }
  }
  result.localize = localize;
  return result;
}

}  // namespace unisono::bootstrap
