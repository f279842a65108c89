// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/rendezvous.h"

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/system.h"

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

// Returns nothing when the root closed the connection without an answer.
std::optional<Frame> readAnswer(const Socket& socket, FrameReader& reader, int rank,
                                const Wait& wait) {
  for (;;) {
    const FrameReader::Status status = reader.read(socket);
    if (status == FrameReader::Status::complete) {
      Frame frame = reader.take();
      if (frame.header.kind != FrameKind::report) return frame;
      logWarn("rank {} has been waiting for {:.0f} s: {}", rank, wait.secondsSinceStart(),
              frame.text());
      continue;
    }
    if (status == FrameReader::Status::closed) return std::nullopt;
    wait.throwIfAborted("waiting for every rank to join");
    if (wait.isExpired()) {
      throw Error(ErrorCode::timeout, fmt::format("The communicator's root at {} does not answer",
                                                  socket.peerAddress().text()))
          .rank(rank);
    }
    socket.sleepUntilReadable(wait);
  }
}

Address listenAddress(const Socket& root, const std::vector<NetworkInterface>& interfaces,
                      const Settings& settings) {
  Address address = root.localAddress();
  if (!settings.socketInterface.empty()) {
    AddressFamily family = parseFamily(settings.socketFamily);
    if (family == AddressFamily::any) family = address.family;
    address = chooseInterface(interfaces, settings.socketInterface, family).address;
  }
  address.port = 0;
  return address;
}

Membership readTable(const Frame& frame, int ranks) {
  Membership result;
  const size_t tableBytes = static_cast<size_t>(ranks) * sizeof(Address);
  if (frame.payload.size() != sizeof(result.session) + tableBytes) {
    throw internalError("The root's table has {} bytes", frame.payload.size());
  }
  std::memcpy(&result.session, frame.payload.data(), sizeof(result.session));
  result.addresses.resize(static_cast<size_t>(ranks));
  std::memcpy(result.addresses.data(), frame.payload.data() + sizeof(result.session), tableBytes);
  return result;
}

}  // namespace

Membership joinRendezvous(const UniqueId& id, int rank, int ranks, const Settings& settings,
                          const std::function<bool()>& aborted) {
  const milliseconds timeout = initTimeoutOf(settings);
  const Wait connecting(timeout, aborted);
  const std::vector<NetworkInterface> interfaces = listInterfaces();
  const Address rootAddress = localizeScope(id.root, interfaces, settings.socketInterface);
  Announcement blank = {.ranks = static_cast<uint32_t>(ranks), .listener = {}};
  processName().copy(blank.process.data(), blank.process.size() - 1);
  const uint64_t tableBytes = sizeof(Secret) + static_cast<uint64_t>(ranks) * sizeof(Address);
  for (int announcements = 1;; announcements++) {
    Socket root = connectToRoot(id, rootAddress, rank, connecting);
    const Wait wait(timeout + kAnswerGrace, aborted);
    Listener listener(listenAddress(root, interfaces, settings), wait);
    Announcement announcement = blank;
    announcement.listener = listener.address();
    FrameReader reader(id.secret, {{FrameKind::table, tableBytes},
                                   {FrameKind::refusal, kLongestText},
                                   {FrameKind::report, kLongestText},
                                   {FrameKind::wrongSecret, 0}});
    std::optional<Frame> frame;
    if (sendAll(root,
                encodeFrame({.secret = id.secret,
                             .kind = FrameKind::announce,
                             .sender = static_cast<uint32_t>(rank)},
                            std::as_bytes(std::span(&announcement, 1))),
                wait)) {
      frame = readAnswer(root, reader, rank, wait);
    }
    if (!frame) {
      // At a fixed address this may also have been the root of the previous communicator.
      const bool gaveUp = !id.fixedAddress && announcements >= kMaxAnnouncements;
      if (gaveUp || connecting.isExpired()) throwUnreachable(id, rootAddress, ECONNRESET, rank);
      connecting.throwIfAborted("announcing itself to the communicator's root");
      std::this_thread::sleep_for(kConnectPause);
      continue;
    }
    if (frame->header.kind == FrameKind::wrongSecret) {
      throw invalidUsage("The communicator's root at {} refused this rank: their secrets differ",
                         rootAddress.text())
          .rank(rank)
          .remedy(
              id.fixedAddress
                  ? "Set NCCL_COMM_ID alike on all ranks, and UNISONO_COMM_KEY_FILE to files with "
                    "the "
                    "same content; if they are, another job uses this port"
                  : "Another job uses this port: the process that made the unique id has ended");
    }
    if (frame->header.kind == FrameKind::refusal) {
      const auto code = static_cast<ErrorCode>(frame->header.tag);
      throw Error(code, frame->text()).rank(rank).remedy(remedyOf(code));
    }
    Membership result = readTable(*frame, ranks);
    for (Address& address : result.addresses) {
      address = localizeScope(address, interfaces, settings.socketInterface);
    }
    result.listener = std::move(listener);
    return result;
  }
}

}  // namespace unisono::bootstrap
