// SPDX-License-Identifier: Apache-2.0
#include "transport/net/socket_lanes.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/cpu_affinity.h"
#include "base/math.h"
#include "base/open_descriptor.h"
#include "base/thread.h"

namespace unisono::transport {

LaneCounts chooseLanes(int64_t threads, int64_t socketsPerThread, std::string_view vendor) {
  const bool amazon = vendor == "0x1d0f", google = vendor == "0x1ae0";
  if (threads < 0) threads = amazon ? 2 : google ? 4 : 0;
  if (socketsPerThread < 0) socketsPerThread = amazon ? 8 : 1;
  if (threads == 0 || socketsPerThread == 0) return {};
  const int64_t served = std::min<int64_t>(threads, SocketLanes::kMaxThreads);
  const int64_t each = std::min<int64_t>(socketsPerThread, SocketLanes::kMaxSockets / served);
  return {static_cast<uint32_t>(served), static_cast<uint32_t>(served * each)};
}

SocketLanes::SocketLanes(std::vector<bootstrap::Socket> sockets, uint32_t threads,
                         Direction direction, uint32_t slots, std::string_view cores,
                         bool ignoresOwnCores)
    : direction_(direction), pieces_(slots) {
  for (bootstrap::Socket& socket : sockets) {
    Lane& lane = *lanes_.emplace_back(std::make_unique<Lane>());
    lane.socket = std::move(socket);
    lane.pieces.resize(slots);
  }
  const size_t helpers = std::min<size_t>(threads, lanes_.size());
  for (size_t i = 0; i < helpers; i++) {
    helpers_.push_back(std::make_unique<Helper>());
    helpers_.back()->wakeUp =
        openDescriptor([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }, "eventfd");
  }
  if (helpers == 0) return;
  const ScopedCpuAffinity nearPort(cores, ignoresOwnCores);  // threads inherit it
  try {
    for (size_t i = 0; i < helpers; i++) {
      helpers_[i]->thread = startThread("unisono-socket", [this, i] { serve(i); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

void SocketLanes::stop() {
  stops_ = true;
  for (const auto& helper : helpers_) {
    static_cast<void>(::eventfd_write(helper->wakeUp.get(), 1));
    if (helper->thread.joinable()) helper->thread.join();
  }
}

void SocketLanes::wake(Helper& helper) {
  if (helper.sleeps.exchange(false)) static_cast<void>(::eventfd_write(helper.wakeUp.get(), 1));
}

void SocketLanes::start(uint64_t step, std::byte* data, uint32_t bytes,
                        const std::function<void()>& notify) {
  if (!notify_) notify_ = notify;  // threads look at it when a piece is posted
  const size_t pieceBytes =
      std::max<size_t>(kMinPieceBytes, ceilDivide(size_t{bytes}, lanes_.size()));
  pieces_[step % pieces_.size()].store(static_cast<uint32_t>(ceilDivide<size_t>(bytes, pieceBytes)),
                                       std::memory_order_relaxed);
  for (size_t done = 0; done < bytes; done += pieceBytes) {
    Lane& lane = *lanes_[nextLane_];
    const uint64_t posted = lane.posted.load(std::memory_order_relaxed);
    lane.pieces[posted % lane.pieces.size()] = {data + done, std::min(pieceBytes, bytes - done),
                                                step};
    lane.posted.store(posted + 1);
    wake(*helpers_[nextLane_ % helpers_.size()]);
    nextLane_ = (nextLane_ + 1) % lanes_.size();
  }
}

std::vector<const bootstrap::Socket*> SocketLanes::sockets() const {
  std::vector<const bootstrap::Socket*> sockets;
  for (const auto& lane : lanes_) sockets.push_back(&lane->socket);
  return sockets;
}

std::string SocketLanes::failure() const {
  const int error = error_.load(std::memory_order_relaxed);
  return error == 0 ? "" : error == kClosed ? "the peer closed it" : std::strerror(error);
}

bool SocketLanes::isSilence() const {
  return error_.load(std::memory_order_relaxed) == ETIMEDOUT;
}

// Moves what can be moved of the next piece of a lane.
SocketLanes::Found SocketLanes::move(Lane& lane) {
  if (lane.moved == lane.posted.load()) return Found::nothing;
  const Piece& piece = lane.pieces[lane.moved % lane.pieces.size()];
  std::byte* data = piece.data + lane.movedBytes;
  const size_t left = piece.bytes - lane.movedBytes;
  const int socket = lane.socket.descriptor();
  const ssize_t bytes = direction_ == Direction::send
                            ? ::send(socket, data, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : ::recv(socket, data, left, MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    return Found::fullSocket;
  }
  if (bytes <= 0) {
    error_ = bytes == 0 ? kClosed : errno;
    notify_();
    return Found::nothing;
  }
  lane.movedBytes += static_cast<size_t>(bytes);
  if (lane.movedBytes < piece.bytes) return Found::progress;
  lane.movedBytes = 0;
  lane.moved++;
  if (pieces_[piece.step % pieces_.size()].fetch_sub(1, std::memory_order_acq_rel) == 1) notify_();
  return Found::progress;
}

// The body of a helper thread.
void SocketLanes::serve(size_t number) {
  Helper& helper = *helpers_[number];
  std::vector<pollfd> sockets;
  for (bool willSleep = false; !stops_;) {
    sockets.assign(1, {helper.wakeUp.get(), POLLIN, 0});
    bool moved = false;
    for (size_t i = number; i < lanes_.size() && error_ == 0; i += helpers_.size()) {
      const Found found = move(*lanes_[i]);
      moved |= found == Found::progress;
      if (found == Found::fullSocket) {
        const short event = direction_ == Direction::send ? POLLOUT : POLLIN;
        sockets.push_back({lanes_[i]->socket.descriptor(), event, 0});
      }
    }
    if (moved) {
      willSleep = false;
    } else if (!std::exchange(willSleep, true)) {
      // Whoever posts a piece from here on sees that this thread sleeps.
      helper.sleeps.exchange(true);
    } else {
      ::poll(sockets.data(), sockets.size(), -1);
      eventfd_t count = 0;
      if ((sockets.front().revents & POLLIN) != 0) {
        static_cast<void>(::eventfd_read(helper.wakeUp.get(), &count));
      }
      helper.sleeps = willSleep = false;
    }
  }
}

}  // namespace unisono::transport
