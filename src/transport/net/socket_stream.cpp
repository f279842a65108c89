// SPDX-License-Identifier: Apache-2.0
#include "transport/net/socket_stream.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/net/line_slot.h"

namespace unisono::transport {
namespace {

bool isLater(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

std::string textOf(int error) {
  return std::strerror(error);
}

// Whether the other machine has left data or probes unanswered for so long. Probes of a full window
// are answered by a machine whose process is slow or stopped.
bool isUnanswered(const bootstrap::Socket& socket, std::chrono::milliseconds timeout) {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (::getsockopt(socket.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return false;
  return info.tcpi_retransmits + info.tcpi_probes > 0 &&
         std::chrono::milliseconds(info.tcpi_last_ack_recv) >= timeout;
}

// Bytes that wait for long in the buffer of a socket have left the caches when they are copied on,
// and the system lets that buffer grow to megabytes. Where the handshake has shown that the peer is
// on this host, or as near, the limit carries 14 GB/s; elsewhere the system decides.
void limitBacklog(const bootstrap::Socket& socket) {
  constexpr uint32_t kNearMicroseconds = 30;
  constexpr int kBytes = 208 << 10;  // any process may ask for them; the system grants twice that
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (::getsockopt(socket.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return;
  if (info.tcpi_rtt == 0 || info.tcpi_rtt > kNearMicroseconds) return;
  ::setsockopt(socket.descriptor(), SOL_SOCKET, SO_SNDBUF, &kBytes, sizeof(kBytes));
}

}  // namespace

void limitSilence(const bootstrap::Socket& socket, std::chrono::seconds timeout) {
  const int seconds = static_cast<int>(timeout.count());
  const int idle = std::max(1, seconds / 2), interval = std::max(1, seconds / 12);
  const int probes = std::clamp((seconds - idle) / interval, 1, 127);
  const auto set = [&](int option, int value) {
    ::setsockopt(socket.descriptor(), IPPROTO_TCP, option, &value, sizeof(value));
  };
  set(TCP_KEEPIDLE, idle);
  set(TCP_KEEPINTVL, interval);
  set(TCP_KEEPCNT, probes);
}

SendStream::SendStream(StreamSockets sockets, const StreamMemory& memory)
    : Stream(memory),
      socket_(std::move(sockets.first)),
      timeout_(sockets.timeout),
      lineData_(lineDataBytes()),
      lanes_(std::move(sockets.lanes), sockets.threads, SocketLanes::Direction::send,
             memory.slotCount, sockets.cores, sockets.ignoresOwnCores) {
  limitBacklog(socket_);
  for (const bootstrap::Socket* lane : lanes_.sockets()) limitBacklog(*lane);
}

SendStream::~SendStream() {
  // Without the header the receiver reports a failed connection, which is right if slots are left.
  if (sent_ != 0 || step_ < posted_ || isBegun(posted_) || !failure_.empty()) return;
  const SlotHeader end{static_cast<uint32_t>(step_), SlotHeader::kEnd};
  static_cast<void>(::send(socket_.descriptor(), &end, sizeof(end), MSG_DONTWAIT | MSG_NOSIGNAL));
}

bool SendStream::isPending() const {
  if (!failure_.empty()) return false;
  if (step_ < posted_ || isBegun(posted_)) return true;
  pollfd ready = socket();
  return ::poll(&ready, 1, 0) == 0;
}

// The slot of the next step is filled.
void SendStream::begin() {
  header_ = {static_cast<uint32_t>(posted_), filledBytes(posted_)};
  if (!hasLines()) return;
  header_.bytes = static_cast<uint32_t>(header_.bytes / kLineBytes * kLineDataBytes);
  unpackLines(memory_.slot(posted_), std::span(lineData_).first(header_.bytes));
}

StreamProgress SendStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  for (int i = 0; i < kSlotsAtOnce && isFilled(posted_); i++) {
    if (sent_ == 0) begin();
    if (!write(progress)) break;
    sent_ = 0;
    if (lanes_.carries(header_.bytes)) {
      lanes_.start(posted_, memory_.slot(posted_), header_.bytes, wake_);
    }
    posted_++;
  }
  for (; step_ < posted_ && lanes_.isDone(step_); progress.moved = true) release(step_++);
  if (failure_.empty()) {
    failure_ = lanes_.failure();
    isSilence_ = lanes_.isSilence();
  }
  progress.mustLook = failure_.empty() && step_ < posted_;
  watchPeer(progress);
  return progress;
}

// TCP alone gives up after a quarter of an hour. TCP_USER_TIMEOUT would also end connections to
// receivers that are slow.
void SendStream::watchPeer(const StreamProgress& progress) {
  if (progress.moved || (!progress.waitsForSocket && step_ == posted_)) {
    waitsSince_.reset();
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!waitsSince_) waitsSince_ = now;
  if (now - *waitsSince_ < timeout_ || !failure_.empty()) return;
  std::vector<const bootstrap::Socket*> sockets = lanes_.sockets();
  sockets.push_back(&socket_);
  if (std::ranges::any_of(sockets, [&](auto* each) { return isUnanswered(*each, timeout_); })) {
    failure_ = fmt::format("the machine of the peer has not answered for {} s", timeout_.count());
    isSilence_ = true;
  }
}

// The rest of the header and, unless lanes carry it, the slot. Returns whether all is written.
bool SendStream::write(StreamProgress& progress) {
  const size_t slotBytes = lanes_.carries(header_.bytes) ? 0 : header_.bytes;
  const size_t total = sizeof(header_) + slotBytes;
  std::byte* const data = hasLines() ? lineData_.data() : memory_.slot(posted_);
  while (sent_ < total) {
    iovec parts[2];
    msghdr message{};
    message.msg_iov = parts;
    if (sent_ < sizeof(header_)) {
      parts[message.msg_iovlen++] = {reinterpret_cast<std::byte*>(&header_) + sent_,
                                     sizeof(header_) - sent_};
    }
    const size_t done = std::max(sent_, sizeof(header_)) - sizeof(header_);
    if (done < slotBytes) {
      parts[message.msg_iovlen++] = {data + done, slotBytes - done};
    }
    const ssize_t bytes = ::sendmsg(socket_.descriptor(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (bytes < 0) {
      if (isLater(errno)) {
        progress.waitsForSocket = true;
      } else {
        isSilence_ = errno == ETIMEDOUT;
        failure_ = textOf(errno);
      }
      return false;
    }
    progress.moved = true;
    sent_ += static_cast<size_t>(bytes);
  }
  return true;
}

StreamProgress ReceiveStream::progress() {
  StreamProgress progress;
  if (!failure_.empty()) return progress;
  isEmpty_ = false;
  for (int i = 0; i < kSlotsAtOnce && !ended_ && isFree(posted_); i++) {
    if (!readSlot(progress)) break;
    received_ = 0;
    posted_++;
  }
  for (; step_ < posted_ && lanes_.isDone(step_); progress.moved = true) setTail(++step_);
  if (failure_.empty()) {
    failure_ = lanes_.failure();
    isSilence_ = lanes_.isSilence();
  }
  progress.mustLook = failure_.empty() && step_ < posted_;
  return progress;
}

bool ReceiveStream::readSlot(StreamProgress& progress) {
  if (received_ < sizeof(header_)) {
    auto* header = reinterpret_cast<std::byte*>(&header_);
    if (!read(header + received_, sizeof(header_) - received_, progress)) return false;
    if (header_.bytes == SlotHeader::kEnd) {
      ended_ = true;
      return false;
    }
    const size_t most = hasLines() ? lineData_.size() : memory_.slotBytes;
    if (header_.step != static_cast<uint32_t>(posted_) || header_.bytes > most ||
        (hasLines() && header_.bytes % kLineDataBytes != 0)) {
      failure_ = "its data are not those of this connection";
      return false;
    }
    noteBytes(posted_, header_.bytes);
  }
  if (lanes_.carries(header_.bytes)) {
    lanes_.start(posted_, memory_.slot(posted_), header_.bytes, wake_);
    return true;
  }
  const size_t done = received_ - sizeof(header_);
  std::byte* const data = hasLines() ? lineData_.data() : memory_.slot(posted_);
  if (!read(data + done, header_.bytes - done, progress)) return false;
  if (hasLines()) {
    packLines(std::span(lineData_).first(header_.bytes), memory_.slot(posted_), posted_);
  }
  return true;
}

// Returns whether all is here.
bool ReceiveStream::read(std::byte* into, size_t bytes, StreamProgress& progress) {
  while (bytes > 0) {
    if (aheadBegin_ == aheadEnd_ && bytes <= ahead_.size()) {
      const size_t got = receive(ahead_, progress);
      aheadBegin_ = 0;
      aheadEnd_ = got;
      if (got == 0) return false;
    }
    size_t got = std::min(aheadEnd_ - aheadBegin_, bytes);
    if (got > 0) {
      std::memcpy(into, ahead_.data() + aheadBegin_, got);
      aheadBegin_ += got;
    } else {
      got = receive({into, bytes}, progress);
      if (got == 0) return false;
    }
    received_ += got;
    into += got;
    bytes -= got;
  }
  return true;
}

// A call of recv() that takes a small message also sends its acknowledgment, which takes as long as
// sending data: no data go back over the connection and could carry it. Where the system takes a
// connection for interactive it holds acknowledgments back, which would slow down large messages.
// Sends what was held back, and holds back the next ones.
void ReceiveStream::acknowledge(bool holdsNext) {
  const auto set = [this](int option) {
    ::setsockopt(socket_.descriptor(), IPPROTO_TCP, TCP_QUICKACK, &option, sizeof(option));
  };
  set(1);  // sends it
  if (holdsNext) set(0);
  isInteractive_ = holdsNext;
  owesAcknowledgment_ = false;
}

// Returns 0 if the socket has no more bytes.
size_t ReceiveStream::receive(std::span<std::byte> into, StreamProgress& progress) {
  if (isEmpty_) {
    progress.waitsForSocket = true;
    return 0;
  }
  const ssize_t got = ::recv(socket_.descriptor(), into.data(), into.size(), MSG_DONTWAIT);
  if (got <= 0) {
    if (got < 0 && isLater(errno)) {
      progress.waitsForSocket = true;
      // The answer to the message may be on its way.
      if (owesAcknowledgment_) acknowledge(true);
    } else {
      isSilence_ = got < 0 && errno == ETIMEDOUT;
      failure_ = got == 0 ? "the peer closed it" : textOf(errno);
    }
    return 0;
  }
  progress.moved = true;
  const bool isSmall = static_cast<size_t>(got) < ahead_.size();
  if (isInteractive_ && !isSmall) acknowledge(false);
  owesAcknowledgment_ = isSmall;
  isEmpty_ = static_cast<size_t>(got) < into.size();
  return static_cast<size_t>(got);
}

}  // namespace unisono::transport
